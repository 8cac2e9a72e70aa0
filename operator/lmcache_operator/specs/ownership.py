"""Which fields of an object are as we applied them, told by the API server's own records. Pure.

With server-side apply the API server records the fields that each manager applied
(``metadata.managedFields``). Whoever else changes or removes a field takes it from us. So a child that
carries the hash of what we would apply, and of which we still have every field, is what the API server made
of our words, whatever it made of them: defaults, other spellings, zero values that it drops, changes by
admission webhooks.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from functools import reduce
from typing import Any

from lmcache_operator.specs import Object
from lmcache_operator.specs.merge import ITEM_KEYS
from lmcache_operator.specs.names import FIELD_MANAGER

Path = tuple[str, ...]
"""A field as the records name it: ("f:spec", "f:ports", 'k:{"port":80}', "f:name"); () is the object."""
_RECORDED_METADATA = ("annotations", "labels", "ownerReferences")


def lost_fields(wanted: Object, live: Object) -> list[Path]:
    """Fields of ``wanted``, applied before, that ``live`` no longer has as ours; (()) if it has none."""
    for entry in live["metadata"].get("managedFields") or ():
        is_ours = entry.get("manager") == FIELD_MANAGER and entry.get("operation") == "Apply"
        if is_ours and "subresource" not in entry:
            fields = {"f:metadata": {".": {}}} | (entry.get("fieldsV1") or {})
            return list(_lost(_recorded(wanted), fields, ()))
    return [()]


def without(wanted: Object, paths: Collection[Path]) -> Object:
    """A copy of ``wanted`` that says nothing about these fields."""
    return reduce(_dropped, filter(None, paths), wanted)


def spell(path: Path) -> str:
    """For people: spec.ports[80].name."""
    text = ""
    for name in path:
        kind, _, value = name.partition(":")
        if kind == "f":
            text += f".{value}" if text else value
        else:
            key = json.loads(value)
            text += f"[{'/'.join(map(str, key.values())) if isinstance(key, dict) else key}]"
    return text


def _recorded(wanted: Object) -> Object:
    """The part of an object that is recorded: neither what it is nor what it is called."""
    kept = {key: value for key, value in wanted.items() if key not in ("apiVersion", "kind")}
    metadata = wanted["metadata"]
    return kept | {"metadata": {key: metadata[key] for key in _RECORDED_METADATA if key in metadata}}


def _lost(wanted: Any, owned: Object, path: Path) -> Iterator[Path]:
    if not owned:  # a leaf: whatever is in it is one value
        return
    for name, value in _parts(wanted, owned):
        if name in owned:
            yield from _lost(value, owned[name], (*path, name))
        elif not _is_void(value):
            yield (*path, name)


def _parts(value: Any, names: Collection[str]) -> Iterator[tuple[str, Any]]:
    """The fields of an object, or the items of a list, by the names that the records give them.

    ``names`` are the recorded ones: which fields name an item is known to the API server alone.
    """
    if isinstance(value, Mapping):
        yield from ((f"f:{key}", item) for key, item in value.items())
    elif isinstance(value, list):
        keys = {name: json.loads(name[2:]) for name in names if name[:2] in ("k:", "v:")}
        for item in value:
            same = (name for name, key in keys.items() if _is_named(item, key))
            yield next(same, None) or _name_of(item), item


def _is_named(item: Any, key: Any) -> bool:
    if isinstance(item, Mapping) and isinstance(key, Mapping):
        # A field that the item lacks is a default, such as the protocol of a port.
        return all(item.get(name, value) == value for name, value in key.items())
    return bool(item == key)


def _name_of(item: Any) -> str:
    """A name for an item that is not recorded; it finds the item again, and says which one it is."""
    if isinstance(item, Mapping) and (key := next((key for key in ITEM_KEYS if key in item), None)):
        return f"k:{json.dumps({key: item[key]})}"
    return f"v:{json.dumps(item)}"


def _is_void(value: Any) -> bool:
    """Whether applying this leaves no record: null, an empty list, an object of nothing but these."""
    is_full = isinstance(value, Mapping) and bool(value)
    return value is None or value == [] or (is_full and all(map(_is_void, value.values())))


def _dropped(value: Any, path: Path) -> Any:
    first, rest = path[0], path[1:]
    parts = [(name, item) for name, item in _parts(value, [first]) if rest or name != first]
    kept = [(name, _dropped(item, rest) if name == first else item) for name, item in parts]
    return {name[2:]: item for name, item in kept} if isinstance(value, Mapping) else [i for _, i in kept]
