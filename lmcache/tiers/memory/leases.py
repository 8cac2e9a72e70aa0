"""Leases: requests protect the rows that they read. All leases take at most half of the usable slots.

A row is one chunk of one KV group. It takes one or more slots of the memory tier. A row is visible when all
ranks have stored their part of it.

When an engine is lost, one of its processes may still read leased rows. The engine's leases are then in
**quarantine**: they protect their rows until the caller knows that no process of the engine reads them.
"""

from __future__ import annotations

from lmcache.tiers.memory.rows import Rows

LeaseId = tuple[bytes, str]
"""(engine uuid, request id)"""


class Leases:
    """One lease per request. A leased row is not evicted."""

    def __init__(self, rows: Rows) -> None:
        self.quarantined: dict[bytes, list[tuple[str, dict[int, None]]]] = {}
        """Leases in quarantine, by engine: (request, rows). They still protect their rows."""
        self._rows = rows
        self._leases: dict[LeaseId, dict[int, None]] = {}  # rows, those of the first chunks first

    def extend(self, lease_id: LeaseId, rows: list[int]) -> list[int]:
        """Add visible rows to a lease. Returns the leading rows that are leased now."""
        lease = self._leases.get(lease_id, {})
        leased = self._leasable(rows)
        if new := dict.fromkeys(row for row in leased if row not in lease):
            self._rows.lease(new)
            self._leases[lease_id] = lease | new
        return leased

    def end(self, lease_id: LeaseId) -> None:
        """End a lease; unknown ids are ignored."""
        self._rows.end_lease(self._leases.pop(lease_id, {}), lease_id[1])

    def quarantine(self, engine: bytes) -> None:
        """Move the engine's leases to quarantine. Requests can no longer extend or end them."""
        for lease_id in [lease_id for lease_id in self._leases if lease_id[0] == engine]:
            lease = self._leases.pop(lease_id)
            self.quarantined.setdefault(engine, []).append((lease_id[1], lease))

    def end_quarantine(self, engine: bytes) -> None:
        """End the engine's leases in quarantine. The caller knows that none of its clients reads a row."""
        for request, lease in self.quarantined.pop(engine, []):
            self._rows.end_lease(lease, request)

    def _leasable(self, rows: list[int]) -> list[int]:
        leases, allocator = self._rows.lease_counts, self._rows.allocator
        num_left = self._rows.usable_slots // 2 - self._rows.num_leased_slots
        if len(rows) * allocator.slots_per_frame <= num_left:
            return rows
        for position, row in enumerate(rows):
            if row not in leases and (num_left := num_left - allocator.size(row)) < 0:
                return rows[:position]
        return rows
