"""The CustomResourceDefinitions: LMCacheCluster, from the dataclasses in ``types.py``, and LMCacheProfile."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

from lmcache_operator import __version__
from lmcache_operator.api import GROUP, HEARTBEAT, KIND, PLURAL, PROFILE_KIND, PROFILE_PLURAL, VERSION
from lmcache_operator.api.documents import dump
from lmcache_operator.api.engine_kinds import ENGINE_KINDS
from lmcache_operator.api.fields import Field, Rule, is_part
from lmcache_operator.api.keywords import CLUSTER_NAME, NAMING
from lmcache_operator.api.types import Spec, Status

_HEADER = "# Generated from operator/lmcache_operator/api by `make generate`.\n"
_UNKNOWN = "x-kubernetes-preserve-unknown-fields"
_TYPES = {str: {"type": "string"}, int: {"type": "integer"}, bool: {"type": "boolean"}}
_INJECTED = ("containers", "initContainers", "resourceClaims", "securityContext", "volumes")
"""Pod fields that injection adds to a user's pod."""
_OF_EVERY_OBJECT = {"apiVersion": _TYPES[str], "kind": _TYPES[str], "metadata": {"type": "object"}}


def crd(definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the CRD of LMCacheCluster as a plain object.

    ``definitions`` are the JSON schemas of Kubernetes' own types. They let the API server refuse wrong types
    in a pod template, and kubectl unknown fields. Both refuse unbounded nesting.
    """
    more = {"subresources": {"status": {}, "scale": _SCALE}, "additionalPrinterColumns": _COLUMNS}
    names = {"shortNames": ["lmcluster"], "categories": ["lmcache"]}
    return _definition(KIND, PLURAL, _resolved(_declared_schema(), definitions), names, more)


def _declared_schema() -> dict[str, Any]:
    """Return the schema of LMCacheCluster. The keyword ``shape`` stands for the types of Kubernetes."""
    return {
        "type": "object",
        "description": "Engine pods of an LLM server, each with a sidecar that caches KV in tiers.",
        "required": ["spec"],
        "properties": {
            **_OF_EVERY_OBJECT,
            "spec": {"description": "The declared state of the cluster.", **_type_schema(Spec)},
            "status": {"description": "The observed state of the cluster.", **_type_schema(Status)},
        },
        **_validations((CLUSTER_NAME, *NAMING)),
    }  # fmt: skip


def profile_crd(definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the CRD of LMCacheProfile. The operator writes profiles, and the admission of pods reads them.

    The template has the pod fields that injection adds to a user's pod.
    """
    spec = definitions["io.k8s.api.core.v1.PodSpec"]["properties"]
    annotations = {"type": "object", "additionalProperties": _TYPES[str]}
    template = {
        "type": "object",
        "description": "Additions to the pod. Its containers have the additions to a container that runs the "
        f"engine, one for each kind in this order: {', '.join(ENGINE_KINDS)}.",
        "required": ["metadata", "spec"],
        "properties": {
            "metadata": {"type": "object", "properties": {"annotations": annotations}},
            "spec": {
                "type": "object",
                "required": ["containers", "initContainers", "securityContext", "volumes"],
                "properties": {name: _structural(spec[name], definitions) for name in _INJECTED},
            },
        },
    }
    root = {
        "type": "object",
        "description": "Additions to pods that use the cache of an LMCacheCluster. The operator writes it.",
        "required": ["template"],
        "properties": {**_OF_EVERY_OBJECT, "template": template},
    }
    columns = [_column("Age", ".metadata.creationTimestamp", "date")]
    return _definition(PROFILE_KIND, PROFILE_PLURAL, root, {}, {"additionalPrinterColumns": columns})


def render(definitions: Mapping[str, Any]) -> dict[str, str]:
    """Return the CRDs as checked-in YAML files, by name."""
    crds = (crd(definitions), profile_crd(definitions))
    return {document["metadata"]["name"]: _HEADER + dump([document]) for document in crds}


def _definition(kind: str, plural: str, schema: Any, names: Any, more: Any) -> dict[str, Any]:
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        **more,
    }
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower(), **names}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}", "labels": {"app.kubernetes.io/version": __version__}},
        "spec": {"group": GROUP, "names": names, "scope": "Namespaced", "versions": [version]},
    }


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
    _column("Degraded", ".status.conditions[?(@.type=='Degraded')].reason"),
    _column("Memory", ".spec.tiers.memory.size"),
    _column("Heartbeat", f".status.{HEARTBEAT}", "date"),
    _column("Age", ".metadata.creationTimestamp", "date"),
    _column("Generation", ".metadata.generation", "integer", priority=1),
    _column("Observed", ".status.observedGeneration", "integer", priority=1),
    _column("Engine", ".spec.engine.kind", priority=1),
    _column("Transfer", ".status.transfer.mode", priority=1),
    _column("Disk", ".spec.tiers.disk.size", priority=1),
    _column("Remote", ".spec.tiers.remote.external.url", priority=1),
    _column("Shards", ".status.remote.readyShards", "integer", priority=1),
    _column("Recommended", ".status.autoscaling.memory.recommended", priority=1),
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
        # The API server checks rules against this default, so it includes the defaults of the inner fields.
        inner = schema.get("properties", {}).items()
        defaults = {name: value["default"] for name, value in inner if "default" in value}
        schema["default"] = defaults or field.default
    return schema


def _resolved(schema: dict[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with the Kubernetes types that fields have as their shape."""
    if shape := schema.pop("shape", None):
        kind, _, member = shape.partition(".")
        name = f"io.k8s.api.{'networking' if kind.startswith('NetworkPolicy') else 'core'}.v1.{kind}"
        source = definitions[name]["properties"][member] if member else {"$ref": f"/{name}"}
        base = {key: value for key, value in schema.items() if key not in (_UNKNOWN, "items")}
        return base | _structural(source, definitions)
    if properties := schema.get("properties"):
        schema["properties"] = {name: _resolved(value, definitions) for name, value in properties.items()}
    return schema


_PARTIAL = ("PodSpec", "Volume")
"""Types that users write in part. The operator adds the required fields, containers and a name."""
_QUANTITY = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"
"""Source: Kubernetes, ``apimachinery/pkg/api/resource``, the grammar in the documentation of ``Quantity``."""
_CHECKED = {"Time": {"format": "date-time"}, "Quantity": {"pattern": _QUANTITY}}
"""Keywords without which a later refusal would not name the field."""
_LEFT_OUT = ("ephemeralContainers", "managedFields")
"""Fields that only the API server writes. The form of ``managedFields`` is unbounded."""


def _structural(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema in the form that a CRD needs: no references, one type for each field.

    Every field may be null, because null removes a field when it is merged into the rendered pod.
    """
    if ref := schema.get("$ref"):
        name = ref.rpartition("/")[2]
        result = _structural(definitions[name], definitions)
        result |= _CHECKED.get(name.rpartition(".")[2], {})
        if name.rpartition(".")[2] in _PARTIAL:
            result.pop("required", None)
        return result
    if isinstance(schema["type"], list):  # quantities, ports by number or name
        return {"x-kubernetes-int-or-string": True}
    result = {key: schema[key] for key in ("type", "enum", "required") if key in schema}
    if "properties" in schema:
        fields = {name: value for name, value in schema["properties"].items() if name not in _LEFT_OUT}
        nullable = {
            name: _structural(value, definitions) | {"nullable": True} for name, value in fields.items()
        }
        result["properties"] = nullable
    for key in ("items", "additionalProperties"):
        if schema.get(key):
            result[key] = _structural(schema[key], definitions)
    return result


def _validations(rules: tuple[Rule, ...]) -> dict[str, Any]:
    validations = [{"rule": rule.cel, "message": rule.message} for rule in rules if rule.cel]
    return {"x-kubernetes-validations": validations} if validations else {}
