"""Declarations of the resource's fields, each with everything that the CRD and the parser need.

The dataclasses in ``types.py`` are the single source. ``crd.py`` turns them into an OpenAPI schema and
``parse.py`` into checks, so that the API server and ``lmcache-operator render`` refuse the same objects.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple


class Rule(NamedTuple):
    """One validation in two forms: CEL for the API server, and Python for the parser."""

    cel: str | None
    """CEL expression. None if CEL cannot express the check: only the parser checks it, for a condition."""
    message: str
    holds: Callable[[Any], bool]
    """The same check on the parsed value. True for transition rules, which need the old value."""


def field(description: str, *, default: Any = None, rules: tuple[Rule, ...] = (), **keywords: Any) -> Any:
    """Declare a field. A field without a default is required, unless its type allows None.

    Args:
        default: the value as a user would write it, such as ``{}`` for an object whose fields have defaults.
        keywords: OpenAPI keywords: pattern, minimum, maximum, multipleOf, maxLength, maxItems, items, enum,
            format, list types. ``shape`` names the Kubernetes type of a free-form object, or a field of one
            such as ``PodSpec.tolerations``. The API server checks the shape, and the parser does not.
    """
    metadata = {"description": description, "default": default, "rules": rules, "keywords": keywords}
    return dataclasses.field(metadata=metadata)


class Field(NamedTuple):
    """One declared field of a part."""

    name: str
    type: Any
    """Type of the field, without the None of an optional one."""
    is_required: bool
    description: str
    default: Any
    """Default value; None: no default."""
    rules: tuple[Rule, ...]
    keywords: Mapping[str, Any]

    @property
    def json_name(self) -> str:
        """Name in the resource, such as ``tokenSecretRef`` for ``token_secret_ref``."""
        head, *tail = self.name.split("_")
        return head + "".join(word.capitalize() for word in tail)


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
class Part:
    """Base of the parts of the resource: frozen dataclasses whose fields are declared with ``field(...)``."""

    FIELDS: ClassVar[tuple[Field, ...]]
    """Fields in the order of their declarations."""
    RULES: ClassVar[tuple[Rule, ...]] = ()
    """Validations of the part as a whole."""

    def __init_subclass__(cls) -> None:
        made: Any = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        hints = typing.get_type_hints(cls)
        cls.FIELDS = tuple(_field(hints[declared.name], declared) for declared in dataclasses.fields(made))


def is_part(annotation: Any) -> bool:
    """Return whether a type is a part, and not a scalar, a list or a free-form object."""
    return isinstance(annotation, type) and issubclass(annotation, Part)


def _field(hint: Any, declared: dataclasses.Field[Any]) -> Field:
    is_optional = isinstance(hint, types.UnionType)
    is_required = not is_optional and declared.metadata["default"] is None
    annotation = typing.get_args(hint)[0] if is_optional else hint
    return Field(declared.name, annotation, is_required, **declared.metadata)
