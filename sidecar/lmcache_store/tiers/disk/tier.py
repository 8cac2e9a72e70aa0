"""The disk tier: objects in one directory, which one process uses.

**Durability.** A store returns when the object has its final name. Its bytes are then on the volume or in the
page cache. A killed process therefore loses no acknowledged object. A power loss may lose the most recent
objects. Waiting for the volume to confirm each file would make stores a fifth slower, which a cache does not
need. A wrong object is never served: version, name, lengths and checksum are compared. A mismatch is a miss,
counted by reason, and the file is deleted.

**Encryption.** With a cipher, all files are encrypted, and a plain file is invalid. A file whose key version
is absent is a miss. It stays until a store replaces it, or the tier evicts it. While there is no key at all,
the circuit is open.

**Start.** A thread lists all folders, which returns sizes and times without opening a file. It then adds the
objects to the index, oldest first. Until the index is complete, objects are found by their paths. A store
waits up to 1 s for the index, because the free capacity is unknown before, and is then refused.

**Outages.** A fault of the volume raises TierUnavailableError and opens the circuit. Operations then raise
immediately until a probe succeeds. When the volume is full, the tier evicts. A system call that never returns
(a network volume without its server) has no deadline: use a local volume.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lmcache_store.tiers.base import Loaded, ObjectId, OwnerBound, RowKey, StoredId
from lmcache_store.tiers.circuit import Circuit
from lmcache_store.tiers.disk.files import FULL, MAX_SHARE, open_directory
from lmcache_store.tiers.disk.index import DiskIndex
from lmcache_store.tiers.encryption.pieces import Cipher
from lmcache_store.tiers.errors import InvalidObjectError, KeyAbsentError
from lmcache_store.tiers.stats import ObjectStats

logger = logging.getLogger(__name__)

_MAX_WAIT_SECONDS = 1.0
_NUM_NAME_LOCKS = 64
_SLICE = 256  # objects that are indexed before other threads may run

# A foreign file has the name, or the file would be too large. The volume itself is healthy.
_REFUSALS = FULL | {errno.EFBIG, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP}


class DiskTier:
    """Thread-safe. ``capacity_bytes`` limits the blocks that objects take, headers included.

    Raises DiskError if the directory is in use or unusable, or if its volume is too small.
    """

    takes_writes = True
    is_local = True

    def __init__(
        self, directory: str | os.PathLike[str], capacity_bytes: int, cipher: Cipher | None = None
    ) -> None:
        self.address = os.fspath(directory)
        self.is_encrypted = cipher is not None
        self.stats = ObjectStats()
        self.residence_seconds = math.inf
        """Infinite: this tier does not measure it."""
        self.health = Circuit(f"disk tier {os.path.abspath(directory)}", self._probe)
        self.health.subscribe(self._note)
        self.indexed = threading.Event()
        """Set when the index is complete."""
        self._capacity = capacity_bytes
        self._lock = threading.Lock()  # protects stats and the next two
        self._index: DiskIndex | None = None  # None until it is complete
        self._removed: list[StoredId] = []  # objects removed until then
        self._name_locks = [threading.Lock() for _ in range(_NUM_NAME_LOCKS)]  # serialize changes of one path
        self._directory = open_directory(os.path.abspath(directory), capacity_bytes, cipher)
        self._stored_id = self._directory.stored_id
        self._closing = False
        self._start_scan()
        if cipher is not None and cipher.problem:
            self.health.failure(cipher.problem)  # probes close the circuit when there is a key

    @property
    def used_bytes(self) -> int:
        """Bytes of the volume that objects take; 0 until ``indexed``."""
        index = self._index
        return 0 if index is None else index.num_bytes

    def check(self) -> None:
        """Do nothing: the directory was checked when it was opened, and the circuit probes it."""

    def keys(self) -> list[RowKey]:
        """Return the rows with a stored column, in eviction order; none until ``indexed``.

        With a cipher, these are not row keys, but the names of rows in the directory."""
        with self._lock:
            return [] if self._index is None else list(dict.fromkeys(i.row_key for i in self._index.ids()))

    def contains(self, object_id: ObjectId) -> bool:
        """Is the object stored?"""
        with self._watching():
            return self._contains(object_id)

    def find_each(self, ids: Sequence[ObjectId]) -> list[bool]:
        """Say of each object whether it is stored. This never counts as a use."""
        with self._watching():
            return list(map(self._contains, ids))

    def load(self, object_id: ObjectId, into: memoryview, length: int | None = None) -> Loaded | None:
        """Read one object into ``into``. Returns None on a miss; the contents of ``into`` are then undefined.

        An object whose payload does not have ``length`` bytes is invalid."""
        with self._watching():
            return self._load(object_id, into, length)

    def rate_of(self, keys: Sequence[RowKey]) -> float | None:
        """See LowerTier."""
        return None

    def store(
        self, object_id: ObjectId, payload: memoryview, label: bytes = b"", digests: bytes = b""
    ) -> bool:
        """Write one object, or mark a stored one as used; ``remove`` it first to replace it.

        Returns False if it was refused; the stats have the reason."""
        with self._watching():
            return self._store(object_id, payload, label, digests)

    def admits(self, lengths: Mapping[ObjectId, int], bound: OwnerBound) -> bool:
        """See BoundedTier. All objects are admitted until ``indexed``."""
        with self._lock:
            if self._index is None:
                return True
            new = [length for each, length in lengths.items() if self._stored_id(each) not in self._index]
            num_bytes = sum(map(self._directory.object_bytes, new))
            if not num_bytes or self._index.bytes_by_owner[bound.owner] + num_bytes <= bound.num_bytes:
                return True
        return self._refuse("tenant")

    def assign(self, object_id: ObjectId, owner: str) -> None:
        """See BoundedTier. Objects from before a restart count when they are stored again."""
        with self._lock:
            if self._index is not None:
                self._index.assign(self._stored_id(object_id), owner)

    def bytes_by_owner(self) -> dict[str, int]:
        """See BoundedTier. Empty until ``indexed``."""
        with self._lock:
            return {} if self._index is None else dict(self._index.bytes_by_owner)

    def touch(self, keys: Sequence[RowKey], num_columns: int) -> set[RowKey]:
        """See LowerTier."""
        rows = {self._stored_id(ObjectId(key, n)): key for key in keys for n in range(num_columns)}
        with self._watching():
            with self._lock:
                indexed = list(rows) if self._index is None else self._index.touch(rows)
            missing = {each for each in indexed if not self._directory.refresh(each)}
            absent = missing | (rows.keys() - set(indexed))
            return {rows[each] for each in absent}

    def remove(self, object_id: ObjectId) -> bool:
        """Delete one object. False: it was not stored."""
        with self._watching():
            return self._remove(self._stored_id(object_id))

    def _probe(self) -> None:
        """Write and read a page, in the directory that is at the path now. Raises OSError."""
        try:
            self._directory.check()
        except OSError:
            if not self._directory.reopen(int(self._capacity / MAX_SHARE)):
                raise
            with self._lock:  # another directory: scan it again
                self._index = None
                self.indexed.clear()
            self._directory.check()
        with self._lock:  # several may probe at once
            if not self.indexed.is_set() and not self._scan.is_alive():
                self._start_scan()

    def close(self) -> None:
        """Release the directory. The threads that used the tier must have ended."""
        self._closing = True
        self.health.end(_MAX_WAIT_SECONDS)
        self._scan.join(_MAX_WAIT_SECONDS)  # a hung volume must not block process exit
        self._directory.close()

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Open the circuit on an error of the volume."""
        self.health.check()
        try:
            yield
        except OSError as error:
            raise self.health.failure(error) from error

    def _note(self, failed: bool) -> None:
        with self._lock:
            self.stats.failures += failed

    def _contains(self, object_id: ObjectId) -> bool:
        stored_id = self._stored_id(object_id)
        with self._lock:
            if self._index is not None:
                return stored_id in self._index
        return self._directory.contains(stored_id)

    def _load(self, object_id: ObjectId, into: memoryview, length: int | None) -> Loaded | None:
        loaded, reason, is_key_absent = None, "", False
        if self._contains(object_id):
            try:
                loaded = self._directory.read(object_id, into, length)
            except InvalidObjectError as invalid:
                reason = str(invalid)
            except KeyAbsentError:
                is_key_absent = True
            except OSError as error:
                if error.errno == errno.EIO:  # a bad block would open the circuit at every load
                    with contextlib.suppress(OSError):
                        self._remove(self._stored_id(object_id))
                raise
            self.health.success()
            if loaded is not None:
                self._use(self._stored_id(object_id), waits=False)
            elif not is_key_absent:  # invalid, or deleted by another program
                self._remove(self._stored_id(object_id))
        with self._lock:
            if reason:
                self.stats.note_invalid(object_id.row_key, reason)
            else:
                self.stats.hits += loaded is not None
                self.stats.misses += loaded is None
                self.stats.key_absent += is_key_absent
        return loaded

    def _store(self, object_id: ObjectId, payload: memoryview, label: bytes, digests: bytes) -> bool:
        stored_id = self._stored_id(object_id)
        is_stored = self._contains(object_id) and self._directory.is_readable(object_id)
        if is_stored and self._use(stored_id):
            with self._lock:
                self.stats.touched += 1
            return True
        if not (self._scan.is_alive() or self.indexed.is_set()):
            raise OSError(errno.EIO, "the directory could not be listed")
        self.indexed.wait(max(0.0, self._wait_ends - time.monotonic()))
        index = self._index
        if index is None:
            return self._refuse("indexing")
        num_bytes = self._directory.object_bytes(len(payload))
        slot = self._reserve(index, num_bytes)
        if slot is None:
            return self._refuse("capacity")
        try:
            temporary = self._write(index, object_id, payload, label, digests)
            with self._name_lock(stored_id):
                self._directory.publish(temporary, stored_id)
                with self._lock:
                    index.commit(slot, stored_id)
                    self.stats.stored += 1
        except BaseException as error:
            with self._lock:
                index.abort(slot)
            if isinstance(error, OSError) and error.errno in _REFUSALS:
                return self._refuse(errno.errorcode[error.errno])
            raise
        self.health.success()
        return True

    def _refuse(self, reason: str) -> bool:
        with self._lock:
            self.stats.refused[reason] += 1
        return False

    def _write(
        self, index: DiskIndex, object_id: ObjectId, payload: memoryview, label: bytes, digests: bytes
    ) -> str:
        try:
            return self._directory.write(object_id, payload, label, digests)
        except OSError as error:
            if error.errno not in FULL:
                raise
        # Other users fill the volume: use less than the capacity.
        limit = index.num_bytes - self._directory.object_bytes(len(payload))
        while index.num_bytes > limit and self._evict(index):
            pass
        return self._directory.write(object_id, payload, label, digests)

    def _use(self, stored_id: StoredId, *, waits: bool = True) -> bool:
        """Mark an object as used. False: another program deleted its file.

        Without ``waits``, does nothing while another thread has the lock: it may be deleting a file."""
        lock = self._name_lock(stored_id)
        if not lock.acquire(blocking=waits):
            return True
        try:
            is_stored = self._directory.refresh(stored_id)
            with self._lock:
                if self._index is not None:
                    (self._index.use if is_stored else self._index.discard)(stored_id)
        finally:
            lock.release()
        return is_stored

    def _reserve(self, index: DiskIndex, num_bytes: int) -> int | None:
        """Reserve ``num_bytes``, evicting objects if necessary. None: the capacity is too small."""
        while num_bytes <= self._capacity:
            with self._lock:
                slot = index.reserve(num_bytes)
            if slot is not None or not self._evict(index):
                return slot
        return None

    def _evict(self, index: DiskIndex) -> bool:
        """Delete the next victim. False: there is none."""
        with self._lock:
            victim = next(index.ids(), None)
        if victim is None:
            return False
        removed = self._remove(victim, index)
        with self._lock:
            self.stats.evicted += removed
        return True

    def _remove(self, stored_id: StoredId, building: DiskIndex | None = None) -> bool:
        with self._name_lock(stored_id):
            removed = self._directory.remove(stored_id)
            with self._lock:
                index = building or self._index
                if index is None:
                    self._removed.append(stored_id)
                else:
                    index.discard(stored_id)
        return removed

    def _name_lock(self, stored_id: StoredId) -> threading.Lock:
        return self._name_locks[hash(stored_id) % _NUM_NAME_LOCKS]

    def _start_scan(self) -> None:
        self._wait_ends = time.monotonic() + _MAX_WAIT_SECONDS
        self._scan = threading.Thread(target=self._build_index, name="disk-scan", daemon=True)
        self._scan.start()

    def _build_index(self) -> None:
        index, ids, sizes, mtimes = DiskIndex(self._capacity), [], array("Q"), array("d")
        try:
            for stored_id, num_bytes, mtime in self._directory.scan():
                ids.append(stored_id)
                sizes.append(num_bytes)
                mtimes.append(mtime)
                if self._closing:
                    return
            oldest_first = np.argsort(np.frombuffer(mtimes), kind="stable")
            for start in range(0, len(ids), _SLICE):
                time.sleep(0)
                for position in oldest_first[start : start + _SLICE].tolist():
                    slot = self._reserve(index, sizes[position])
                    if slot is None:
                        self._remove(ids[position])
                    else:
                        index.commit(slot, ids[position])
                if self._closing:
                    return
        except OSError as error:
            # The next store fails and opens the circuit.
            logger.warning("disk tier %s: can't list the directory: %s", self._directory.path, error)
            return
        with self._lock:
            for stored_id in self._removed:
                index.discard(stored_id)
            self._removed.clear()
            self._index = index
        self.indexed.set()
