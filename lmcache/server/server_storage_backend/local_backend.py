"""Storage of the server's objects in memory, or in a directory."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import threading
from collections import OrderedDict

from lmcache.server.server_storage_backend.abstract_backend import LMSBackendInterface
from lmcache_store.keys import namespace
from lmcache_store.tiers.base import ObjectId, RowKey, StoredId
from lmcache_store.tiers.disk.files import path_of
from lmcache_store.tiers.disk.tier import DiskTier
from lmcache_store.tiers.errors import InvalidObjectError, TierUnavailableError
from lmcache_store.tiers.header import HEADER_BYTES, Buffer, Header, checksum, parse

_OVERHEAD_BYTES = 512  # per object: key, dictionary entry, allocation
_NAMESPACE = namespace({"what": "objects of lm://"})
_INDEX_SECONDS = 30.0
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class LMSLocalBackend(LMSBackendInterface):
    """Stores the received buffers themselves, and evicts the least recently used ones first.

    It does not use an arena: objects may have any size, and are not copied. An evicted object stays in memory
    while it is being sent.
    """

    def __init__(self, capacity_bytes: int = 5 << 30) -> None:
        self._capacity = capacity_bytes
        self._lock = threading.Lock()  # protects the attributes below
        self.dict: OrderedDict[str, Buffer] = OrderedDict()  # the next victim is first
        self.num_bytes = 0  # bytes of memory, including the overhead

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
    """Stores objects with checksums in the directory ``path``, where they survive a restart.

    The text of the key is the label of its object. Raises DiskError if the directory is unusable.
    """

    def __init__(self, path: str, capacity_bytes: int = 5 << 30, max_object_bytes: int = 1 << 30) -> None:
        self._path = path
        self._max_object_bytes = max_object_bytes
        self._tier = DiskTier(path, capacity_bytes)

    def put(self, key: str, kv_chunk_bytes: Buffer) -> None:
        """See LMSBackendInterface. Returns when the object would survive a crash of this process."""
        row, payload = _row_key(key), memoryview(kv_chunk_bytes)

        with contextlib.suppress(TierUnavailableError):  # the circuit logs it
            # The tier does not replace an object of the same name. So an object with other bytes, or one that
            # can't be read, is removed first.
            header = self._header(row)
            if header is None or header.checksum != checksum(payload):
                self._tier.remove(ObjectId(row, 0))
            self._tier.store(ObjectId(row, 0), payload, key.encode())

    def contains(self, key: str) -> bool:
        """See LMSBackendInterface."""
        with contextlib.suppress(TierUnavailableError):
            return self._tier.contains(ObjectId(_row_key(key), 0))
        return False

    def get(self, key: str) -> Buffer | None:
        """See LMSBackendInterface."""
        # The kernel provides pages only for bytes that are read. The memory is aligned, as O_DIRECT requires.
        target = memoryview(mmap.mmap(-1, self._max_object_bytes, flags=_RESERVED))
        with contextlib.suppress(TierUnavailableError):
            loaded = self._tier.load(ObjectId(_row_key(key), 0), target)
            return None if loaded is None else target[: loaded.length]
        return None

    def list_keys(self) -> list[str]:
        """See LMSBackendInterface.

        Reads the header of every file; after a start, waits for the index first.
        """
        self._tier.indexed.wait(_INDEX_SECONDS)
        rows = self._tier.keys()
        headers = [self._header(row) for row in rows if row.startswith(_NAMESPACE)]
        return [header.label.decode() for header in headers if header is not None]

    def close(self) -> None:
        """See LMSBackendInterface."""
        self._tier.close()

    def _header(self, row: RowKey) -> Header | None:
        path = os.path.join(self._path, path_of(StoredId(ObjectId(row, 0))))
        with contextlib.suppress(OSError, InvalidObjectError), open(path, "rb") as file:
            return parse(file.read(HEADER_BYTES))
        return None


def _cost(payload: Buffer) -> int:
    return len(payload) + _OVERHEAD_BYTES


def _row_key(key: str) -> RowKey:
    return _NAMESPACE + hashlib.sha256(key.encode()).digest()
