"""Leases: requests protect the rows that they read. All leases take at most half of the usable slots.

The number of leases is bounded, too, because many requests can lease the same row. A request without a lease
may read its rows, and must check after the copy that no slot was reused.

A row is one chunk of one KV group. It takes one or more slots of the memory tier. A row is visible when all
ranks have stored their part of it.

When an engine is lost, one of its processes may still read leased rows. The engine's leases end only when the
caller knows that no process of the engine reads them.
"""

from __future__ import annotations

from itertools import takewhile

from lmcache_store.tiers.memory.rows import MemoryRows

MAX_LEASES = 1 << 14
"""Limit of requests with a lease. A lease of one row takes about 700 bytes."""

MAX_LEASED_ROWS = 1 << 20
"""Limit of the rows of all leases. A row counts once for each of its leases, and takes about 65 bytes."""

LeaseId = tuple[bytes, str]
"""(engine uuid, request id)"""


class Leases:
    """One lease per request. A leased row is not evicted."""

    def __init__(self, rows: MemoryRows) -> None:
        self._rows = rows
        self._leases: dict[LeaseId, dict[int, None]] = {}  # rows, those of the first chunks first
        self._num_rows = 0

    def extend(self, lease_id: LeaseId, rows: list[int]) -> list[int]:
        """Add visible rows to a lease. Returns the leading rows that are leased now."""
        lease = self._leases.get(lease_id, {})
        leased = self._leasable(rows)
        if new := dict.fromkeys(row for row in leased if row not in lease):
            has_room = bool(lease) or len(self._leases) < MAX_LEASES
            if not has_room or self._num_rows + len(new) > MAX_LEASED_ROWS:
                return list(takewhile(lease.__contains__, leased))
            self._rows.lease(new)
            self._leases[lease_id] = lease | new
            self._num_rows += len(new)
        return leased

    def end(self, lease_id: LeaseId) -> None:
        """End a lease; unknown ids are ignored."""
        if lease := self._leases.pop(lease_id, None):
            self._rows.end_lease(lease, lease_id[1])
            self._num_rows -= len(lease)

    def end_all(self, engine: bytes) -> None:
        """End the engine's leases. The caller knows that none of its clients reads a row."""
        for lease_id in [lease_id for lease_id in self._leases if lease_id[0] == engine]:
            self.end(lease_id)

    def _leasable(self, rows: list[int]) -> list[int]:
        leases, allocator = self._rows.lease_counts, self._rows.allocator
        num_left = self._rows.usable_slots // 2 - self._rows.num_leased_slots
        if len(rows) * allocator.slots_per_frame <= num_left:
            return rows
        for position, row in enumerate(rows):
            if row not in leases and (num_left := num_left - allocator.size(row)) < 0:
                return rows[:position]
        return rows
