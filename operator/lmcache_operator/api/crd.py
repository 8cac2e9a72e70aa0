"""The CustomResourceDefinition, generated from the dataclasses in ``types.py``."""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping
from typing import Any

import yaml

from lmcache_operator.api import CRD_NAME, GROUP, KIND, PLURAL, VERSION
from lmcache_operator.api.fields import Field, Rule, is_part
from lmcache_operator.api.types import CLUSTER_NAME, Spec, Status

_HEADER = "# Generated from operator/lmcache_operator/api by `make generate`.\n"
_UNKNOWN = "x-kubernetes-preserve-unknown-fields"
_TYPES = {str: {"type": "string"}, int: {"type": "integer"}}


def crd(definitions: Mapping[str, Any]) -> dict[str, Any]:
    """The CRD as a plain object, with Kubernetes' own types as ``definitions`` have them.

    With them the API server refuses a wrong type in a pod template, kubectl an unknown field, and neither
    lets one through that is nested without end.
    """
    root = {
        "type": "object",
        "description": "Engine pods of an LLM server, each with a sidecar that keeps their KV in tiers.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"},
            "spec": {"description": "What the cluster should be.", **_type_schema(Spec)},
            "status": {"description": "What the operator sees.", **_type_schema(Status)},
        },
        **_validations((CLUSTER_NAME,)),
    }  # fmt: skip
    schema = {"openAPIV3Schema": _resolved(root, definitions)}
    version = {
        "name": VERSION, "served": True, "storage": True, "schema": schema,
        "subresources": {"status": {}, "scale": _SCALE}, "additionalPrinterColumns": _COLUMNS,
    }  # fmt: skip
    names = {
        "kind": KIND, "listKind": f"{KIND}List", "plural": PLURAL, "singular": KIND.lower(),
        "shortNames": ["lmcluster"], "categories": ["lmcache"],
    }  # fmt: skip
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD_NAME},
        "spec": {"group": GROUP, "names": names, "scope": "Namespaced", "versions": [version]},
    }


def render(definitions: Mapping[str, Any]) -> str:
    """The CRD as it is checked in."""
    return _HEADER + dump([crd(definitions)])


def dump(documents: list[dict[str, Any]]) -> str:
    """YAML for people and for ``kubectl apply``: documents with keys in the order they were put in."""
    # What is used twice would be written as an anchor and an alias; a copy is not used twice.
    unshared = json.loads(json.dumps(documents))
    return str(yaml.safe_dump_all(unshared, sort_keys=False, width=110))


def _column(name: str, path: str, kind: str = "string", **more: int) -> dict[str, Any]:
    return {"name": name, "type": kind, "jsonPath": path, **more}


_SCALE = {
    "specReplicasPath": ".spec.engine.replicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".status.selector",
}
_COLUMNS = [
    _column("Model", ".spec.model.name"),
    _column("Desired", ".spec.engine.replicas", "integer"),
    _column("Ready", ".status.readyReplicas", "integer"),
    _column("Status", ".status.conditions[?(@.type=='Ready')].reason"),
    _column("Memory", ".spec.tiers.memory.size"),
    _column("Age", ".metadata.creationTimestamp", "date"),
    _column("Transfer", ".status.transfer.mode", priority=1),
    _column("Disk", ".spec.tiers.disk.size", priority=1),
    _column("Remote", ".spec.tiers.remote.external.url", priority=1),
    _column("Message", ".status.conditions[?(@.type=='Ready')].message", priority=1),
]


def _type_schema(annotation: Any) -> dict[str, Any]:
    if is_part(annotation):
        fields = annotation.FIELDS
        properties = {field.json_name: _field_schema(field) for field in fields}
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        if required := [field.json_name for field in fields if field.is_required]:
            schema["required"] = required
        return schema | _validations(annotation.RULES)
    origin = typing.get_origin(annotation)
    if origin is list:
        return {"type": "array", "items": _type_schema(typing.get_args(annotation)[0])}
    if origin is dict:
        return {"type": "object", _UNKNOWN: True}
    return _TYPES[annotation]


def _field_schema(field: Field) -> dict[str, Any]:
    schema = {"description": field.description, **_type_schema(field.type), **field.keywords}
    schema |= _validations(field.rules)
    if field.default is not None:
        # With the defaults of its own fields: rules are checked against a default as it stands here.
        own = {name: own["default"] for name, own in schema.get("properties", {}).items() if "default" in own}
        schema["default"] = own or field.default
    return schema


def _resolved(schema: dict[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """With the types of Kubernetes written out where a field has their shape."""
    if shape := schema.pop("shape", None):
        kind, _, member = shape.partition(".")
        own = {"$ref": f"/io.k8s.api.core.v1.{kind}"}
        if member:
            own = definitions[f"io.k8s.api.core.v1.{kind}"]["properties"][member]
        kept = {key: value for key, value in schema.items() if key not in (_UNKNOWN, "items")}
        return kept | _structural(own, definitions)
    if properties := schema.get("properties"):
        schema["properties"] = {name: _resolved(own, definitions) for name, own in properties.items()}
    return schema


_PARTIAL = ("PodSpec", "Volume")
"""What stands for a part only: what they require, containers and a name, is ours."""
_LEFT_OUT = ("ephemeralContainers", "managedFields")
"""What only the API server writes; the latter is an object of no known form, which has no end."""


def _structural(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON schema in the form that a CRD takes: no references, one type for each field.

    Null is allowed everywhere: merged into the rendered pod, it removes.
    """
    if ref := schema.get("$ref"):
        name = ref.rpartition("/")[2]
        found = _structural(definitions[name], definitions)
        if name.rpartition(".")[2] in _PARTIAL:
            found.pop("required", None)
        return found
    if isinstance(schema["type"], list):  # quantities, ports by number or name
        return {"x-kubernetes-int-or-string": True}
    found = {key: schema[key] for key in ("type", "enum", "required") if key in schema}
    if "properties" in schema:
        named = {name: own for name, own in schema["properties"].items() if name not in _LEFT_OUT}
        of = {name: _structural(own, definitions) | {"nullable": True} for name, own in named.items()}
        found["properties"] = of
    for key in ("items", "additionalProperties"):
        if schema.get(key):
            found[key] = _structural(schema[key], definitions)
    return found


def _validations(rules: tuple[Rule, ...]) -> dict[str, Any]:
    found = [{"rule": rule.cel, "message": rule.message} for rule in rules if rule.cel]
    return {"x-kubernetes-validations": found} if found else {}
