"""Ownership of an object's fields, from the API server's records. Pure.

With server-side apply the API server records the fields that each manager applied
(``metadata.managedFields``). Another client that changes or removes a field takes over its ownership.

So a child is unchanged if it has the hash of the present rendering, and the operator still owns every
rendered field. A comparison of values would be unreliable: the API server adds defaults, normalizes values
and drops zero values, and admission webhooks change more.
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
"""Path of a field in the records: ("f:spec", "f:ports", 'k:{"port":80}', "f:name"); () is the object."""
_RECORDED_METADATA = ("annotations", "labels", "ownerReferences")


def lost_fields(wanted: Object, live: Object) -> list[Path]:
    """Paths of fields in ``wanted`` that the operator no longer owns in ``live``; [()] if it owns none."""
    for entry in live["metadata"].get("managedFields") or ():
        is_ours = entry.get("manager") == FIELD_MANAGER and entry.get("operation") == "Apply"
        if is_ours and "subresource" not in entry:
            fields = {"f:metadata": {".": {}}} | (entry.get("fieldsV1") or {})
            return list(_lost(_recorded(wanted), fields, ()))
    return [()]


def without(wanted: Object, paths: Collection[Path]) -> Object:
    """A copy of ``wanted`` without the fields at these paths."""
    return reduce(_dropped, filter(None, paths), wanted)


def spell(path: Path) -> str:
    """A path in readable form, such as spec.ports[80].name."""
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
    """The part of an object whose fields the API server records: all but its kind and its identity."""
    fields = {key: value for key, value in wanted.items() if key not in ("apiVersion", "kind")}
    metadata = wanted["metadata"]
    return fields | {"metadata": {key: metadata[key] for key in _RECORDED_METADATA if key in metadata}}


def _lost(wanted: Any, owned: Object, path: Path) -> Iterator[Path]:
    if not owned:  # a leaf, which is owned as a whole
        return
    for name, value in _parts(wanted, owned):
        if name in owned:
            yield from _lost(value, owned[name], (*path, name))
        elif not _is_void(value):
            yield (*path, name)


def _parts(value: Any, names: Collection[str]) -> Iterator[tuple[str, Any]]:
    """The fields of an object, or the items of a list, with their names in the records.

    ``names``: the recorded names. Only the API server knows which fields identify an item of a list.
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
        # A key field that the item lacks has a default, such as the protocol of a port.
        return all(item.get(name, value) == value for name, value in key.items())
    return bool(item == key)


def _name_of(item: Any) -> str:
    """A name for an item without a record. It identifies the item for ``without`` and for messages."""
    if isinstance(item, Mapping) and (key := next((key for key in ITEM_KEYS if key in item), None)):
        return f"k:{json.dumps({key: item[key]})}"
    return f"v:{json.dumps(item)}"


def _is_void(value: Any) -> bool:
    """Whether applying a value leaves no record: null, an empty list, or an object of only such values."""
    is_full = isinstance(value, Mapping) and bool(value)
    return value is None or value == [] or (is_full and all(map(_is_void, value.values())))


def _dropped(value: Any, path: Path) -> Any:
    first, rest = path[0], path[1:]
    parts = [(name, item) for name, item in _parts(value, [first]) if rest or name != first]
    left = [(name, _dropped(item, rest) if name == first else item) for name, item in parts]
    return {name[2:]: item for name, item in left} if isinstance(value, Mapping) else [i for _, i in left]
