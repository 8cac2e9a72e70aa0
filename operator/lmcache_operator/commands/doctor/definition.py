"""Compares the CRD of the API server with the fields that this version declares. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from lmcache_operator.api import VERSION
from lmcache_operator.api.crd import declared_schema
from lmcache_operator.specs import Object
from lmcache_operator.specs.merge import dig

_COMPARED = (
    "type",
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "maxLength",
    "maxItems",
    "multipleOf",
    "default",
)
"""Keywords that decide whether the API server accepts a value, and what it stores."""


def schema_of(definition: Object) -> Mapping[str, Any] | None:
    """Return the schema of the served version in a CRD; None if the CRD does not serve the version."""
    for version in dig(definition, "spec", "versions") or ():
        if version.get("name") == VERSION and version.get("served"):
            return dig(version, "schema", "openAPIV3Schema") or {}
    return None


class Differences(NamedTuple):
    """Fields by path, such as "spec.tiers.disk", in which a CRD differs from this version."""

    missing: list[str]
    added: list[str]
    changed: list[str]
    """Fields whose values the CRD restricts in another way."""


def differences(live: Mapping[str, Any]) -> Differences:
    """Compare the schema of a CRD with this version. Texts and the types of Kubernetes may differ."""
    declared, parents = _declared()
    fields = dict(_walk(live, "", parents))
    return Differences(
        missing=[path for path in declared if path not in fields],
        added=[path for path in fields if path not in declared],
        changed=[
            path
            for path, field in declared.items()
            if path in fields and _restrictions(field) != _restrictions(fields[path])
        ],
    )


@cache
def _declared() -> tuple[Mapping[str, Mapping[str, Any]], frozenset[str] | None]:
    """Return the declared fields by path, and the paths of fields that have inner fields."""
    fields = dict(_walk(declared_schema(), "", None))
    return fields, frozenset(path.rpartition(".")[0] for path in fields)


def _walk(
    schema: Mapping[str, Any], path: str, parents: frozenset[str] | None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the fields of spec and status by path. ``parents``: fields to enter; None: all."""
    if path and parents is not None and path not in parents:
        return
    for name, field in (schema.get("properties") or {}).items():
        if path or name in ("spec", "status"):
            inner = f"{path}.{name}" if path else name
            yield inner, field
            yield from _walk(field, inner, parents)
            yield from _walk(field.get("items") or {}, f"{inner}[]", parents)


def _restrictions(field: Mapping[str, Any]) -> dict[str, Any]:
    restrictions = {name: field[name] for name in _COMPARED if name in field}
    rules = field.get("x-kubernetes-validations") or ()
    restrictions["rules"] = sorted(rule.get("rule", "") for rule in rules)
    return restrictions
