"""The header in front of every stored payload, and the checksum of payloads.

A payload is the engine's bytes, untouched. What stands in front says what they are; whoever reads them trusts
nothing else: not the name of the object, not its length, not that it was written by this version.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeAlias

import xxhash

from lmcache.tiers.base import KEY_BYTES, RowKey, TierError

MAGIC = b"LMCchunk"
VERSION = 1
MAX_LABEL_BYTES = 512
MAX_PARTS = 1 << 20

_FIELDS = struct.Struct("<8sII64sIIQQ16sH512s62x")
_OWN_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _OWN_CHECKSUM.size
"""Length of a header: 704, a multiple of a cache line."""

# At 10-30 GB/s a piece takes well under 1 ms, should a build of xxhash hold the GIL.
_PIECE_BYTES = 4 << 20

Buffer: TypeAlias = bytes | bytearray | memoryview


class BadHeader(TierError):
    """The bytes are not a header of this version; the message says what is wrong."""


@dataclass(frozen=True)
class Header:
    """What one stored part is. A payload of ``total_bytes`` is stored in ``num_parts`` parts."""

    key: RowKey
    column: int
    part: int
    num_parts: int
    payload_bytes: int  # of this part
    total_bytes: int  # of all parts
    checksum: bytes  # xxh3-128 of this part's payload
    label: bytes = b""  # opaque; for people and for the library

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
            self.part,
            self.num_parts,
            self.payload_bytes,
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
        if not 0 <= self.part < self.num_parts <= MAX_PARTS:
            return f"part {self.part} of {self.num_parts}"
        if self.payload_bytes > self.total_bytes:
            return "part is longer than the whole"
        return ""


def parse(buffer: Buffer) -> Header:
    """Read a header; raises BadHeader on anything but exactly what ``pack`` makes."""
    raw = bytes(buffer[: HEADER_BYTES + 1])
    if len(raw) != HEADER_BYTES:
        raise BadHeader(f"header has {len(buffer)} bytes, not {HEADER_BYTES}")
    magic, version, column, key, part, num_parts, payload, total, checksum, label_bytes, label = (
        _FIELDS.unpack_from(raw)
    )
    if magic != MAGIC:
        raise BadHeader("wrong magic: not ours")
    if version != VERSION:
        raise BadHeader(f"version {version}, not {VERSION}")
    if _OWN_CHECKSUM.unpack_from(raw, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(raw[: _FIELDS.size]):
        raise BadHeader("header checksum does not fit")
    header = Header(key, column, part, num_parts, payload, total, checksum, label[:label_bytes])
    problem = header._problem()
    if problem or label_bytes > MAX_LABEL_BYTES:
        raise BadHeader(problem or "label is too long")
    if header.pack() != raw:
        raise BadHeader("bytes that should be zero are not")
    return header


def checksum(buffer: Buffer) -> bytes:
    """xxh3-128 of a payload, in pieces: another thread never waits 1 ms for it."""
    digest = xxhash.xxh3_128()
    view = memoryview(buffer)
    for offset in range(0, len(view), _PIECE_BYTES):
        digest.update(view[offset : offset + _PIECE_BYTES])
    return digest.digest()
