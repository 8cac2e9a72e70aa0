"""How a field of the resource is declared: once, with everything the CRD and the parser need to know.

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
    """One validation in two spellings, for the API server and for the parser, side by side to agree."""

    cel: str | None
    """None for what CEL can't say: then only the parser refuses it, and a condition reports it."""
    message: str
    holds: Callable[[Any], bool]
    """The same check on the parsed value. True for transition rules: here is no old value."""


def field(description: str, *, default: Any = None, rules: tuple[Rule, ...] = (), **keywords: Any) -> Any:
    """Declare a field. A field without a default is required, unless its type allows None.

    The default is in the form a user would write it: ``{}`` for an object whose own fields have defaults.
    ``keywords`` are those of OpenAPI: pattern, minimum, maximum, multipleOf, maxLength, maxItems, items,
    enum, format, list types. ``shape`` is the type of Kubernetes that a free-form object is part of, or a
    field of one, as in ``PodSpec.tolerations``: the API server checks it, where the parser does not.
    """
    known = {"description": description, "default": default, "rules": rules, "keywords": keywords}
    return dataclasses.field(metadata=known)


class Field(NamedTuple):
    """One field of a part, as it was declared."""

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
        """``tokenSecretRef`` for ``token_secret_ref``."""
        head, *tail = self.name.split("_")
        return head + "".join(word.capitalize() for word in tail)


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
class Part:
    """Base of the parts of the resource: frozen dataclasses whose fields are declared with ``field(...)``."""

    FIELDS: ClassVar[tuple[Field, ...]]
    """In the order they were declared."""
    RULES: ClassVar[tuple[Rule, ...]] = ()
    """Validations of the part as a whole."""

    def __init_subclass__(cls) -> None:
        made: Any = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        hints = typing.get_type_hints(cls)
        cls.FIELDS = tuple(_field(hints[declared.name], declared) for declared in dataclasses.fields(made))


def is_part(annotation: Any) -> bool:
    """Whether a type is a part, and no scalar, list or free-form object."""
    return isinstance(annotation, type) and issubclass(annotation, Part)


def _field(hint: Any, declared: dataclasses.Field[Any]) -> Field:
    is_optional = isinstance(hint, types.UnionType)
    is_required = not is_optional and declared.metadata["default"] is None
    annotation = typing.get_args(hint)[0] if is_optional else hint
    return Field(declared.name, annotation, is_required, **declared.metadata)
