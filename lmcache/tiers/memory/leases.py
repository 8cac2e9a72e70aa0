"""Who reads which rows: leases of requests, at most half of the usable slots in all."""

from __future__ import annotations

from lmcache.tiers.memory.rows import Rows

LeaseId = tuple[bytes, str]
"""(engine uuid, request id)"""


class Leases:
    """One lease per request; a row under one is not evicted."""

    def __init__(self, rows: Rows) -> None:
        self.quarantined: dict[bytes, list[tuple[str, dict[int, None]]]] = {}
        """Requests and their rows, by engine: they go on holding their rows."""
        self._rows = rows
        self._leases: dict[LeaseId, dict[int, None]] = {}  # rows, head first

    def extend(self, lease_id: LeaseId, rows: list[int]) -> list[int]:
        """Lease visible rows, too; return the leading ones that are leased now."""
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
        """The engine's leases can't be extended or ended any more."""
        for lease_id in [lease_id for lease_id in self._leases if lease_id[0] == engine]:
            lease = self._leases.pop(lease_id)
            self.quarantined.setdefault(engine, []).append((lease_id[1], lease))

    def end_quarantine(self, engine: bytes) -> None:
        """All clients of the engine are drained or dead."""
        for request, lease in self.quarantined.pop(engine, []):
            self._rows.end_lease(lease, request)

    def _leasable(self, rows: list[int]) -> list[int]:
        leases, allocator = self._rows.lease_counts, self._rows.allocator
        room = self._rows.usable_slots // 2 - self._rows.num_leased_slots
        if len(rows) * allocator.slots_per_frame <= room:
            return rows
        for position, row in enumerate(rows):
            if row not in leases and (room := room - allocator.size(row)) < 0:
                return rows[:position]
        return rows
