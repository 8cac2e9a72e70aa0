"""The header in front of every stored payload, and the checksum of payloads.

A payload is the engine's bytes, unchanged: one rank's KV of one chunk. Header and payload together are one
object of a lower tier: a file on disk, or a value in Redis. A reader trusts only the header and its checksum.
It does not trust the object's name or length, or the version that wrote the object.

The checksum covers **parts** of 4 MiB. These parts exist only in the computation: every object has one header
and one payload.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeAlias

import xxhash

from lmcache_store.tiers.base import ROW_KEY_BYTES, ObjectId, RowKey
from lmcache_store.tiers.errors import InvalidObjectError

MAGIC = b"LMCchunk"
VERSION = 2
MAX_LABEL_BYTES = 512

_FIELDS = struct.Struct("<8sII64sQ16sH512s78x")
_HEADER_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _HEADER_CHECKSUM.size
"""Length of a header: 704, a multiple of a cache line."""

PART_BYTES = 4 << 20
"""Length of the parts in which payloads are checksummed. At 10-30 GB/s a part takes well under 1 ms. A build
of xxhash that does not release the GIL therefore stops other threads only for that time."""

_DIGEST_BYTES = 16
NO_CHECKSUM = bytes(_DIGEST_BYTES)
"""Checksum in the header of a payload whose pieces are checked one by one."""

_SEALED = struct.Struct("<64sIQ")

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Header:
    """Description of one stored payload."""

    key: RowKey
    column: int
    """Number of the rank whose KV the payload is. Ranks with the same KV share a column."""
    total_bytes: int
    """Length of the payload."""
    checksum: bytes
    """Result of ``checksum`` for the payload."""

    label: bytes = b""
    """Bytes that say what the object holds: the sidecar writes the model's name, and the library writes the
    key. ``parse`` does not interpret them."""

    def pack(self) -> bytes:
        """Return the header, HEADER_BYTES bytes. Raises ValueError for fields that ``parse`` would refuse."""
        if len(self.key) != ROW_KEY_BYTES or len(self.checksum) != _DIGEST_BYTES:
            raise ValueError("key or checksum has a wrong length")
        if len(self.label) > MAX_LABEL_BYTES:
            raise ValueError(f"label is longer than {MAX_LABEL_BYTES} bytes")
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            self.column,
            self.key,
            self.total_bytes,
            self.checksum,
            len(self.label),
            self.label,
        )
        return fields + _HEADER_CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))


def parse(buffer: Buffer) -> Header:
    """Parse a header. Raises InvalidObjectError unless the bytes are exactly what ``pack`` returns."""
    raw = bytes(buffer[: HEADER_BYTES + 1])
    if len(raw) == HEADER_BYTES:
        _, _, column, key, total, checksum, label_bytes, label = _FIELDS.unpack_from(raw)
        header = Header(key, column, total, checksum, label[:label_bytes])
        if header.pack() == raw:
            return header
    raise InvalidObjectError("header")


def parse_of(object_id: ObjectId, buffer: Buffer) -> Header:
    """Parse the header of this object. Raises InvalidObjectError also for the header of another one."""
    header = parse(buffer)
    if (header.key, header.column) != (object_id.row_key, object_id.column):
        raise InvalidObjectError("name")
    return header


def checksum(buffer: Buffer) -> bytes:
    """Return the checksum of a payload: its xxh3-128, or that of its digests if it has several parts."""
    return combined(digests(buffer))


class Digests:
    """Digests of a payload that arrives in pieces of any length."""

    def __init__(self) -> None:
        self._done = bytearray()
        self._current = xxhash.xxh3_128()  # unlike the one-shot function, it releases the GIL
        self._part_left = PART_BYTES

    def update(self, buffer: Buffer) -> None:
        """Add the next bytes of the payload."""
        view = memoryview(buffer)
        while len(view) > self._part_left:
            self._current.update(view[: self._part_left])
            view = view[self._part_left :]
            self._done += self._current.digest()
            self._current.reset()
            self._part_left = PART_BYTES
        self._current.update(view)
        self._part_left -= len(view)

    def digests(self) -> bytes:
        """Return the digests of all bytes so far."""
        return bytes(self._done) + self._current.digest()


def digests(buffer: Buffer) -> bytes:
    """Return the xxh3-128 of each part of a payload, concatenated.

    With the digests, the payload can be written to any tier without another pass for its checksum."""
    whole = Digests()
    whole.update(buffer)
    return whole.digests()


def combined(part_digests: bytes) -> bytes:
    """Return the checksum of a payload with these digests."""
    return part_digests if len(part_digests) == _DIGEST_BYTES else _digest(part_digests)


def slot_checksum(key: RowKey, column: int, length: int, part_digests: bytes) -> bytes:
    """Return a checksum of the payload together with its key, column and length.

    It is stored in the slot table of the arena, the file that holds the memory tier. A faulty engine may
    overwrite this table. If that engine exchanged two entries, the checksum of the payload alone would still
    match."""
    return _digest(_SEALED.pack(key, column, length) + part_digests)


def _digest(buffer: bytes) -> bytes:
    digest: bytes = xxhash.xxh3_128_digest(buffer)
    return digest
