"""The two formats of files: a plain payload with a checksum, and encrypted pieces.

A plain file has one page with the header, then the payload. An encrypted file has one page with the
encrypted header, then pieces of 4 MiB of the payload, each encrypted. The payload, or each piece, is padded
with zeros to whole pages. Names of both formats have the same form, so that one index covers both.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TypeAlias

import numpy as np

from lmcache_store.common.units import round_up
from lmcache_store.tiers.base import Loaded, ObjectId, StoredId
from lmcache_store.tiers.encryption.pieces import OVERHEAD_BYTES, Cipher, PiecePlace, stored_key
from lmcache_store.tiers.errors import InvalidObjectError
from lmcache_store.tiers.header import (
    HEADER_BYTES,
    NO_CHECKSUM,
    PART_BYTES,
    Digests,
    Header,
    combined,
    digests,
    parse_of,
)
from lmcache_store.tiers.pages import PAGE_BYTES, blank_pages

PIECE_BYTES = PART_BYTES
"""Length of the pieces of an encrypted payload; the last one may be shorter."""

_MARKER_BYTES = HEADER_BYTES + OVERHEAD_BYTES


class PlainFiles:
    """A header with the payload's checksum, then the payload."""

    def stored_id(self, object_id: ObjectId) -> StoredId:
        """Return the name of an object's file."""
        return StoredId(object_id)

    def num_bytes(self, length: int) -> int:
        """Return the length of the file of a payload."""
        return PAGE_BYTES + round_up(length, PAGE_BYTES)

    def is_aligned(self, payload: memoryview) -> bool:
        """Say whether all transfers of a payload use page-aligned memory, as O_DIRECT requires."""
        address: int = np.frombuffer(payload, np.uint8).__array_interface__["data"][0]
        return address % PAGE_BYTES == 0

    def write(
        self, fd: int, object_id: ObjectId, payload: memoryview, label: bytes, part_digests: bytes
    ) -> None:
        """Write an object into an empty file. Raises OSError."""
        length = len(payload)
        checksum = combined(part_digests or digests(payload))
        whole = length // PAGE_BYTES * PAGE_BYTES
        pages = blank_pages(2 if length > whole else 1)
        pages[:HEADER_BYTES] = _header(object_id, length, checksum, label)
        pages[PAGE_BYTES : PAGE_BYTES + length - whole] = payload[whole:]
        written = os.pwritev(fd, [pages[:PAGE_BYTES], payload[:whole], pages[PAGE_BYTES:]], 0)
        _check_written(written, len(pages) + whole)

    def read(self, fd: int, object_id: ObjectId, into: memoryview, expected: int | None) -> Loaded:
        """Read and verify an object, of ``expected`` bytes if that is known.

        Raises OSError, InvalidObjectError or KeyAbsentError."""
        file_bytes = _file_bytes(fd)
        stored = file_bytes - PAGE_BYTES
        whole = max(0, stored - PAGE_BYTES)  # the last page may not fit into ``into``
        if stored < 0 or stored % PAGE_BYTES or whole > len(into):
            raise InvalidObjectError("length")
        pages = blank_pages(1 + bool(stored))
        if os.preadv(fd, [pages[:PAGE_BYTES], into[:whole], pages[PAGE_BYTES:]], 0) != file_bytes:
            raise InvalidObjectError("length")
        header = parse_of(object_id, pages[:HEADER_BYTES])
        length = header.total_bytes
        if self.num_bytes(length) != file_bytes or length > len(into) or expected not in (None, length):
            raise InvalidObjectError("length")
        into[whole:length] = pages[PAGE_BYTES : PAGE_BYTES + length - whole]
        part_digests = digests(into[:length])
        if combined(part_digests) != header.checksum:
            raise InvalidObjectError("checksum")
        return Loaded(length, part_digests)

    def is_readable(self, fd: int, object_id: ObjectId) -> bool:
        """Say whether the first page allows to read the object. A load shows whether the content is valid.

        Raises OSError, InvalidObjectError or KeyAbsentError."""
        _file_bytes(fd)
        return True


class EncryptedFiles:
    """An encrypted header, then encrypted pieces. See ``PlainFiles``.

    The tags of the pieces show damage of the file. The header has the payload's checksum only if the caller
    knows the digests: the tags can't show that the payload changed between its digests and its encryption.
    Transfers use memory of the cipher, which is aligned, so that O_DIRECT does not depend on the caller's
    memory.
    """

    def __init__(self, cipher: Cipher) -> None:
        self._cipher = cipher

    def stored_id(self, object_id: ObjectId) -> StoredId:
        """See PlainFiles."""
        return StoredId(ObjectId(stored_key(object_id.row_key), object_id.column))

    def num_bytes(self, length: int) -> int:
        """See PlainFiles."""
        num_whole, rest = divmod(length, PIECE_BYTES)
        return PAGE_BYTES + num_whole * _padded(PIECE_BYTES) + _padded(rest)

    def is_aligned(self, payload: memoryview) -> bool:
        """See PlainFiles."""
        return True

    def write(
        self, fd: int, object_id: ObjectId, payload: memoryview, label: bytes, part_digests: bytes
    ) -> None:
        """See PlainFiles. The first write covers the header's page and the first piece."""
        total, begin, position = len(payload), PAGE_BYTES, 0
        buffer = self._cipher.buffer(PAGE_BYTES + _padded(min(total, PIECE_BYTES)))
        checksum = combined(part_digests) if part_digests else NO_CHECKSUM
        header = _header(object_id, total, checksum, label)
        self._cipher.encrypt(PiecePlace.of_header(object_id), header, buffer[:_MARKER_BYTES])
        _clear(buffer[_MARKER_BYTES:PAGE_BYTES])
        for start in range(0, max(1, total), PIECE_BYTES):
            piece = payload[start : start + PIECE_BYTES]
            end = begin + _padded(len(piece))
            if total:
                encrypted_end = begin + len(piece) + OVERHEAD_BYTES
                self._cipher.encrypt(PiecePlace(object_id, total, start), piece, buffer[begin:encrypted_end])
                _clear(buffer[encrypted_end:end])
            _check_written(os.pwritev(fd, [buffer[:end]], position), end)
            begin, position = 0, position + end

    def read(self, fd: int, object_id: ObjectId, into: memoryview, expected: int | None) -> Loaded:
        """See PlainFiles. The first read covers the header's page and the first piece."""
        file_bytes = _file_bytes(fd)
        if file_bytes < PAGE_BYTES or file_bytes % PAGE_BYTES:
            raise InvalidObjectError("length")
        buffer = self._read_some(fd, min(file_bytes, PAGE_BYTES + _padded(PIECE_BYTES)), 0)
        header = self._parse_page(object_id, buffer)
        total = header.total_bytes
        if self.num_bytes(total) != file_bytes or total > len(into) or expected not in (None, total):
            raise InvalidObjectError("length")
        payload_digests = Digests()
        encrypted, position = buffer[PAGE_BYTES:], len(buffer)
        for start in range(0, total, PIECE_BYTES):
            if start:
                encrypted = self._read_some(fd, min(file_bytes - position, _padded(PIECE_BYTES)), position)
                position += len(encrypted)
            piece = into[start : min(start + PIECE_BYTES, total)]
            place = PiecePlace(object_id, total, start)
            self._cipher.decrypt(place, encrypted[: len(piece) + OVERHEAD_BYTES], piece)
            payload_digests.update(piece)
        part_digests = payload_digests.digests()
        if header.checksum not in (NO_CHECKSUM, combined(part_digests)):
            raise InvalidObjectError("checksum")
        return Loaded(total, part_digests)

    def is_readable(self, fd: int, object_id: ObjectId) -> bool:
        """See PlainFiles. The key version may be absent."""
        _file_bytes(fd)
        self._parse_page(object_id, self._read_some(fd, PAGE_BYTES, 0))
        return True

    def _parse_page(self, object_id: ObjectId, page: memoryview) -> Header:
        """Decrypt the header at the begin of a file. Raises InvalidObjectError or KeyAbsentError."""
        header = memoryview(bytearray(HEADER_BYTES))
        self._cipher.decrypt(PiecePlace.of_header(object_id), page[:_MARKER_BYTES], header)
        return parse_of(object_id, header)

    def _read_some(self, fd: int, num_bytes: int, position: int) -> memoryview:
        buffer = self._cipher.buffer(num_bytes)
        if os.preadv(fd, [buffer], position) != num_bytes:
            raise InvalidObjectError("length")
        return buffer


FileFormat: TypeAlias = PlainFiles | EncryptedFiles
"""How the files of a tier are named, written and read."""


def _padded(length: int) -> int:
    """Return the bytes of a file that an encrypted piece of ``length`` bytes takes; 0 for no piece."""
    return round_up(length + OVERHEAD_BYTES, PAGE_BYTES) if length else 0


def _clear(memory: memoryview) -> None:
    memory[:] = bytes(len(memory))  # padding must not contain earlier pieces of this thread


def _header(object_id: ObjectId, total_bytes: int, checksum: bytes, label: bytes) -> bytes:
    return Header(object_id.row_key, object_id.column, total_bytes, checksum, label).pack()


def _file_bytes(fd: int) -> int:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise InvalidObjectError("type")
    return status.st_size


def _check_written(written: int, expected: int) -> None:
    if written != expected:
        raise OSError(errno.ENOSPC, "no space for the whole file")
