"""From the object a user wrote to typed values, or to a sentence that says what is wrong where.

The API server has checked most of this already; it is checked again because `lmcache-operator render` has no
API server, and because an object may be older than the CRD.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .fields import FieldInfo, Rule, fields_of
from .types import Spec


class InvalidSpec(Exception):
    """The object can't be what it asks for. `path` is where, the message is a sentence for the user."""

    def __init__(self, path: str, sentence: str) -> None:
        super().__init__(f"{path}: {sentence}")
        self.path = path


@dataclass(frozen=True)
class Cluster:
    """An LMCacheCluster with a valid spec."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: Spec


def parse(resource: Mapping[str, Any]) -> Cluster:
    """Read an LMCacheCluster.

    Raises:
        InvalidSpec: the spec can't be rendered.
    """
    metadata = resource["metadata"]
    return Cluster(
        namespace=metadata.get("namespace", "default"),
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        generation=metadata.get("generation", 0),
        spec=_parse_object(Spec, resource.get("spec"), "spec"),
    )


def _parse_object(cls: Any, raw: Any, path: str) -> Any:
    if not isinstance(raw, Mapping):
        raise InvalidSpec(path, "must be an object")
    if unknown := sorted(raw.keys() - {declared.json_name for declared in fields_of(cls)}, key=str):
        raise InvalidSpec(f"{path}.{unknown[0]}", "is not a known field")
    values: dict[str, Any] = {}
    for name, key, annotation, is_optional, info in fields_of(cls):
        value = raw.get(key)
        if value is None and info.has_default:
            value = info.default
        if value is None and not is_optional:
            raise InvalidSpec(f"{path}.{key}", "is required")
        values[name] = None if value is None else _parse_field(annotation, value, info, f"{path}.{key}")
    parsed = cls(**values)
    _check_rules(getattr(cls, "RULES", ()), parsed, path)
    return parsed


def _parse_field(annotation: Any, raw: Any, info: FieldInfo, path: str) -> Any:
    value = _parse_value(annotation, raw, path)
    _check_schema(value, info.schema, path)
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check_schema(item, info.items, f"{path}[{index}]")
    _check_rules(info.rules, value, path)
    return value


def _parse_value(annotation: Any, raw: Any, path: str) -> Any:
    if dataclasses.is_dataclass(annotation):
        return _parse_object(annotation, raw, path)
    origin = typing.get_origin(annotation)
    if origin is list:
        (item,) = typing.get_args(annotation)
        if not isinstance(raw, list):
            raise InvalidSpec(path, "must be a list")
        return [_parse_value(item, value, f"{path}[{index}]") for index, value in enumerate(raw)]
    if origin is dict:
        if not isinstance(raw, Mapping):
            raise InvalidSpec(path, "must be an object")
        return dict(raw)
    if issubclass(annotation, StrEnum):
        if raw not in list(annotation):
            raise InvalidSpec(path, f"must be one of {', '.join(annotation)}, not {raw!r}")
        return annotation(raw)
    # bool is an int for Python, but not for anyone who writes YAML.
    if not isinstance(raw, annotation) or isinstance(raw, bool) is not (annotation is bool):
        raise InvalidSpec(path, f"must be of type {annotation.__name__}, not {raw!r}")
    return raw


def _check_schema(value: Any, schema: Mapping[str, Any], path: str) -> None:
    """The OpenAPI keywords that `field` takes."""
    if (pattern := schema.get("pattern")) and not re.search(pattern, value):
        raise InvalidSpec(path, f"{value!r} does not match {pattern}")
    if isinstance(value, int) and value < schema.get("minimum", value):
        raise InvalidSpec(path, f"must be at least {schema['minimum']}, not {value}")
    if isinstance(value, int) and value > schema.get("maximum", value):
        raise InvalidSpec(path, f"must be at most {schema['maximum']}, not {value}")
    if isinstance(value, str | list):
        length, unit = len(value), "characters" if isinstance(value, str) else "items"
        if length < schema.get("minLength", 0):
            raise InvalidSpec(path, "must not be empty")
        if length > schema.get("maxLength", schema.get("maxItems", length)):
            raise InvalidSpec(path, f"is too long: {length} {unit}")


def _check_rules(rules: tuple[Rule, ...], value: Any, path: str) -> None:
    for rule in rules:
        if not rule.holds(value):
            raise InvalidSpec(path, rule.message)


def declared(value: Any) -> dict[str, Any]:
    """The fields of a parsed object that differ from their defaults, by their Python names.

    What equals its default is left out, so that a field which a later version adds changes nothing here.
    """
    found: dict[str, Any] = {}
    cls: Any = type(value)
    for name, _, _, _, info in fields_of(cls):
        own = getattr(value, name)
        if dataclasses.is_dataclass(own):
            own = declared(own) or None
        if own is not None and not (info.has_default and own == info.default):
            found[name] = own
    return found
