"""How a field of the resource is declared: once, with everything the CRD and the parser need to know.

The dataclasses in `types.py` are the single source. `crd.py` turns them into an OpenAPI schema, `parse.py`
into checks, so that the API server and `lmcache-operator render` refuse the same objects.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

_METADATA_KEY = "lmcache"
_UNSET: Any = object()


@dataclass(frozen=True)
class Rule:
    """One validation in two spellings, for the API server and for the parser, side by side to agree."""

    cel: str
    message: str
    holds: Callable[[Any], bool]
    """The same check on the parsed value. True for transition rules: here is no old value."""


@dataclass(frozen=True)
class FieldInfo:
    """What is known about one field besides its name and type."""

    description: str
    default: Any = _UNSET
    schema: dict[str, Any] = dataclasses.field(default_factory=dict)
    """OpenAPI keywords: pattern, minimum, maximum, minLength, maxLength, maxItems, format, list types."""
    items: dict[str, Any] = dataclasses.field(default_factory=dict)
    """OpenAPI keywords of the items of a list."""
    rules: tuple[Rule, ...] = ()

    @property
    def has_default(self) -> bool:
        """Whether the field may be left out because a value stands in for it."""
        return self.default is not _UNSET


def field(
    description: str,
    *,
    default: Any = _UNSET,
    rules: tuple[Rule, ...] = (),
    items: dict[str, Any] | None = None,
    **schema: Any,
) -> Any:
    """Declare a field. A field without a default is required, unless its type allows None.

    The default is in the form a user would write it: `{}` for an object whose own fields have defaults.
    """
    info = FieldInfo(description, default, schema, items or {}, rules)
    return dataclasses.field(metadata={_METADATA_KEY: info})


class DeclaredField(NamedTuple):
    """One field of a dataclass that was declared with `field(...)`."""

    name: str
    json_name: str
    """`tokenSecretRef` for `token_secret_ref`."""
    type: Any
    """Without the None of an optional field."""
    is_optional: bool
    info: FieldInfo


@functools.cache
def fields_of(cls: Any) -> tuple[DeclaredField, ...]:
    """The fields of a dataclass in the order they were declared."""
    hints = typing.get_type_hints(cls)
    found = []
    for declared in dataclasses.fields(cls):
        annotation, is_optional = hints[declared.name], False
        if isinstance(annotation, types.UnionType):
            (annotation,) = (a for a in annotation.__args__ if a is not types.NoneType)
            is_optional = True
        head, *tail = declared.name.split("_")
        json_name = head + "".join(word.capitalize() for word in tail)
        info = declared.metadata[_METADATA_KEY]
        found.append(DeclaredField(declared.name, json_name, annotation, is_optional, info))
    return tuple(found)
