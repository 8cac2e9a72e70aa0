"""Checksums of rows in memory: recorded when a row becomes visible, compared when it outlived a restart."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache.tiers.base import RowKey
from lmcache.tiers.header import digests, slot_checksum
from lmcache.tiers.memory.contracts import Arena, Slot
from lmcache.tiers.memory.tier import MemoryTier
from lmcache.tiers.tiered.tasks import NICENESS, Workers


def checksums_of(key: RowKey, columns: Sequence[memoryview], column_digests: Sequence[bytes]) -> list[bytes]:
    """The checksums of all columns of a row."""
    return [
        slot_checksum(key, column, len(payload), part_digests)
        for column, (payload, part_digests) in enumerate(zip(columns, column_digests, strict=True))
    ]


def recorded_checksums(arena: Arena, slot: Slot) -> list[bytes]:
    """What the slot table says that they are."""
    return [arena.table.checksum(slot.row, column) for column in range(arena.table.num_columns)]


class Checksums:
    """Computes them in a thread of its own, with the row pinned."""

    def __init__(self, memory: MemoryTier) -> None:
        self._memory = memory
        self._workers = Workers(1, "checksum", NICENESS)

    async def record(self, slot: Slot) -> list[bytes]:
        """Record the checksums of a row that was pinned for this, so that it outlives a restart; unpin it.
        Return its columns' digests."""
        table = self._memory.arena.table
        key, _ = self._memory.describe(slot)
        try:
            columns = self._memory.payloads(slot)
            found = await self._digests(columns)
            for column, value in enumerate(checksums_of(key, columns, found)):
                table.record_checksum(slot.row, column, value)
        finally:
            self._memory.unpin(slot)
        return found

    async def verify(self, slot: Slot) -> bool:
        """Compare an adopted row with what was recorded. False: it is not intact, or gone."""
        key = self._memory.pin(slot)
        if key is None:
            return False
        try:
            columns = self._memory.payloads(slot)
            found = checksums_of(key, columns, await self._digests(columns))
            is_intact = found == recorded_checksums(self._memory.arena, slot)
            self._memory.verified(slot, is_intact=is_intact)
        finally:
            self._memory.unpin(slot)
        return is_intact

    async def close(self) -> None:
        """Wait for the thread."""
        await self._workers.close()

    async def _digests(self, columns: list[memoryview]) -> list[bytes]:
        return await self._workers.run(lambda: list(map(digests, columns)))
