"""The queue of rows that are to be written through. Pure."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from lmcache.tiers.memory.contracts import Slot


class Write(NamedTuple):
    """A row to be written."""

    slot: Slot
    depth: int
    """In its chain."""

    digests: Sequence[bytes] | None = None
    """Of its columns, as far as they are known."""

    num_failures: int = 0
    """Operations for it that found the tier unavailable."""


class WriteQueue:
    """First in, first out; when it is full the deepest row of all is dropped, since a chain is read from its
    head.

    It names rows and does not hold them: a row may be evicted while it waits. O(log n) per row.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        self._writes: OrderedDict[Slot, Write] = OrderedDict()
        self._deepest: list[tuple[int, Slot]] = []  # heap of (-depth, slot), with entries of rows that left

    def __len__(self) -> int:
        return len(self._writes)

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._writes

    def push(self, write: Write, *, is_first: bool = False) -> Write | None:
        """Add a row, at the front when its write is to be tried again. Return what is dropped for it, if
        anything."""
        self._writes[write.slot] = write
        if is_first:
            self._writes.move_to_end(write.slot, last=False)
        heapq.heappush(self._deepest, (-write.depth, write.slot))
        if len(self._deepest) > 2 * self.capacity:
            self._deepest = [(-write.depth, slot) for slot, write in self._writes.items()]
            heapq.heapify(self._deepest)
        return self._drop_deepest() if len(self._writes) > self.capacity else None

    def pop(self) -> Write | None:
        """Take the next row."""
        return self._writes.popitem(last=False)[1] if self._writes else None

    def _drop_deepest(self) -> Write:
        while True:
            depth, slot = heapq.heappop(self._deepest)
            write = self._writes.get(slot)
            if write is not None and write.depth == -depth:
                del self._writes[slot]
                return write
