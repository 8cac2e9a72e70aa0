"""The memory tier that threads share: the library's local backend, and the storage of an ``lm://`` server.

One lock guards the index and is never held while bytes are copied. What somebody reads is leased and what
somebody writes is not in the index yet, so a row is in nobody's reach but theirs until they are done.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from lmcache.tiers.base import RowKey
from lmcache.tiers.errors import ArenaError
from lmcache.tiers.memory.allocator import SLOTS_PER_FRAME
from lmcache.tiers.memory.contracts import Arena, VacateResult
from lmcache.tiers.memory.rows import Rows
from lmcache.tiers.stats import MemoryStats
from lmcache.units import ceil_div

_HERE = bytes(16)  # owner of all rows: this process

T = TypeVar("T")


class LocalStore:
    """Payloads by key over an arena of one column. Every method may be called by any thread.

    A payload takes as many slots as it needs, at most ``SLOTS_PER_FRAME``. ``row`` is always the number of
    its first slot, as ``Arena.view(row, 0, length)`` takes it. Payloads put for the same ``request`` form one
    chain, head first, of which the tail is evicted before the head; None: a chain of its own.
    """

    def __init__(self, arena: Arena) -> None:
        if arena.geometry is None or arena.geometry.num_columns != 1:
            raise ArenaError("a local store needs an arena of one column")
        self._slot_bytes = arena.geometry.slot_bytes
        self._num_slots = arena.num_rows
        self._lock = threading.Lock()
        self._rows = Rows(arena, slots_per_frame=SLOTS_PER_FRAME)  # protected by _lock

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slots that may be taken."""
        return self._rows.usable_slots * self._slot_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the slots that are taken, by payloads that are being written as well."""
        return self._rows.allocator.num_used_slots * self._slot_bytes

    @property
    def stats(self) -> MemoryStats:
        """Hits and misses of keys that were to be read; what was refused and removed."""
        return self._rows.stats

    def put(self, key: RowKey, length: int, fill: Callable[[int], None], *, request: Hashable = None) -> bool:
        """Let ``fill(row)`` write ``length`` bytes, and keep them under the key.

        What was there before is replaced when ``fill`` returned; if it raises, that stays, and the error
        passes on. False: no room, because it is longer than a frame or all is in use; nothing was replaced.
        """
        with self._lock:
            row = self._rows.open_row(key, max(1, ceil_div(length, self._slot_bytes)), request)
            if row is None:
                return False
            self._rows.write(row, 0, _HERE, length)
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

    def get(self, key: RowKey, read: Callable[[int, int], T]) -> T | None:
        """Return ``read(row, length)``, during which the row stays; None on a miss."""
        with self.pin_prefix([key]) as leased:
            return read(*leased[0]) if leased else None

    def prefix(self, keys: Sequence[RowKey]) -> int:
        """Count the leading keys that are there."""
        with self._lock:
            return len(self._rows.prefix(keys))

    @contextmanager
    def pin_prefix(self, keys: Sequence[RowKey], request: Hashable = None) -> Iterator[list[tuple[int, int]]]:
        """Keep the leading keys that are there for as long as the context is open: their (row, length).

        Afterwards they are the most recently used, the tail to be evicted before the head.
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

    def contains(self, key: RowKey) -> bool:
        """Is it there?"""
        return self.prefix([key]) == 1

    def remove(self, key: RowKey) -> bool:
        """Take it out; its slots are free when its last reader is done. False: it is not there."""
        with self._lock:
            is_there = key in self._rows.row_by_key
            if is_there:
                self._rows.remove(key)
            return is_there

    def resize(self, num_bytes: int) -> VacateResult:
        """Grow or shrink to the whole frames within ``num_bytes``, at most to the arena's size. Nothing is
        put beyond any more, and what is there is evicted as far as nobody uses it: call again for the rest.

        Then the arena may ``discard`` the slots from ``capacity_bytes`` on.
        """
        num_slots = num_bytes // self._slot_bytes
        if num_slots < self._num_slots:
            num_slots -= num_slots % SLOTS_PER_FRAME
        with self._lock:
            self._rows.usable_slots = min(num_slots, self._num_slots)
            return self._rows.vacate(self._rows.usable_slots, math.inf)

    def end_eviction(self) -> None:
        """From now on what is full refuses: somebody else decides what to remove."""
        with self._lock:
            self._rows.is_evicting = False

    def keys(self) -> list[RowKey]:
        """All keys, the next victim first; those that are being read come last."""
        with self._lock:
            victims = dict.fromkeys(map(self._rows.key, self._rows.policy.victims()))
            ordered = victims | dict.fromkeys(self._rows.row_by_key)
            return [key for key in ordered if self._rows.find(key) is not None]
