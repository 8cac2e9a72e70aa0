"""Check manifests against the schemas of Kubernetes, without a network.

    python -m tools.kube.schemas CHART      # the chart's manifests, with each set of values
    python -m testing.kube.openapi | python -m tools.kube.schemas --write    # update schemas.json

kubeconform usually downloads a schema per kind. This project has one file with the kinds that chart and
operator create. It refuses unknown fields.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.kube import binaries

SCHEMAS = Path(__file__).with_name("schemas.json")
KINDS = (
    "v1/ConfigMap", "v1/PodTemplate", "v1/Service", "v1/ServiceAccount",
    "apps/v1/Deployment", "apps/v1/StatefulSet",
    "policy/v1/PodDisruptionBudget", "networking.k8s.io/v1/NetworkPolicy",
    "resource.k8s.io/v1/ResourceClaimTemplate",
    "rbac.authorization.k8s.io/v1/ClusterRole", "rbac.authorization.k8s.io/v1/ClusterRoleBinding",
    "rbac.authorization.k8s.io/v1/Role", "rbac.authorization.k8s.io/v1/RoleBinding",
    "apiextensions.k8s.io/v1/CustomResourceDefinition",
    "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy",
    "admissionregistration.k8s.io/v1/MutatingAdmissionPolicyBinding",
    "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy",
    "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicyBinding",
)  # fmt: skip
VALUES: tuple[tuple[str, ...], ...] = (
    (),
    (
        "watchNamespaces={a,b}", "crds.enabled=false", "metrics.service.enabled=false",
        "policies.restrictClusters.enabled=false", "policies.warnOfDiscardedKV.enabled=false",
    ),
    (
        "image.digest=sha256:" + "0" * 64, "imagePullSecrets[0].name=x",
        "defaults.sidecarImage=i:1", "defaults.shardImage=i:1", "defaults.routerImage=i:1", "podLabels.a=b",
        "nodeSelector.a=b", "tolerations[0].key=x",
        "serviceAccount.annotations.a=b", "priorityClassName=high", "allowAllGpusSidecar=true",
        "assignedIds=true", "metrics.networkPolicy.enabled=true",
    ),
)  # fmt: skip
"""Sets of values that together turn every part of the templates on and off."""

_POLICIES = ("--api-versions", "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy")
"""Helm option for an API of Kubernetes 1.36, which Helm may not know."""

Schema = dict[str, Any]


def convert(openapi: Schema) -> Schema:
    """Convert an OpenAPI v2 document to one JSON schema for `KINDS`, with only the necessary definitions."""
    source: dict[str, Schema] = openapi["definitions"]
    roots = {}
    for name, definition in source.items():
        for gvk in definition.get("x-kubernetes-group-version-kind", []):
            roots["/".join(filter(None, (gvk["group"], gvk["version"], gvk["kind"])))] = name
    needed, queue = {}, [roots[kind] for kind in KINDS]
    while queue:
        name = queue.pop()
        if name not in needed:
            needed[name] = _strict(source[name])
            queue += _references(needed[name])
    is_kind = [_is_kind(kind) for kind in KINDS]
    rules = [
        {"if": test, "then": {"$ref": f"#/definitions/{roots[kind]}"}}
        for test, kind in zip(is_kind, KINDS, strict=True)
    ]
    # Without this name, kubeconform reads draft 4, which has no conditions and accepts anything.
    draft = "http://json-schema.org/draft-07/schema#"
    return {"$schema": draft, "anyOf": is_kind, "allOf": rules, "definitions": needed}


def definitions() -> dict[str, Schema]:
    """Return the types of Kubernetes by their full names."""
    schemas: dict[str, Schema] = json.loads(SCHEMAS.read_text())["definitions"]
    return schemas


def _is_kind(kind: str) -> Schema:
    api_version, _, name = kind.rpartition("/")
    properties = {"apiVersion": {"const": api_version}, "kind": {"const": name}}
    return {"required": list(properties), "properties": properties}


def _references(schema: Schema) -> Iterator[str]:
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):  # the schema of a CRD has a property of this name
            yield value.removeprefix("#/definitions/")
        elif isinstance(value, dict):
            yield from _references(value)


def _strict(schema: Schema) -> Schema:
    """Drop descriptions, and refuse unknown fields as ``kubectl --validate=strict`` does."""
    if schema.get("format") == "int-or-string":
        return {"type": ["integer", "string"]}
    strict: Schema = {key: schema[key] for key in ("type", "$ref", "enum", "required") if key in schema}
    if "items" in schema:
        strict["items"] = _strict(schema["items"])
    if "properties" in schema:
        strict["properties"] = {name: _strict(value) for name, value in schema["properties"].items()}
        strict["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        strict["additionalProperties"] = _strict(schema["additionalProperties"])
    if schema.get("description", "").startswith("Quantity is"):
        strict["type"] = ["string", "number"]
    return strict


def validate(manifests: str) -> list[str]:
    """Return the problems in a stream of YAML documents, one line each."""
    argv = [str(binaries.path("kubeconform")), "-strict", "-output=json", f"-schema-location={SCHEMAS}", "-"]
    done = subprocess.run(argv, input=manifests, capture_output=True, text=True)
    try:
        resources = json.loads(done.stdout)["resources"]
    except ValueError:
        return [done.stdout + done.stderr]
    return [f"{r['kind']} {r['name']}: {r['msg']}" for r in resources if r["status"] != "statusValid"]


def chart_errors(chart: Path) -> Iterator[str]:
    for values in VALUES:
        settings = [part for value in values for part in ("--set", value)]
        argv = [str(binaries.path("helm")), "template", "release", str(chart), *_POLICIES, *settings]
        done = subprocess.run(argv, capture_output=True, text=True)
        yield from validate(done.stdout) if done.returncode == 0 else [done.stderr.strip()]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chart", nargs="?", type=Path)
    parser.add_argument(
        "--write",
        action="store_true",
        help="update schemas.json from an OpenAPI v2 document on standard input",
    )
    options = parser.parse_args()
    if options.write:
        schema = convert(json.load(sys.stdin))
        SCHEMAS.write_text(json.dumps(schema, separators=(",", ":"), sort_keys=True) + "\n")
    errors = list(chart_errors(options.chart)) if options.chart else []
    for error in errors:
        print(error)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
