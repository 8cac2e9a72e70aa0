"""Rows in Redis: their names, and how one column of a row is written and read over a connection.

A row is one hash, ``<prefix>:<namespace>:{<chunk key>}``. Redis evicts whole keys, so it evicts all columns
of a row together. Column ``<c>`` has these fields:

- ``<c>:<n>``: piece n of the payload, and a seal. The seal is a checksum of the piece and of its place: row,
  column, length of the payload, position. ``piece_sizes`` gives the lengths; it is part of the format.
  An encrypted piece has a key version, a salt and a tag in place of the seal (``value_formats.py``).
- ``<c>``: the marker, a ``Header`` with the length of the payload. The writer sends the marker with the last
  piece, after the server has acknowledged all other pieces. A column with a marker is complete.

Two writers may store one column at once. Their bytes may differ: engines compute the same tokens in batches
of other shapes. Each piece is valid by itself, so pieces of several writers make one valid column. The
reasons for this format are in docs/adr/0037.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence

from lmcache_store.tiers.base import Loaded, ObjectId, RowKey, split_row_key
from lmcache_store.tiers.encryption.pieces import PiecePlace
from lmcache_store.tiers.errors import InvalidObjectError, KeyAbsentError, ServerError
from lmcache_store.tiers.header import NO_CHECKSUM, Digests, Header
from lmcache_store.tiers.remote.resp import Reply, RespConnection
from lmcache_store.tiers.remote.value_formats import PLAIN, ValueFormat

_OVERHEAD_BYTES = 64
"""Bytes that a piece leaves free in its block: 16 for the seal or 48 for encryption, 10 for Redis' string
header (sds.h), the rest for other versions of Redis."""

MAX_PIECE_BYTES = (1 << 20) - _OVERHEAD_BYTES
"""Maximum length of a piece. A copy of 1 MiB stays in the CPU's caches."""

_MAX_WASTE = 32
"""A piece may waste up to 1/32 of the payload's length in its block."""

_MIN_WASTE_BYTES = 512
"""A piece may always waste this many bytes. Another piece would cost more."""

_WINDOW = 3
"""Number of pieces in flight. The server copies one piece while the client reads or writes another one."""

_NAME = re.compile(rb"([A-Za-z0-9_.-]{1,64}):([0-9a-f]{64}):\{([0-9a-f]{64})\}")
_FIELD = re.compile(rb"([0-9]{1,9})(?::([0-9]{1,9}))?")


def redis_name(prefix: str, row_key: RowKey) -> str:
    """Name the hash of a row."""
    return f"{prefix}:{split_row_key(row_key)[0].hex()}:{{{hash_tag(row_key)}}}"


def row_name(prefix: str, row_key: RowKey, form: ValueFormat) -> str:
    """Name the hash of a row in a format. ``prefix``: that of the tier."""
    return redis_name(form.prefix(prefix), form.stored_key(row_key))


def parse_name(prefix: str, name: bytes) -> RowKey | None:
    """Return the row that a name stands for; None if ``redis_name`` does not return this name."""
    match = _NAME.fullmatch(name)
    if match is None or match[1] != prefix.encode():
        return None
    return bytes.fromhex(match[2].decode()) + bytes.fromhex(match[3].decode())


def parse_field(field: bytes) -> tuple[int, int | None] | None:
    """Return (column, number of the piece) that a field stands for; for a marker, the number is None.

    Returns None if the field is neither.
    """
    match = _FIELD.fullmatch(field)
    return None if match is None else (int(match[1]), int(match[2]) if match[2] else None)


def hash_tag(row_key: RowKey) -> str:
    """Return the part of a name that determines its hash slot in a Redis Cluster."""
    return split_row_key(row_key)[1].hex()


def marker_field(object_id: ObjectId) -> str:
    """Name the field that marks a column as complete."""
    return str(object_id.column)


def piece_sizes(total_bytes: int) -> list[int]:
    """Return the lengths of a payload's pieces, in bytes. They fill the blocks of jemalloc, Redis' allocator.

    jemalloc has four block sizes per power of two (https://jemalloc.net/jemalloc.3.html). A value of any
    other length wastes up to a fifth of its block. An empty payload has one empty piece.
    """
    num_whole, rest = divmod(total_bytes, MAX_PIECE_BYTES)
    sizes = [MAX_PIECE_BYTES] * num_whole
    while rest or not sizes:
        step = 1 << max(4, (rest + _OVERHEAD_BYTES).bit_length() - 3)
        unused = -(rest + _OVERHEAD_BYTES) % step
        fits = rest + _OVERHEAD_BYTES + unused - step  # the block below the one that would hold all
        is_last = unused <= max(_MIN_WASTE_BYTES, total_bytes // _MAX_WASTE) or fits <= _OVERHEAD_BYTES
        sizes.append(rest if is_last else fits - _OVERHEAD_BYTES)
        rest -= sizes[-1]
    return sizes


def load(
    connection: RespConnection,
    object_id: ObjectId,
    into: memoryview,
    length: int | None = None,
    form: ValueFormat = PLAIN,
) -> Loaded | None:
    """Read a column's payload into ``into``; None when the column is not there.

    Raises InvalidObjectError if the stored column is invalid, or does not have ``length`` bytes. Raises
    KeyAbsentError if it is encrypted with a key version that is not here.
    """
    name = row_name(connection.prefix, object_id.row_key, form)
    fields = _piece_fields(object_id)
    connection.ask([("HMGET", name, marker_field(object_id), next(fields))])
    header = _read_marker(connection, object_id, form)
    if header is None:
        return None
    total = header.total_bytes
    if total > len(into) or length not in (None, total):
        raise InvalidObjectError("length")
    sizes, start, payload_digests = piece_sizes(total), 0, Digests()
    for number, size in enumerate(sizes):
        piece = into[start : start + size]
        buffers = form.buffers(piece)
        _read_piece(connection, buffers, is_element=number == 0)
        # Later pieces travel while this one is checked.
        ahead = sizes[1 : 1 + _WINDOW] if number == 0 else sizes[number + _WINDOW : number + _WINDOW + 1]
        if ahead:
            connection.ask([("HGET", name, next(fields)) for _ in ahead])
        form.finish_piece(PiecePlace(object_id, total, start), buffers, piece)
        payload_digests.update(piece)
        start += size
    return Loaded(total, payload_digests.digests())


def store(
    connection: RespConnection,
    object_id: ObjectId,
    payload: memoryview,
    label: bytes,
    *,
    earlier: Sequence[ObjectId] = (),
    is_rewrite: bool = False,
    form: ValueFormat = PLAIN,
) -> bool:
    """Write a column. Returns False if it is there already; the check marks the row as used.

    A column that is encrypted with an absent key version does not count as there, and is replaced.

    ``earlier``: columns of this row that the caller has stored just now. If the server has evicted one of
    them, this one is refused.
    ``is_rewrite``: the stored column is known to be invalid. Raises ServerError when the server refuses a
    piece, and when it evicts the row during the store. Raises InvalidObjectError for a stored marker of a
    wrong length, which is not read: the connection can't be used again, and the caller must rewrite the
    column over another one.
    """
    name, total = row_name(connection.prefix, object_id.row_key, form), len(payload)
    readable_by = PLAIN if is_rewrite else form  # in a rewrite, the marker is not read
    if _is_present(connection, name, object_id, readable_by) and not is_rewrite:
        return False
    header = Header(object_id.row_key, object_id.column, total, NO_CHECKSUM, label)
    marker = form.pack_marker(object_id, header)
    sizes, start = piece_sizes(total), 0
    fields = list(itertools.islice(_piece_fields(object_id), len(sizes)))
    for number, (field, size) in enumerate(zip(fields, sizes, strict=True)):
        piece = payload[start : start + size]
        values = {field: form.pack_piece(PiecePlace(object_id, total, start), piece)}
        if number == len(sizes) - 1:
            _read_replies(connection, min(number, _WINDOW))
            values[marker_field(object_id)] = [marker]
        elif number >= _WINDOW:
            _read_replies(connection, 1)
        connection.set_fields(name, values)
        start += size
    expected = [*map(marker_field, earlier), *fields]
    connection.ask([("HEXISTS", name, field) for field in expected])
    if 0 in _read_replies(connection, 1 + len(expected))[1:]:
        # The server evicted the row between two pieces or columns, and later pieces began another one.
        _remove(connection, name)
        raise ServerError("EVICTED the row while it was written")
    return True


def _is_present(connection: RespConnection, name: str, object_id: ObjectId, form: ValueFormat) -> bool:
    try:
        if form is PLAIN:
            return connection.call("HEXISTS", name, marker_field(object_id)) == 1
        return _has_readable_marker(connection, name, object_id, form)
    except ServerError as error:
        if error.code != "WRONGTYPE":
            raise
    _remove(connection, name)  # a value of another program under this prefix
    return False


def _has_readable_marker(
    connection: RespConnection, name: str, object_id: ObjectId, form: ValueFormat
) -> bool:
    connection.ask([("HGET", name, marker_field(object_id))])
    num_bytes = connection.read_bulk_length()
    if num_bytes is None:
        return False
    if num_bytes != form.marker_bytes:  # up to 512 MB, which another program wrote
        raise InvalidObjectError("header")
    marker = memoryview(bytearray(num_bytes))
    connection.read_bulk(marker)
    try:
        form.parse_marker(object_id, marker)
    except (InvalidObjectError, KeyAbsentError):
        return False
    return True


def _remove(connection: RespConnection, name: str) -> None:
    """Delete a value that no reader can use."""
    # Without the right to UNLINK, the value stays until Redis evicts it.
    with contextlib.suppress(ServerError):
        connection.call("UNLINK", name)


def _piece_fields(object_id: ObjectId) -> Iterator[str]:
    return (f"{object_id.column}:{number}" for number in itertools.count())


def _read_marker(connection: RespConnection, object_id: ObjectId, form: ValueFormat) -> Header | None:
    """Read the marker, the first of two elements; the second one is the first piece. None: no marker."""
    try:
        connection.read_array_length(2)
    except ServerError as error:
        if error.code != "WRONGTYPE":
            raise
        raise InvalidObjectError("type") from None
    num_bytes = connection.read_bulk_length(is_element=True)
    if num_bytes is None:
        # A piece without a marker is half-written. It is not read, so the connection will be closed.
        connection.read_bulk_length(is_element=True)
        return None
    if num_bytes != form.marker_bytes:
        raise InvalidObjectError("header")
    marker = memoryview(bytearray(form.marker_bytes))
    connection.read_bulk(marker)
    return form.parse_marker(object_id, marker)


def _read_piece(connection: RespConnection, into: Sequence[memoryview], *, is_element: bool) -> None:
    """Read the value of a piece into ``into``. The caller must check it."""
    num_bytes = connection.read_bulk_length(is_element=is_element)
    if num_bytes != sum(map(len, into)):
        raise InvalidObjectError("evicted" if num_bytes is None else "length")
    connection.read_bulk(*into)


def _read_replies(connection: RespConnection, number: int) -> list[Reply]:
    """Read replies; raises the first error among them when all have been read."""
    replies = connection.read_replies(number)
    for reply in replies:
        if isinstance(reply, ServerError):
            raise reply
    return [reply for reply in replies if not isinstance(reply, ServerError)]
