"""Objects in the server's memory, or in a directory."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import threading
from collections import OrderedDict

from lmcache.keys import namespace
from lmcache.server.server_storage_backend.abstract_backend import LMSBackendInterface
from lmcache.tiers.base import ObjectId, RowKey
from lmcache.tiers.disk.files import path_of
from lmcache.tiers.disk.tier import DiskTier
from lmcache.tiers.errors import HeaderError, TierUnavailableError
from lmcache.tiers.header import HEADER_BYTES, Buffer, Header, checksum, parse

_OVERHEAD_BYTES = 512  # of one object beside its bytes: key, entry, allocation
_NAMESPACE = namespace({"what": "objects of lm://"})
_INDEX_SECONDS = 30.0
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class LMSLocalBackend(LMSBackendInterface):
    """The received buffers themselves, the one used least recently evicted first.

    Not over an arena: objects may have any size, and are neither copied in nor out. What is being sent stays
    alive by being referred to.
    """

    def __init__(self, capacity_bytes: int = 5 << 30) -> None:
        self._capacity = capacity_bytes
        self._lock = threading.Lock()  # protects what follows
        self.dict: OrderedDict[str, Buffer] = OrderedDict()  # the next victim first
        self.num_bytes = 0  # of memory, overhead included

    def put(self, key: str, kv_chunk_bytes: Buffer) -> None:
        """See LMSBackendInterface."""
        size = _cost(kv_chunk_bytes)
        with self._lock:
            if key in self.dict:
                self.num_bytes -= _cost(self.dict.pop(key))
            if size > self._capacity:
                return
            while self.num_bytes + size > self._capacity:
                self.num_bytes -= _cost(self.dict.popitem(last=False)[1])
            self.dict[key] = kv_chunk_bytes
            self.num_bytes += size

    def contains(self, key: str) -> bool:
        """See LMSBackendInterface."""
        return key in self.dict

    def get(self, key: str) -> Buffer | None:
        """See LMSBackendInterface."""
        with self._lock:
            if key in self.dict:
                self.dict.move_to_end(key)
            return self.dict.get(key)

    def list_keys(self) -> list[str]:
        """See LMSBackendInterface."""
        with self._lock:
            return list(self.dict)

    def close(self) -> None:
        """See LMSBackendInterface."""
        with self._lock:
            self.dict.clear()
            self.num_bytes = 0


class LMSLocalDiskBackend(LMSBackendInterface):
    """A disk tier in the directory ``path``: whole objects with checksums, found again after a restart.

    The key's text is the label of its object. Raises DiskError when the directory can't be used.
    """

    def __init__(self, path: str, capacity_bytes: int = 5 << 30, max_object_bytes: int = 1 << 30) -> None:
        self._path = path
        self._max_object_bytes = max_object_bytes
        self._tier = DiskTier(path, capacity_bytes)

    def put(self, key: str, kv_chunk_bytes: Buffer) -> None:
        """See LMSBackendInterface. Done when the object would outlive this process."""
        row, payload = _row_key(key), memoryview(kv_chunk_bytes)

        with contextlib.suppress(TierUnavailableError):  # the circuit has said it
            # The tier keeps what has the name already: right for the same bytes, which is the usual case.
            header = self._header(row)
            if header is not None and header.checksum != checksum(payload):
                self._tier.remove(ObjectId(row, 0))
            self._tier.store(ObjectId(row, 0), payload, key.encode())

    def contains(self, key: str) -> bool:
        """See LMSBackendInterface."""
        with contextlib.suppress(TierUnavailableError):
            return self._tier.contains(ObjectId(_row_key(key), 0))
        return False

    def get(self, key: str) -> Buffer | None:
        """See LMSBackendInterface."""
        # Only reserved: the kernel gives pages for what is read. Aligned, so that O_DIRECT can be used.
        target = memoryview(mmap.mmap(-1, self._max_object_bytes, flags=_RESERVED))
        with contextlib.suppress(TierUnavailableError):
            loaded = self._tier.load(ObjectId(_row_key(key), 0), target)
            return None if loaded is None else target[: loaded.length]
        return None

    def list_keys(self) -> list[str]:
        """See LMSBackendInterface. Reads the head of every file, after a start once the index is built."""
        self._tier.indexed.wait(_INDEX_SECONDS)
        rows = self._tier.keys()
        headers = [self._header(row) for row in rows if row.startswith(_NAMESPACE)]
        return [header.label.decode() for header in headers if header is not None]

    def close(self) -> None:
        """See LMSBackendInterface."""
        self._tier.close()

    def _header(self, row: RowKey) -> Header | None:
        path = os.path.join(self._path, path_of(ObjectId(row, 0)))
        with contextlib.suppress(OSError, HeaderError), open(path, "rb") as file:
            return parse(file.read(HEADER_BYTES))
        return None


def _cost(payload: Buffer) -> int:
    return len(payload) + _OVERHEAD_BYTES


def _row_key(key: str) -> RowKey:
    return _NAMESPACE + hashlib.sha256(key.encode()).digest()
