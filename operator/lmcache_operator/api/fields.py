"""How a field of the resource is declared: once, with everything the CRD and the parser need to know.

The dataclasses in `types.py` are the single source. `crd.py` turns them into an OpenAPI schema, `parse.py`
into checks, so that the API server and `lmcache-operator render` refuse the same objects.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """One validation in two spellings, for the API server and for the parser, side by side to agree."""

    cel: str
    message: str
    holds: Callable[[Any], bool]
    """The same check on the parsed value. True for transition rules: here is no old value."""


def field(description: str, *, default: Any = None, rules: tuple[Rule, ...] = (), **keywords: Any) -> Any:
    """Declare a field. A field without a default is required, unless its type allows None.

    The default is in the form a user would write it: `{}` for an object whose own fields have defaults.
    `keywords` are those of OpenAPI: pattern, minimum, maximum, multipleOf, maxLength, maxItems,
    items, enum, format, list types.
    """
    known = {"description": description, "default": default, "rules": rules, "keywords": keywords}
    return dataclasses.field(metadata=known)


class Field(NamedTuple):
    """One field of a dataclass, as it was declared with `field(...)`."""

    name: str
    type: Any
    """Without the None of an optional field."""
    is_required: bool
    description: str
    default: Any
    """None if there is none."""
    rules: tuple[Rule, ...]
    keywords: Mapping[str, Any]

    @property
    def json_name(self) -> str:
        """`tokenSecretRef` for `token_secret_ref`."""
        head, *tail = self.name.split("_")
        return head + "".join(word.capitalize() for word in tail)


@functools.cache
def fields_of(cls: Any) -> tuple[Field, ...]:
    """The fields of a dataclass in the order they were declared."""
    hints, found = typing.get_type_hints(cls), []
    for declared in dataclasses.fields(cls):
        hint = hints[declared.name]
        is_optional = isinstance(hint, types.UnionType)
        annotation = typing.get_args(hint)[0] if is_optional else hint
        is_required = not is_optional and declared.metadata["default"] is None
        found.append(Field(declared.name, annotation, is_required, **declared.metadata))
    return tuple(found)
