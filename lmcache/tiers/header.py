"""The header in front of every stored payload, and the checksum of payloads.

A payload is the engine's bytes, untouched. What stands in front says what they are; whoever reads them trusts
nothing else: not the name of the object, not its length, not that it was written by this version.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeAlias

import xxhash

from lmcache.tiers.base import KEY_BYTES, RowKey
from lmcache.tiers.errors import HeaderError

MAGIC = b"LMCchunk"
VERSION = 1
MAX_LABEL_BYTES = 512

_FIELDS = struct.Struct("<8sII64sIIQQ16sH512s62x")
_ONE_PART = 0, 1
"""Part number and number of parts. Earlier releases split payloads into parts with a header each."""
_OWN_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _OWN_CHECKSUM.size
"""Length of a header: 704, a multiple of a cache line."""

PART_BYTES = 4 << 20
"""Length of the parts in which payloads are checksummed. At 10-30 GB/s a part takes well
under 1 ms, should a build of xxhash hold the GIL."""

_DIGEST_BYTES = 16
_SEALED = struct.Struct("<64sIQ")

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Header:
    """What one stored payload is."""

    key: RowKey
    column: int
    total_bytes: int
    checksum: bytes
    """``checksum`` of the payload."""

    label: bytes = b""
    """Opaque; for people and for the library."""

    def pack(self) -> bytes:
        """Return HEADER_BYTES bytes; raises ValueError for fields that ``parse`` would refuse."""
        problem = self._problem()
        if problem:
            raise ValueError(problem)
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            self.column,
            self.key,
            *_ONE_PART,
            self.total_bytes,
            self.total_bytes,
            self.checksum,
            len(self.label),
            self.label,
        )
        return fields + _OWN_CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))

    def _problem(self) -> str:
        if len(self.key) != 2 * KEY_BYTES or len(self.checksum) != 16:
            return "key or checksum has a wrong length"
        if len(self.label) > MAX_LABEL_BYTES:
            return f"label is longer than {MAX_LABEL_BYTES} bytes"
        return ""


def parse(buffer: Buffer) -> Header:
    """Read a header; raises HeaderError on anything but exactly what ``pack`` makes."""
    raw = bytes(buffer[: HEADER_BYTES + 1])
    if len(raw) != HEADER_BYTES:
        raise HeaderError(f"header has {len(buffer)} bytes, not {HEADER_BYTES}")
    magic, version, column, key, *_, total, checksum, label_bytes, label = _FIELDS.unpack_from(raw)
    if magic != MAGIC:
        raise HeaderError("wrong magic: not ours")
    if version != VERSION:
        raise HeaderError(f"version {version}, not {VERSION}")
    if _OWN_CHECKSUM.unpack_from(raw, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(raw[: _FIELDS.size]):
        raise HeaderError("header checksum does not fit")
    header = Header(key, column, total, checksum, label[:label_bytes])
    problem = header._problem()
    if problem or label_bytes > MAX_LABEL_BYTES:
        raise HeaderError(problem or "label is too long")
    if header.pack() != raw:
        raise HeaderError("a field that is always the same is not")
    return header


def checksum(buffer: Buffer) -> bytes:
    """Of a payload: xxh3-128 of it if it is one part, else of the digests of its parts."""
    return combined(digests(buffer))


class Digests:
    """The digests of a payload that arrives in pieces of any length."""

    def __init__(self) -> None:
        self._done = bytearray()
        self._current = xxhash.xxh3_128()  # unlike the function for all at once, it lets other threads run
        self._room = PART_BYTES

    def update(self, buffer: Buffer) -> None:
        """Take the next bytes."""
        view = memoryview(buffer)
        while len(view) > self._room:
            self._current.update(view[: self._room])
            view = view[self._room :]
            self._done += self._current.digest()
            self._current.reset()
            self._room = PART_BYTES
        self._current.update(view)
        self._room -= len(view)

    def digests(self) -> bytes:
        """Return ``digests`` of all bytes so far."""
        return bytes(self._done) + self._current.digest()


def digests(buffer: Buffer) -> bytes:
    """xxh3-128 of each part of a payload, one after the other: with them it is written anywhere without being
    read for a checksum again."""
    whole = Digests()
    whole.update(buffer)
    return whole.digests()


def combined(part_digests: bytes) -> bytes:
    """The checksum of a payload with these digests."""
    return part_digests if len(part_digests) == _DIGEST_BYTES else _digest(part_digests)


def slot_checksum(key: RowKey, column: int, length: int, part_digests: bytes) -> bytes:
    """What stands in the slot table: it fits this payload under this key, column and length only, since an
    engine that writes where it must not may have mixed up the table's fields as well."""
    return _digest(_SEALED.pack(key, column, length) + part_digests)


def _digest(buffer: bytes) -> bytes:
    digest: bytes = xxhash.xxh3_128_digest(buffer)
    return digest
