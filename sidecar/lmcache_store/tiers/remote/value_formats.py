"""The two formats of values in Redis: plain pieces with checksums, and encrypted pieces.

Rows of the two formats have different names, so that a client of one format never reads, replaces or deletes
rows of the other one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeAlias

import xxhash

from lmcache_store.tiers.base import ObjectId, RowKey
from lmcache_store.tiers.encryption.pieces import (
    ENCRYPTED_MARK_BYTES,
    MARK_BYTES,
    OVERHEAD_BYTES,
    Cipher,
    PiecePlace,
    stored_key,
)
from lmcache_store.tiers.errors import InvalidObjectError
from lmcache_store.tiers.header import HEADER_BYTES, Buffer, Header, parse_of

SEAL_BYTES = 16
"""Length of the xxh3-128 that follows each plain piece."""

_SEALED_PLACE = struct.Struct("<68sQQ")
"""Fields of a seal besides the piece: object id, length of the payload, position of the piece in it."""


class PlainValues:
    """Pieces that a checksum follows."""

    marker_bytes = HEADER_BYTES

    def prefix(self, prefix: str) -> str:
        """Return the first part of the names of this format. ``prefix``: that of the tier."""
        return prefix

    def stored_key(self, row_key: RowKey) -> RowKey:
        """Return the key by which Redis names a row."""
        return row_key

    def pack_marker(self, object_id: ObjectId, header: Header) -> Buffer:
        """Return the value of a marker."""
        return header.pack()

    def parse_marker(self, object_id: ObjectId, marker: Buffer) -> Header:
        """Return the header in a marker. Raises InvalidObjectError or KeyAbsentError."""
        return parse_of(object_id, marker)

    def pack_piece(self, place: PiecePlace, piece: memoryview) -> Sequence[Buffer]:
        """Return the value of a piece, in buffers that are valid until the next call in this thread."""
        return [piece, seal_of(place.object_id, place.total_bytes, place.start, piece)]

    def pack_marks(self, namespace: bytes, marks: bytes) -> Sequence[bytes]:
        """Return the members of a set of marks. ``marks``: packed 64-bit numbers."""
        return _split(marks, MARK_BYTES)

    def parse_marks(self, namespace: bytes, members: Sequence[bytes]) -> bytes:
        """Return the packed marks of valid members."""
        return b"".join(member for member in members if len(member) == MARK_BYTES)

    def buffers(self, piece: memoryview) -> Sequence[memoryview]:
        """Return the memory into which to read the value of a piece that has the length of ``piece``."""
        return [piece, memoryview(bytearray(SEAL_BYTES))]

    def finish_piece(self, place: PiecePlace, buffers: Sequence[memoryview], piece: memoryview) -> None:
        """Check the value that was read into ``buffers``. Its content is then in ``piece``.

        Raises InvalidObjectError or KeyAbsentError."""
        if seal_of(place.object_id, place.total_bytes, place.start, piece) != buffers[1]:
            raise InvalidObjectError("checksum")


class EncryptedValues:
    """Encrypted pieces and markers. See ``PlainValues``.

    The tag of a piece takes the place of the seal, so the ciphertext is not hashed.
    """

    marker_bytes = HEADER_BYTES + OVERHEAD_BYTES

    def __init__(self, cipher: Cipher) -> None:
        self._cipher = cipher

    def prefix(self, prefix: str) -> str:
        """See PlainValues."""
        return f"{prefix}:enc"

    def stored_key(self, row_key: RowKey) -> RowKey:
        """See PlainValues."""
        return stored_key(row_key)

    def pack_marker(self, object_id: ObjectId, header: Header) -> Buffer:
        """See PlainValues."""
        marker = memoryview(bytearray(self.marker_bytes))
        self._cipher.encrypt(PiecePlace.of_header(object_id), header.pack(), marker)
        return marker

    def parse_marker(self, object_id: ObjectId, marker: Buffer) -> Header:
        """See PlainValues."""
        header = memoryview(bytearray(HEADER_BYTES))
        self._cipher.decrypt(PiecePlace.of_header(object_id), memoryview(marker), header)
        return parse_of(object_id, header)

    def pack_piece(self, place: PiecePlace, piece: memoryview) -> Sequence[Buffer]:
        """See PlainValues."""
        (value,) = self.buffers(piece)
        self._cipher.encrypt(place, piece, value)
        return [value]

    def pack_marks(self, namespace: bytes, marks: bytes) -> Sequence[bytes]:
        """See PlainValues."""
        return _split(self._cipher.encrypt_marks(namespace, marks), ENCRYPTED_MARK_BYTES)

    def parse_marks(self, namespace: bytes, members: Sequence[bytes]) -> bytes:
        """See PlainValues."""
        encrypted = (member for member in members if len(member) == ENCRYPTED_MARK_BYTES)
        return self._cipher.decrypt_marks(namespace, b"".join(encrypted))

    def buffers(self, piece: memoryview) -> Sequence[memoryview]:
        """See PlainValues."""
        return [self._cipher.buffer(len(piece) + OVERHEAD_BYTES)]

    def finish_piece(self, place: PiecePlace, buffers: Sequence[memoryview], piece: memoryview) -> None:
        """See PlainValues."""
        self._cipher.decrypt(place, buffers[0], piece)


ValueFormat: TypeAlias = PlainValues | EncryptedValues
"""How the pieces and markers of a tier are written and read."""
PLAIN: ValueFormat = PlainValues()


def _split(packed: bytes, item_bytes: int) -> list[bytes]:
    return [packed[start : start + item_bytes] for start in range(0, len(packed), item_bytes)]


def seal_of(object_id: ObjectId, total_bytes: int, start: int, piece: memoryview) -> bytes:
    """Return the seal of a plain piece that starts at byte ``start`` of the payload."""
    seal = xxhash.xxh3_128(_SEALED_PLACE.pack(object_id, total_bytes, start))
    seal.update(piece)
    return bytes(seal.digest())
