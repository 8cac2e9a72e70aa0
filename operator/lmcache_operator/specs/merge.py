"""Two questions about nested plain data: what do two objects make together, and does one contain the other.

Lists of objects are taken as maps keyed by what names their items, as the API server takes them; other lists
are values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache.units import quantity_equal

# In this order: a volume mount has a name and a path, and only the path is its own.
ITEM_KEYS = ("mountPath", "containerPort", "name")
_QUANTITY_PARENTS = ("limits", "requests")


def merge(base: Any, overlay: Any) -> Any:
    """Lay ``overlay`` over ``base``; None in the overlay removes. Neither is changed."""
    if isinstance(base, Mapping) and isinstance(overlay, Mapping):
        merged = dict(base) | {key: merge(base.get(key), value) for key, value in overlay.items()}
        return {key: value for key, value in merged.items() if value is not None}
    if isinstance(base, list) and isinstance(overlay, list) and (key := _item_key(base, overlay)):
        ours = {item[key]: item for item in base}
        theirs = {item[key]: item for item in overlay}
        return [merge(ours.get(name), theirs.get(name, {})) for name in ours | theirs]
    return overlay


def at(value: Any, *path: str) -> Any:
    """What lies there in a free-form object; None if there is no such place."""
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def first_difference(wanted: Any, live: Any, path: str = "") -> str | None:
    """Path of the first thing in ``wanted`` that ``live`` lacks or has otherwise; None if all of it is there.

    ``live`` may hold more. Empty lists and objects are the same as absent ones, and quantities are compared
    by their amount.
    """
    if isinstance(wanted, Mapping | list):
        if live is None:
            return path if wanted else None
        pairs = _pairs(wanted, live, path)
        found = (first_difference(*pair) for pair in pairs or ())
        return path if pairs is None else next(filter(None, found), None)
    parent, _, key = path.rpartition(".")
    is_quantity = parent.endswith(_QUANTITY_PARENTS) or key == "sizeLimit"
    same = wanted == live or (is_quantity and quantity_equal(wanted, live))
    return None if same else path


def _pairs(wanted: Any, live: Any, path: str) -> list[tuple[Any, Any, str]] | None:
    """The parts of two values with their paths; None if the values can't be compared part by part."""
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
    """The field that names the items of lists, if they are lists of named objects.

    One that tells all of a list apart is better: two ports of one number, for TCP and UDP, have two names.
    """
    items = [item for each in lists for item in each]
    found = [key for key in ITEM_KEYS if items and all(_is_named(item, key) for item in items)]
    unique = (key for key in found if all(len({item[key] for item in each}) == len(each) for each in lists))
    return next(unique, found[0] if found else None)


def _is_named(item: Any, key: str) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get(key), str | int)
