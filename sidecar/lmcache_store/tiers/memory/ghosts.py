"""Rows that were evicted, and that another eviction order would still have."""

from __future__ import annotations

import heapq
import math

from lmcache_store.tiers.memory.holds import compact


class Ghosts:
    """Evicted rows by name, with the number of their last use."""

    def __init__(self) -> None:
        self.num_slots = 0
        """Slots of all rows."""
        self._rows: dict[bytes, tuple[int, int]] = {}  # number of the row here, slots
        # By last use, and within a group the deepest first. May have entries of rows that were taken.
        self._queue: list[tuple[int, int, bytes]] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, name: bytes, age: int, num_slots: int) -> None:
        """Add a row with the number of its last use. Rows of one group are added the deepest first."""
        self.take(name)
        self._number += 1
        self._rows[name] = self._number, num_slots
        self.num_slots += num_slots
        heapq.heappush(self._queue, (age, self._number, name))
        compact(self._queue, self._is_present, len(self._rows))

    def take(self, name: bytes) -> int:
        """Remove a row. Return its slots; 0: it is unknown."""
        _, num_slots = self._rows.pop(name, (0, 0))
        self.num_slots -= num_slots
        return num_slots

    @property
    def oldest(self) -> tuple[float, bytes]:
        """Number of the last use and name of the least recently used row; infinity: there is none."""
        while self._queue:
            if self._is_present(self._queue[0]):
                age, _, name = self._queue[0]
                return age, name
            heapq.heappop(self._queue)
        return math.inf, b""

    def _is_present(self, entry: tuple[int, int, bytes]) -> bool:
        _, number, name = entry
        return self._rows.get(name, (-1,))[0] == number
