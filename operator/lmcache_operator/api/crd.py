"""The CustomResourceDefinitions: LMCacheCluster, from the dataclasses in ``types.py``, and LMCacheProfile."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

from lmcache_operator.api import GROUP, KIND, PLURAL, PROFILE_KIND, PROFILE_PLURAL, VERSION
from lmcache_operator.api.documents import dump
from lmcache_operator.api.fields import Field, Rule, is_part
from lmcache_operator.api.types import CLUSTER_NAME, Spec, Status

_HEADER = "# Generated from operator/lmcache_operator/api by `make generate`.\n"
_UNKNOWN = "x-kubernetes-preserve-unknown-fields"
_TYPES = {str: {"type": "string"}, int: {"type": "integer"}}
_ADDED = ("containers", "initContainers", "resourceClaims", "securityContext", "volumes")
"""Fields of a pod that one of somebody else's is given."""
_OF_EVERY_OBJECT = {"apiVersion": _TYPES[str], "kind": _TYPES[str], "metadata": {"type": "object"}}


def crd(definitions: Mapping[str, Any]) -> dict[str, Any]:
    """The one of LMCacheClusters as a plain object, with Kubernetes' own types as ``definitions`` have them.

    With them the API server refuses a wrong type in a pod template, kubectl an unknown field, and neither
    lets one through that is nested without end.
    """
    root = {
        "type": "object",
        "description": "Engine pods of an LLM server, each with a sidecar that keeps their KV in tiers.",
        "required": ["spec"],
        "properties": {
            **_OF_EVERY_OBJECT,
            "spec": {"description": "What the cluster should be.", **_type_schema(Spec)},
            "status": {"description": "What the operator sees.", **_type_schema(Status)},
        },
        **_validations((CLUSTER_NAME,)),
    }  # fmt: skip
    more = {"subresources": {"status": {}, "scale": _SCALE}, "additionalPrinterColumns": _COLUMNS}
    names = {"shortNames": ["lmcluster"], "categories": ["lmcache"]}
    return _definition(KIND, PLURAL, _resolved(root, definitions), names, more)


def profile_crd(definitions: Mapping[str, Any]) -> dict[str, Any]:
    """The one of LMCacheProfiles, which the operator writes, and the admission of pods reads.

    Its template has those fields of a pod that are added to somebody's.
    """
    spec = definitions["io.k8s.api.core.v1.PodSpec"]["properties"]
    annotations = {"type": "object", "additionalProperties": _TYPES[str]}
    template = {
        "type": "object",
        "description": "What is added: to the pod, and as its one container, to the engine's.",
        "required": ["metadata", "spec"],
        "properties": {
            "metadata": {"type": "object", "properties": {"annotations": annotations}},
            "spec": {
                "type": "object",
                "required": ["containers", "initContainers", "securityContext", "volumes"],
                "properties": {name: _structural(spec[name], definitions) for name in _ADDED},
            },
        },
    }
    root = {
        "type": "object",
        "description": "What pods get that ask for the cache of an LMCacheCluster. The operator writes it.",
        "required": ["template"],
        "properties": {**_OF_EVERY_OBJECT, "template": template},
    }
    columns = [_column("Age", ".metadata.creationTimestamp", "date")]
    return _definition(PROFILE_KIND, PROFILE_PLURAL, root, {}, {"additionalPrinterColumns": columns})


def render(definitions: Mapping[str, Any]) -> dict[str, str]:
    """The CRDs as they are checked in, by their names."""
    found = (crd(definitions), profile_crd(definitions))
    return {one["metadata"]["name"]: _HEADER + dump([one]) for one in found}


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
        "metadata": {"name": f"{plural}.{GROUP}"},
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
    _column("Memory", ".spec.tiers.memory.size"),
    _column("Age", ".metadata.creationTimestamp", "date"),
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
        if name.endswith(".Time"):
            found["format"] = "date-time"  # else it is refused later, by nobody who names the field
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
