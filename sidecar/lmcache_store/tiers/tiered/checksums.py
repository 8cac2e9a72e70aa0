"""Checksums of rows in memory: recorded when a row becomes visible, verified after a restart."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_store.common.threads import NICENESS
from lmcache_store.tiers.base import RowKey
from lmcache_store.tiers.header import digests, slot_checksum
from lmcache_store.tiers.memory.contracts import Arena, Slot
from lmcache_store.tiers.memory.tier import MemoryTier
from lmcache_store.tiers.tiered.tasks import Workers


def checksums_of(key: RowKey, columns: Sequence[memoryview], column_digests: Sequence[bytes]) -> list[bytes]:
    """Return the checksums of all columns of a row."""
    return [
        slot_checksum(key, column, len(payload), part_digests)
        for column, (payload, part_digests) in enumerate(zip(columns, column_digests, strict=True))
    ]


def recorded_checksums(arena: Arena, slot: Slot) -> list[bytes]:
    """Return the checksums of a row from the slot table."""
    return [arena.table.checksum(slot.row, column) for column in range(arena.table.num_columns)]


class Checksums:
    """Computes checksums in a separate thread, with the row pinned."""

    def __init__(self, memory: MemoryTier) -> None:
        self._memory = memory
        self._workers = Workers(1, "checksum", NICENESS)

    async def record(self, slot: Slot) -> list[bytes]:
        """Record the checksums of a row, so that it survives a restart. Returns its columns' digests.

        The caller must have pinned the row; this method unpins it."""
        table = self._memory.arena.table
        key, _ = self._memory.describe(slot)
        try:
            columns = self._memory.payloads(slot)
            column_digests = await self._digests(columns, self._memory.tenant(slot))
            if not self._memory.arena.is_lost:
                for column, value in enumerate(checksums_of(key, columns, column_digests)):
                    table.record_checksum(slot.row, column, value)
        finally:
            self._memory.unpin(slot)
        return column_digests

    async def verify(self, slot: Slot) -> bool:
        """Compare an adopted row with its recorded checksums. False: it is damaged or gone."""
        key = self._memory.pin(slot)
        if key is None:
            return False
        try:
            columns = self._memory.payloads(slot)
            computed = checksums_of(key, columns, await self._digests(columns))
            is_intact = computed == recorded_checksums(self._memory.arena, slot)
            self._memory.note_verified(slot, is_intact=is_intact)
        finally:
            self._memory.unpin(slot)
        return is_intact

    async def close(self) -> None:
        """Wait for the thread."""
        await self._workers.close()

    async def _digests(self, columns: list[memoryview], tenant: bytes = b"") -> list[bytes]:
        def compute() -> list[bytes]:
            _ = (
                self._memory.arena.is_lost
            )  # makes the file long enough: the row may have waited for the thread
            return list(map(digests, columns))

        return await self._workers.run(compute, tenant)
