"""Merging and comparing nested plain data.

Like in the API server, lists of named objects count as maps with the names as keys. Other lists are values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache_store.common.units import quantity_equal

# The order matters: a volume mount has a name and a path, and only the path is unique.
ITEM_KEYS = ("mountPath", "containerPort", "name")
_QUANTITY_PARENTS = ("limits", "requests")


def merge(base: Any, overlay: Any) -> Any:
    """Merge ``overlay`` into a copy of ``base``. None in the overlay removes a value."""
    if isinstance(base, Mapping) and isinstance(overlay, Mapping):
        merged = dict(base) | {key: merge(base.get(key), value) for key, value in overlay.items()}
        return {key: value for key, value in merged.items() if value is not None}
    if isinstance(base, list) and isinstance(overlay, list) and (key := _item_key(base, overlay)):
        lower = {item[key]: item for item in base}
        upper = {item[key]: item for item in overlay}
        return [merge(lower.get(name), upper.get(name, {})) for name in lower | upper]
    return overlay


def dig(value: Any, *path: str) -> Any:
    """Return the value at a path in nested objects; None if the path does not exist."""
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def first_difference(wanted: Any, live: Any, path: str = "") -> str | None:
    """Path of the first value in ``wanted`` that is missing or different in ``live``; None if there is none.

    ``live`` may have more fields. Empty lists and objects equal absent ones, and quantities are compared by
    amount.
    """
    if isinstance(wanted, Mapping | list):
        if live is None:
            return path if wanted else None
        pairs = _pairs(wanted, live, path)
        differing = (first_difference(*pair) for pair in pairs or ())
        return path if pairs is None else next(filter(None, differing), None)
    parent, _, key = path.rpartition(".")
    is_quantity = parent.endswith(_QUANTITY_PARENTS) or key == "sizeLimit"
    same = wanted == live or (is_quantity and quantity_equal(wanted, live))
    return None if same else path


def _pairs(wanted: Any, live: Any, path: str) -> list[tuple[Any, Any, str]] | None:
    """Pairs of the parts of two values, with their paths; None if the values have no comparable parts."""
    if isinstance(wanted, Mapping) and isinstance(live, Mapping):
        return [(item, live.get(key), f"{path}.{key}" if path else key) for key, item in wanted.items()]
    if not isinstance(wanted, list) or not isinstance(live, list):
        return None
    if key := _item_key(wanted):
        named = {item[key]: item for item in live if _is_named(item, key)}
        return [(item, named.get(item[key]), f"{path}[{item[key]}]") for item in wanted]
    if len(wanted) != len(live):
        return None
    return [(item, live[index], f"{path}[{index}]") for index, item in enumerate(wanted)]


def _item_key(*lists: list[Any]) -> str | None:
    """The field that names the items of the lists; None if they are not lists of named objects.

    A field with unique values is preferred: a TCP and a UDP port of the same number have different names.
    """
    items = [item for each in lists for item in each]
    keys = [key for key in ITEM_KEYS if items and all(_is_named(item, key) for item in items)]
    unique = (key for key in keys if all(len({item[key] for item in each}) == len(each) for each in lists))
    return next(unique, keys[0] if keys else None)


def _is_named(item: Any, key: str) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get(key), str | int)
