"""The memory tier: index, reservations, leases, quarantine and eviction over an arena."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lmcache.tiers.base import Reservation, RowKey, Slot

LeaseId = tuple[bytes, str]
"""(engine uuid, request id)"""


@dataclass
class MemoryStats:
    """Plain counters; gauges are properties of the tier."""

    hits: int = 0
    misses: int = 0


class MemoryTier:
    """Not thread-safe: one event loop owns it.

    ``owner`` is a client's uuid (16 bytes). Methods that take a Slot raise StaleSlot, and change nothing, when the
    slot is not the caller's.
    """

    usable_rows: int
    """Only rows below this are given out or leased: set by the sidecar to what all attached workers mapped."""
    stats: MemoryStats

    def adopt(self) -> Iterator[None]:
        """Build the index from the slot table, in slices: run to the end before the first ``reserve``."""

    def release_adopted(self) -> None:
        """All clients from before the restart are drained or dead: adopted rows may be evicted now."""

    # reservations (owner = client uuid)
    def reserve(self, key: RowKey, column: int, owner: bytes, *, length: int, depth: int = 0) -> Reservation:
        """``length``: payload bytes of the column (the group's chunk_bytes); ``depth``: position in its chain."""

    def commit(self, slot: Slot, column: int, owner: bytes) -> bool:
        """The column's bytes are in the slot. True: the row became visible by this."""

    def abort(self, slot: Slot, column: int, owner: bytes) -> None:
        """Give a reservation back; the row is never visible."""

    def quarantine(self, owner: bytes) -> None:
        """The client's stream broke: its reservations can't be committed any more, nor their slots reused."""

    def end_quarantine(self, owner: bytes) -> None:
        """The client sent Drained, or is proven dead: its quarantined slots may be reused."""

    # leases (owner = engine uuid)
    def lookup(self, lease_id: LeaseId, keys: Sequence[RowKey]) -> tuple[int, list[Slot]]:
        """Number of leading keys resident, and the slots of those that are now under the lease (leading too)."""

    def release(self, lease_id: LeaseId) -> None:
        """End a lease; unknown ids are ignored."""

    def quarantine_leases(self, engine: bytes) -> None:
        """All of an engine's leases stop being extendable or releasable, and go on holding their rows."""

    def end_lease_quarantine(self, engine: bytes) -> None:
        """All clients of the engine are drained or dead: the quarantined leases end."""


Clock = Callable[[], float]
