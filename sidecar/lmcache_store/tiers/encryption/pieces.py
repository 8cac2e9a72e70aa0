"""The format of an encrypted piece, and the contract of a cipher. Pure.

A payload is stored in pieces, and each piece can be decrypted without the others::

    magic   key version   salt       ciphertext       tag
    4       4             24 bytes   as the piece     16 bytes

The cipher derives the key of the piece, and its nonce, from the salt and the row key. The tag authenticates
the piece together with its **place**: format, key version, row key, column, length of the payload, position
and length of the piece. An object's header is encrypted in the same way, and has a place of its own.

A row key is a hash of a prompt and of the tenant's cache salt. A medium names an encrypted row by a hash of
the row key (``stored_key``). So a reader of the medium who has the cluster's key, but not the cache salt, can
decrypt no row of the tenant. docs/adr/0044 has the reasons.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from typing import NamedTuple, Protocol

from lmcache_store.tiers.base import ObjectId, RowKey, split_row_key
from lmcache_store.tiers.errors import InvalidObjectError
from lmcache_store.tiers.header import Buffer

MAGIC = b"LMe1"
"""First bytes of each encrypted piece. The digit is the version of the format."""

SALT_BYTES, TAG_BYTES = 24, 16

_PREAMBLE = struct.Struct(f"<4sI{SALT_BYTES}s")
PREAMBLE_BYTES = _PREAMBLE.size
OVERHEAD_BYTES = PREAMBLE_BYTES + TAG_BYTES
"""Bytes by which an encrypted piece is longer than its content."""

MARK_BYTES, ENCRYPTED_MARK_BYTES = 8, 16
"""Bytes of a document's mark, and of an encrypted one: one block of AES."""

_PLACE = struct.Struct("<4sI68sQQQ?")
_NAME_TAG = b"lmcache encrypted name 1"


class PiecePlace(NamedTuple):
    """Place of a piece: its object, and its position there."""

    object_id: ObjectId
    total_bytes: int
    """Length of the whole payload. 0 for a header, which says the length."""
    start: int
    """Position of the piece in the payload, in bytes."""
    is_header: bool = False

    @classmethod
    def of_header(cls, object_id: ObjectId) -> PiecePlace:
        """Return the place of an object's header."""
        return cls(object_id, 0, 0, is_header=True)

    def associated_data(self, key_version: int, length: int) -> bytes:
        """Return the bytes that the tag authenticates besides the content, which has ``length`` bytes."""
        return _PLACE.pack(
            MAGIC, key_version, self.object_id, self.total_bytes, self.start, length, self.is_header
        )


class Cipher(Protocol):
    """Encrypts and decrypts pieces of one tier. Thread-safe. The keys may change while it is used."""

    @property
    def problem(self) -> str:
        """Reason why there is no key yet; empty as soon as there is one."""

    def check(self) -> None:
        """Raise NoKeyError while there is no key."""

    def buffer(self, num_bytes: int) -> memoryview:
        """Return page-aligned memory of this thread, for one encrypted piece. The next call returns it again.

        Its content is undefined."""

    def encrypt(self, place: PiecePlace, content: Buffer, into: memoryview) -> None:
        """Encrypt a piece with the newest key. ``into`` must have ``OVERHEAD_BYTES`` more than the content.

        Raises NoKeyError if there is no key yet."""

    def decrypt(self, place: PiecePlace, piece: memoryview, into: memoryview) -> None:
        """Decrypt a piece into ``into``, which must have its content's length.

        Raises KeyAbsentError if the cipher lacks the key version of the piece, and InvalidObjectError if the
        bytes are not the piece of this place. The content of ``into`` is then undefined."""

    def encrypt_marks(self, namespace: bytes, marks: bytes) -> bytes:
        """Encrypt marks of documents, packed. Equal marks have equal results, so that a set has each once.

        Raises NoKeyError if there is no key yet."""

    def decrypt_marks(self, namespace: bytes, encrypted: bytes) -> bytes:
        """Return the marks among packed encrypted ones. Omits those of other keys and namespaces."""


@functools.lru_cache(8192)  # about 2 MB. A lookup asks for each column of a row, and for its server
def stored_key(row_key: RowKey) -> RowKey:
    """Return the key by which a medium names an encrypted row. The row key cannot be computed from it.

    The namespace stays visible, so that people can find the rows of a model.
    """
    return split_row_key(row_key)[0] + hashlib.sha256(_NAME_TAG + row_key).digest()


def pack_preamble(key_version: int, salt: bytes) -> bytes:
    """Return the bytes in front of a ciphertext."""
    return _PREAMBLE.pack(MAGIC, key_version, salt)


def parse_preamble(piece: Buffer) -> tuple[int, bytes]:
    """Return key version and salt of an encrypted piece. Raises InvalidObjectError if it is not one."""
    if len(piece) < OVERHEAD_BYTES:
        raise InvalidObjectError("length")
    magic, key_version, salt = _PREAMBLE.unpack_from(piece)
    if magic != MAGIC:
        raise InvalidObjectError("not encrypted")
    return key_version, salt
