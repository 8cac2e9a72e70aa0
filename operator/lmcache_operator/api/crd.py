"""The CustomResourceDefinition, generated from the dataclasses in `types.py`."""

from __future__ import annotations

import typing
from typing import Any

from . import CRD_NAME, GROUP, KIND, PLURAL, VERSION
from .fields import Field, Rule, is_part
from .plain_yaml import dump
from .types import CLUSTER_NAME, Spec, Status

_HEADER = "# Generated from operator/lmcache_operator/api by `make generate`.\n"
_TYPES = {str: {"type": "string"}, int: {"type": "integer"}}


def crd() -> dict[str, Any]:
    """The CRD as a plain object."""
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
    version = {
        "name": VERSION, "served": True, "storage": True, "schema": {"openAPIV3Schema": root},
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


def render() -> str:
    """The CRD as it is checked in."""
    return _HEADER + dump([crd()])


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
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return _TYPES[annotation]


def _field_schema(field: Field) -> dict[str, Any]:
    schema = {"description": field.description, **_type_schema(field.type), **field.keywords}
    schema |= _validations(field.rules)
    if field.default is not None:
        # With the defaults of its own fields: rules are checked against a default as it stands here.
        own = {name: own["default"] for name, own in schema.get("properties", {}).items() if "default" in own}
        schema["default"] = own or field.default
    return schema


def _validations(rules: tuple[Rule, ...]) -> dict[str, Any]:
    found = [{"rule": rule.cel, "message": rule.message} for rule in rules]
    return {"x-kubernetes-validations": found} if found else {}
