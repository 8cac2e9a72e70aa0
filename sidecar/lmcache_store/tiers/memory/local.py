"""The memory tier for threads: the storage of the local backend of the library.

One lock guards the index, and no thread holds this lock while it copies bytes. No other thread can reuse a
row meanwhile, because a row that a thread reads is leased, and a row that a thread writes is not yet in the
index.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

from lmcache_store.common.units import ceil_div
from lmcache_store.tiers.base import RowKey
from lmcache_store.tiers.errors import ArenaError
from lmcache_store.tiers.memory.allocator import SLOTS_PER_FRAME
from lmcache_store.tiers.memory.contracts import Arena
from lmcache_store.tiers.memory.rows import MemoryRows
from lmcache_store.tiers.stats import MemoryStats

_THIS_PROCESS = bytes(16)  # the owner of all rows is this process


class LocalStore:
    """Payloads by key, in an arena of one column. Thread-safe.

    A payload takes as many slots as it needs, at most ``SLOTS_PER_FRAME``. ``row`` is always the number of
    its first slot, as in ``Arena.view(row, 0, length)``. Payloads of one ``request`` form a chain, head
    first, which is evicted from its tail. Without a request, a payload is a chain by itself.
    """

    def __init__(self, arena: Arena) -> None:
        if arena.geometry is None or arena.geometry.num_columns != 1:
            raise ArenaError("a local store needs an arena of one column")
        self._slot_bytes = arena.geometry.slot_bytes
        self._lock = threading.Lock()
        self._rows = MemoryRows(arena, slots_per_frame=SLOTS_PER_FRAME)  # protected by _lock

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all usable slots."""
        return self._rows.usable_slots * self._slot_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the slots in use, including payloads that are being written."""
        return self._rows.allocator.num_used_slots * self._slot_bytes

    @property
    def stats(self) -> MemoryStats:
        """Counters of hits, misses, refusals and removals."""
        return self._rows.stats

    def put(self, key: RowKey, length: int, fill: Callable[[int], None], *, request: Hashable = None) -> bool:
        """Store ``length`` bytes under the key. ``fill(row)`` writes them.

        The previous payload is replaced when ``fill`` returns. If ``fill`` raises, the previous payload
        stays, and the error propagates. Returns False, replacing nothing, if the payload is longer than a
        frame or all slots are in use.
        """
        with self._lock:
            row = self._rows.open_row(key, max(1, ceil_div(length, self._slot_bytes)), request)
            if row is None:
                return False
            self._rows.write(row, 0, _THIS_PROCESS, length)
        number = row.slot.row
        try:
            fill(self._rows.allocator.first_slot(number))
        except BaseException:
            with self._lock:
                row.writers.clear()
                self._rows.invalidate(number)
                self._rows.release_if_unused(number)
            raise
        with self._lock:
            self._rows.table.commit(number, 0)
            self._rows.publish(row)
        return True

    def prefix(self, keys: Sequence[RowKey]) -> int:
        """Return the number of leading keys that are stored."""
        with self._lock:
            return len(self._rows.prefix(keys))

    @contextmanager
    def pin_prefix(self, keys: Sequence[RowKey], request: Hashable = None) -> Iterator[list[tuple[int, int]]]:
        """Lease the leading stored keys while the context is open. Yields (row, length) for each.

        Afterwards these keys are the most recently used. The tail is evicted before the head.
        """
        with self._lock:
            rows = self._rows.prefix(keys)
            self.stats.hits += len(rows)
            self.stats.misses += len(keys) - len(rows)
            self._rows.lease(rows)
            first_slot, length = self._rows.allocator.first_slot, self._rows.table.length
            leased = [(first_slot(row), length(row, 0)) for row in rows]
        try:
            yield leased
        finally:
            with self._lock:
                self._rows.end_lease(rows, request)

    def remove(self, key: RowKey) -> bool:
        """Remove a key. Its slots are free when its last reader ends. False: the key is not stored."""
        with self._lock:
            is_stored = key in self._rows.row_by_key
            if is_stored:
                self._rows.remove(key)
            return is_stored

    def end_eviction(self) -> None:
        """Stop evicting: a full store refuses new payloads. The caller decides what to remove."""
        with self._lock:
            self._rows.is_evicting = False

    def keys(self) -> list[RowKey]:
        """Return all keys in eviction order. Keys that are being read come last."""
        with self._lock:
            victims = dict.fromkeys(map(self._rows.key, self._rows.policy.victims()))
            ordered = victims | dict.fromkeys(self._rows.row_by_key)
            return [key for key in ordered if self._rows.find(key) is not None]
