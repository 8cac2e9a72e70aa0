"""The queue of rows that are to be written through. Pure."""

from __future__ import annotations

import heapq
from collections import OrderedDict

from lmcache.tiers.base import Slot


class WriteQueue:
    """First in, first out; when it is full the deepest row of all is dropped, since a chain is read from its
    head.

    It names rows and does not hold them: a row may be evicted while it waits. O(log n) per row.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._depths: OrderedDict[Slot, int] = OrderedDict()
        self._deepest: list[tuple[int, Slot]] = []  # heap of (-depth, slot), with entries of rows that left

    def __len__(self) -> int:
        return len(self._depths)

    def push(self, slot: Slot, depth: int, *, is_first: bool = False) -> Slot | None:
        """Add a row, at the front when its write is to be tried again. Return the row dropped for it, if
        any."""
        self._depths[slot] = depth
        if is_first:
            self._depths.move_to_end(slot, last=False)
        heapq.heappush(self._deepest, (-depth, slot))
        if len(self._deepest) > 2 * self._capacity:
            self._deepest = [(-depth, slot) for slot, depth in self._depths.items()]
            heapq.heapify(self._deepest)
        return self._drop_deepest() if len(self._depths) > self._capacity else None

    def pop(self) -> tuple[Slot, int] | None:
        """Take the next row and its depth."""
        return self._depths.popitem(last=False) if self._depths else None

    def _drop_deepest(self) -> Slot:
        while True:
            depth, slot = heapq.heappop(self._deepest)
            if self._depths.get(slot) == -depth:
                del self._depths[slot]
                return slot
