"""Queue of the rows to write through. Pure."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from lmcache.tiers.memory.contracts import Slot


class Write(NamedTuple):
    """A row to write."""

    slot: Slot
    depth: int
    """Position of the chunk in its chain."""

    digests: Sequence[bytes] | None = None
    """Digests of the row's columns; None if unknown."""

    num_failures: int = 0
    """Number of operations for this row that found the tier unavailable."""


class WriteQueue:
    """A FIFO queue. When it is full, it drops the deepest row, because a chain is read from its head.

    The queue does not protect its rows: a row may be evicted while it waits. O(log n) per row.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        self._writes: OrderedDict[Slot, Write] = OrderedDict()
        self._deepest: list[tuple[int, Slot]] = []  # heap of (-depth, slot), stale entries included

    def __len__(self) -> int:
        return len(self._writes)

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._writes

    def push(self, write: Write, *, is_first: bool = False) -> Write | None:
        """Add a row, at the front if ``is_first``. Returns the row that is dropped for it, if any."""
        self._writes[write.slot] = write
        if is_first:
            self._writes.move_to_end(write.slot, last=False)
        heapq.heappush(self._deepest, (-write.depth, write.slot))
        if len(self._deepest) > 2 * self.capacity:
            self._deepest = [(-write.depth, slot) for slot, write in self._writes.items()]
            heapq.heapify(self._deepest)
        return self._drop_deepest() if len(self._writes) > self.capacity else None

    def pop(self) -> Write | None:
        """Remove and return the next row; None if the queue is empty."""
        return self._writes.popitem(last=False)[1] if self._writes else None

    def _drop_deepest(self) -> Write:
        while True:
            depth, slot = heapq.heappop(self._deepest)
            write = self._writes.get(slot)
            if write is not None and write.depth == -depth:
                del self._writes[slot]
                return write
