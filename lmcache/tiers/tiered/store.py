"""The tiered store: the asyncio side that joins the memory tier with the lower tiers below it.

One event loop owns everything here and in the memory tier. What blocks (lower tiers) or takes long
(checksums) runs in worker threads that see only byte views and keys; rows are pinned or reserved while a
thread works on them.

::

    commit -> visible -> checksum -> slot table -> queue of every lower tier -> tier (``TierWorker``)
    lookup -> miss -> probe the tiers in turn -> load -> commit -> next lookup hits  (``Promotions``)
           -> hit -> copies below are touched, or are written at last                (``RefreshQueue``)

A lookup never waits for any of it: it says what is there, and what is on its way.
"""

from __future__ import annotations

import asyncio
import enum
import math
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence

from lmcache.tiers.base import LowerTier, RowKey, split_row_key
from lmcache.tiers.memory.contracts import Arena, Chains, LookupResult, Reservation, Slot
from lmcache.tiers.memory.leases import LeaseId
from lmcache.tiers.memory.tier import MemoryTier
from lmcache.tiers.stats import MemoryStats, TieredStats
from lmcache.tiers.tiered.checksums import Checksums
from lmcache.tiers.tiered.promotions import Promotions
from lmcache.tiers.tiered.refresh import RefreshQueue
from lmcache.tiers.tiered.tasks import Outstanding, Tasks
from lmcache.tiers.tiered.tier_worker import TierWorker
from lmcache.tiers.tiered.write_queue import Write


class Admit(enum.Enum):
    """Which rows go to lower tiers; the values are those of the custom resource's ``admit``."""

    ALL = "All"  # at once
    ON_REUSE = "OnReuse"  # when they are hit for the first time


class TieredStore:
    """Made on the running loop, once per format of the arena. Nothing here blocks the loop.

    ``lower``: by name ("disk"), in the order in which they are asked. They stay the caller's, who closes them
    after the store. ``stats`` (of the lower tiers) and ``memory_stats``: to be gone on with. Use: ``await
    store.adopt()`` first; ``await store.close()`` before the arena is formatted again or closed. Quarantine,
    leases' ends and ``usable_slots`` are the business of ``store.memory``.
    """

    def __init__(
        self,
        arena: Arena,
        lower: Mapping[str, LowerTier] | None = None,
        *,
        admit: Admit = Admit.ALL,
        stats: Mapping[str, TieredStats] | None = None,
        memory_stats: MemoryStats | None = None,
        tenant_quota_percent: int = 100,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.memory = MemoryTier(arena, clock, memory_stats, tenant_quota_percent)
        self.is_closed = False
        self._admit = admit
        self._labels: dict[bytes, bytes] = {}  # of shared namespaces
        self._outstanding = Outstanding()  # rows to be checksummed, and rows to be written, tier by tier
        self._tasks = Tasks()
        self._checksums = Checksums(self.memory)
        self._refresh = RefreshQueue(arena.num_rows, self._write, self._touch, self._residence_seconds, clock)
        counts = stats or {}
        self.lower = {
            name: TierWorker(
                name,
                tier,
                self.memory,
                self._labels,
                self._outstanding,
                self._refresh,
                counts.get(name) or TieredStats(),
                clock,
            )
            for name, tier in (lower or {}).items()
        }
        tiers = tuple(self.lower.values())
        self._promotions = Promotions(self.memory, self._checksums, self._refresh, tiers, self._tasks, clock)
        self._tasks.spawn(self._refresh.run())

    def is_memory_only(self, namespace: bytes) -> bool:
        """Is all there is of a namespace what the shared index shows?"""
        has_lower = self.lower and namespace in self._labels
        return not has_lower and not self.memory.has_unverified

    async def adopt(self) -> None:
        """Rebuild the index from the slot table, letting the loop run in between."""
        for _ in self.memory.adopt():
            await asyncio.sleep(0)

    def register(self, namespace: bytes, *, label: bytes = b"") -> None:
        """Share a namespace, for good: rows of all others never leave the memory tier.

        ``label`` (at most 512 bytes) goes with every stored object, for people who look at them.
        """
        self._labels[namespace] = label

    # ---- load ----

    def lookup(
        self,
        lease_id: LeaseId,
        chains: Chains,
        *,
        chunk_seconds: float = 0.0,
        is_hint: bool = False,
        is_scheduled: bool = False,
    ) -> LookupResult:
        """Lease what a hit of all these chunks needs and memory has (unless it is a hint), and start bringing
        what lower tiers hold of the longest hit; repeat to see how it goes on.

        ``chunk_seconds``: what computing one chunk takes the engine (0.0: not known); what would take longer
        to bring is left below. ``is_scheduled``: the engine computes what is not here, nothing is brought.
        """
        found = self.memory.lookup(lease_id, chains, is_hint=is_hint)
        num_expected, is_probing = found.num_resident, False
        is_shared = all(keys and self._is_shared(keys[0]) for keys in chains.keys)
        if found.slots and is_shared:
            self._refresh.add(lease_id, found.keys, found.slots)
        if found.num_resident < chains.num_chunks and not is_scheduled:
            search = self._promotions.verify(chains, found.present, lease_id[1])
            num_expected = search.num_expected
            is_probing = is_shared and self._promotions.bring(search, lease_id[1], chunk_seconds)
        return LookupResult(
            found.num_resident, found.num_leased, num_expected - found.num_resident, is_probing
        )

    @property
    def origins(self) -> MutableMapping[RowKey, str]:
        """The lower tiers by the rows that were brought from them lately; who uses a row takes it out."""
        return self._promotions.origins

    # ---- store ----

    def reserve(
        self,
        keys: Sequence[RowKey],
        column: int,
        owner: bytes,
        *,
        length: int,
        first_chunk: int = 0,
        request: str = "",
        tenant: bytes = b"",
    ) -> list[Reservation]:
        """One answer per key, the head of the chain first; ``length``: payload bytes of one column.

        What is stored for one ``request``, in however many calls, is evicted tail first. New rows are counted
        for ``tenant``.
        """
        group = request or object()
        return [
            self.memory.reserve(key, column, owner, length=length, depth=depth, request=group, tenant=tenant)
            for depth, key in enumerate(keys, first_chunk)
        ]

    def commit(self, slots: Sequence[Slot], column: int, owner: bytes) -> None:
        """Commit all or, raising StaleSlotError, none. What becomes visible is checksummed and written
        through."""
        visible = self.memory.commit(slots, column, owner)
        for slot in visible:
            self.memory.pin(slot)  # until its checksums are recorded
            self._refresh.mark_fresh(slot)
        if visible:
            self._outstanding.add(len(visible))
            self._tasks.spawn(self._write_through(visible))

    def abort(self, slots: Sequence[Slot], column: int, owner: bytes) -> None:
        """Abort all or, raising StaleSlotError, none."""
        self.memory.abort(slots, column, owner)

    async def _write_through(self, slots: Iterable[Slot]) -> None:
        """Checksum rows, so that they outlive a restart, and queue them for the lower tiers."""
        for slot in slots:
            key, depth = self.memory.describe(slot)
            try:
                write = Write(slot, depth, await self._checksums.record(slot))
                if self._is_shared(key):
                    (self._write if self._admit is Admit.ALL else self._refresh.write_on_reuse)(write)
            finally:
                self._outstanding.done()

    def _write(self, write: Write) -> None:
        for worker in self.lower.values():
            worker.write(write)

    def _touch(self, rows: Mapping[RowKey, Slot]) -> None:
        shared = [(key, slot) for key, slot in rows.items() if self._is_shared(key)]
        for worker in self.lower.values():
            worker.touch(shared)

    def _residence_seconds(self) -> float:
        return min((worker.residence_seconds for worker in self.lower.values()), default=math.inf)

    # ---- life ----

    @property
    def num_unwritten(self) -> int:
        """Rows still to be checksummed, and rows still to be written, counted once for every lower tier."""
        return self._outstanding.number

    async def drain(self, timeout_seconds: float) -> bool:
        """Wait until all rows committed so far are written through; False when time ran out."""
        try:
            await asyncio.wait_for(self._outstanding.wait(), timeout_seconds)
        except asyncio.TimeoutError:
            return False
        return True

    async def close(self, timeout_seconds: float | None = None) -> bool:
        """Stop all work. True: no thread touches the arena any more; False: after ``timeout_seconds`` one
        still does (a disk hangs), ask again."""
        self.is_closed = True
        await self._tasks.cancel()
        await self._checksums.close()
        ended = [await lower.close(timeout_seconds) for lower in self.lower.values()]
        return all(ended)

    def _is_shared(self, key: RowKey) -> bool:
        return split_row_key(key)[0] in self._labels
