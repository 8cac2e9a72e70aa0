"""Queue of the rows to write through. Pure."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from lmcache_store.tiers.memory.contracts import Slot

_MAX_STALE = 16
"""Stale entries of a heap beyond the number of its rows, before the heap is built again."""


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
    """A queue of rows in which tenants take turns. The rows of one tenant are first in, first out.

    When the queue is full, it drops the deepest row of a tenant, because a chain is read from its head. This
    is the tenant of the new row, or the one with most rows if the former has fewer than the average. A tenant
    that floods the queue thus drops no rows of a tenant that has few.

    The queue does not protect its rows: a row may be evicted while it waits. O(log n) per row.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        self._by_tenant: OrderedDict[bytes, _TenantQueue] = OrderedDict()  # next turn first; none is empty
        self._tenants: dict[Slot, bytes] = {}  # of all queued rows

    def __len__(self) -> int:
        return len(self._tenants)

    def push(self, write: Write, tenant: bytes = b"", *, is_first: bool = False) -> Write | None:
        """Add a row, at the front if ``is_first``. Returns the row that is dropped for it, if any."""
        tenant = self._tenants.setdefault(write.slot, tenant)
        queue = self._by_tenant.setdefault(tenant, _TenantQueue())
        queue.push(write, is_first=is_first)
        if is_first:
            self._by_tenant.move_to_end(tenant, last=False)
        if len(self) <= self.capacity:
            return None
        if len(queue) * len(self._by_tenant) < len(self):
            tenant, queue = max(self._by_tenant.items(), key=lambda item: len(item[1]))
        return self._removed(queue.drop_deepest(), tenant, queue)

    def pop(self) -> Write | None:
        """Remove and return the next row; None if the queue is empty."""
        if not self._by_tenant:
            return None
        tenant, queue = next(iter(self._by_tenant.items()))
        self._by_tenant.move_to_end(tenant)
        return self._removed(queue.pop(), tenant, queue)

    def _removed(self, write: Write, tenant: bytes, queue: _TenantQueue) -> Write:
        del self._tenants[write.slot]
        if not queue:
            del self._by_tenant[tenant]
        return write


class _TenantQueue:
    """Rows of one tenant."""

    def __init__(self) -> None:
        self._writes: OrderedDict[Slot, Write] = OrderedDict()
        self._deepest: list[tuple[int, Slot]] = []  # heap of (-depth, slot), stale entries included

    def __len__(self) -> int:
        return len(self._writes)

    def push(self, write: Write, *, is_first: bool) -> None:
        self._writes[write.slot] = write
        if is_first:
            self._writes.move_to_end(write.slot, last=False)
        heapq.heappush(self._deepest, (-write.depth, write.slot))
        if len(self._deepest) > 2 * len(self._writes) + _MAX_STALE:
            self._deepest = [(-write.depth, slot) for slot, write in self._writes.items()]
            heapq.heapify(self._deepest)

    def pop(self) -> Write:
        return self._writes.popitem(last=False)[1]

    def drop_deepest(self) -> Write:
        while True:
            depth, slot = heapq.heappop(self._deepest)
            write = self._writes.get(slot)
            if write is not None and write.depth == -depth:
                del self._writes[slot]
                return write
