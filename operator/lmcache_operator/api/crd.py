"""The CustomResourceDefinition, generated from the dataclasses in `types.py`."""

from __future__ import annotations

import dataclasses
import typing
from enum import StrEnum
from typing import Any

from . import CRD_NAME, GROUP, KIND, PLURAL, VERSION
from .fields import FieldInfo, Rule, fields_of
from .plain_yaml import dump
from .types import Spec, Status

_SCALARS = {str: "string", int: "integer"}
_HEADER = "# Generated from operator/lmcache_operator/api by `python -m lmcache_operator crd`.\n"
# The longest child name is "<name>-engine-<ten-letter revision>" as a label value: at most 63.
_NAME_RULE = Rule(
    "self.metadata.name.matches('^[a-z]([-a-z0-9]{0,43}[a-z0-9])?$')",
    "metadata.name must start with a letter, hold only a-z, 0-9 and '-', and have at most 45 characters",
    lambda _: True,
)


def crd() -> dict[str, Any]:
    """The CRD as a plain object."""
    root = {
        "type": "object",
        "description": "Engine pods of an LLM server, each with a sidecar that keeps their KV in tiers.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"},
            "spec": _object_schema(Spec, "What the cluster should be."),
            "status": _object_schema(Status, "What the operator sees."),
        },
        "x-kubernetes-validations": _validations((_NAME_RULE,)),
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


def _column(name: str, path: str, kind: str = "string", *, wide: bool = False) -> dict[str, Any]:
    column = {"name": name, "type": kind, "jsonPath": path}
    return column | {"priority": 1} if wide else column


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
    _column("Transfer", ".status.transfer.mode"),
    _column("Age", ".metadata.creationTimestamp", "date"),
    _column("Remote", ".spec.tiers.remote.external.url", wide=True),
    _column("Message", ".status.conditions[?(@.type=='Ready')].message", wide=True),
]


def _object_schema(cls: Any, description: str) -> dict[str, Any]:
    """Schema of a dataclass, fields in the order they are declared."""
    fields = fields_of(cls)
    properties = {declared.json_name: _field_schema(declared.type, declared.info) for declared in fields}
    required = [d.json_name for d in fields if not d.is_optional and not d.info.has_default]
    schema: dict[str, Any] = {"type": "object", "description": description, "properties": properties}
    if required:
        schema["required"] = required
    if rules := getattr(cls, "RULES", ()):
        schema["x-kubernetes-validations"] = _validations(rules)
    return schema


def _field_schema(annotation: Any, info: FieldInfo) -> dict[str, Any]:
    schema = {**_type_schema(annotation, info), "description": info.description, **info.schema}
    if info.has_default:
        schema["default"] = _expanded_default(annotation, info)
    if info.rules:
        schema["x-kubernetes-validations"] = _validations(info.rules)
    return schema


def _expanded_default(annotation: Any, info: FieldInfo) -> Any:
    """The default with those of its own fields: rules are checked against it as it stands here."""
    if not dataclasses.is_dataclass(annotation):
        return info.default
    cls: Any = annotation
    with_default = [declared for declared in fields_of(cls) if declared.info.has_default]
    return {declared.json_name: _expanded_default(declared.type, declared.info) for declared in with_default}


def _type_schema(annotation: Any, info: FieldInfo) -> dict[str, Any]:
    if annotation in _SCALARS:
        return {"type": _SCALARS[annotation]}
    if dataclasses.is_dataclass(annotation):
        return _object_schema(annotation, info.description)
    origin = typing.get_origin(annotation)
    if origin is list:
        (item,) = typing.get_args(annotation)
        return {"type": "array", "items": {**_type_schema(item, FieldInfo("")), **info.items}}
    if origin is dict:
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    assert issubclass(annotation, StrEnum), f"no schema for {annotation}"
    return {"type": "string", "enum": [member.value for member in annotation]}


def _validations(rules: tuple[Rule, ...]) -> list[dict[str, Any]]:
    return [{"rule": rule.cel, "message": rule.message} for rule in rules]
