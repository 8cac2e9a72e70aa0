"""The tiered store: the asyncio side that joins the memory tier with the tiers below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache.tiers.base import Reservation, RowKey, Slot
from lmcache.tiers.memory import LeaseId, MemoryTier

if TYPE_CHECKING:
    from lmcache.tiers.arena import ArenaFile
    from lmcache.tiers.remote import RemoteTier


@dataclass
class Lookup:
    """Answer of ``TieredStore.lookup``; counts are chunks (a chunk = one row in every group)."""

    num_resident: int = 0
    num_pending: int = 0
    probing: bool = False
    slots: list[list[Slot]] = field(default_factory=list)
    """Per group, the slots of the leased chunks; ``num_leased`` = length of each."""


class TieredStore:
    """Made once per format of the arena, on the running loop. Nothing here blocks the loop.

    Use: ``store = TieredStore(arena, remote)``; ``await store.adopt()``; ... ``await store.drain(seconds)``;
    ``await store.close()`` (before the arena is formatted anew or closed).
    Quarantine, leases and usable_rows: through ``store.memory``.
    """

    memory: MemoryTier

    def __init__(self, arena: ArenaFile, remote: RemoteTier | None = None) -> None: ...

    async def adopt(self) -> None:
        """Rebuild the index from the slot table, in slices, letting the loop run in between."""

    def register(self, namespace: bytes, *, label: bytes = b"", private: bool = False) -> None:
        """Tell what a namespace is. Rows of private or unregistered namespaces never leave the memory tier."""

    def lookup(self, lease_id: LeaseId, groups: Sequence[Sequence[RowKey]]) -> Lookup:
        """Lease what is in memory, start bringing what the remote tier holds. Repeat to see how it goes on."""

    def reserve(
        self, keys: Sequence[RowKey], column: int, owner: bytes, *, length: int, first_chunk: int = 0
    ) -> list[Reservation]:
        """One answer per key, the head of the chain first."""

    def commit(self, slots: Sequence[Slot], column: int, owner: bytes) -> None:
        """Commit all or, raising StaleSlot, none. Visible rows are checksummed and written through."""

    def abort(self, slots: Sequence[Slot], column: int, owner: bytes) -> None:
        """Abort all or, raising StaleSlot, none."""

    async def drain(self, timeout_seconds: float) -> bool:
        """Wait until all writes are through; False when time ran out."""

    async def close(self) -> None:
        """Stop the workers; when this returns no thread touches the arena any more."""
