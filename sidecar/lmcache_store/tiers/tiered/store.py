"""The tiered store: joins the memory tier with the lower tiers, in asyncio.

One event loop owns all state here and in the memory tier. Operations that block (lower tiers) or take long
(checksums) run in worker threads, which see only byte views and keys. Rows are pinned or reserved while a
thread works on them.

::

    commit -> visible -> checksum -> slot table -> queue of every lower tier -> tier (``TierWorker``)
    lookup -> miss -> probe the tiers in turn -> load -> commit -> next lookup hits  (``Promotions``)
           -> hit -> touch the copies in lower tiers, or write missing ones        (``RefreshQueue``)

A lookup never waits: it returns what is in memory, and what is being promoted.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import time
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import TypeVar

from lmcache_store.tiers.base import LowerTier, RowKey, split_row_key
from lmcache_store.tiers.budgets import Budgets
from lmcache_store.tiers.memory.contracts import Arena, Chains, LookupResult, Reservation, Reserved, Slot
from lmcache_store.tiers.memory.holds import Hold
from lmcache_store.tiers.memory.leases import LeaseId
from lmcache_store.tiers.memory.tier import MemoryTier
from lmcache_store.tiers.stats import MemoryStats, TieredStats
from lmcache_store.tiers.tiered.absences import Absence, Absences
from lmcache_store.tiers.tiered.checksums import Checksums
from lmcache_store.tiers.tiered.history import ChunkHistory, chunk_names
from lmcache_store.tiers.tiered.promotions import Promotions
from lmcache_store.tiers.tiered.refresh import RefreshQueue
from lmcache_store.tiers.tiered.tasks import Outstanding, Tasks
from lmcache_store.tiers.tiered.tier_worker import TierWorker
from lmcache_store.tiers.tiered.write_queue import Write

T = TypeVar("T")


_PREFETCH_SECONDS = 60.0
_PREFETCH_PAUSE_SECONDS = 0.02  # between two lookups of a prefetch


class Admit(enum.Enum):
    """Rules for writing rows to lower tiers. The values are those of ``admit`` in the custom resource."""

    ALL = "All"  # when they are stored
    ON_REUSE = "OnReuse"  # at their first hit


class TieredStore:
    """Created on the running loop, once per format of the arena. No method blocks the loop.

    ``lower``: the tiers by name ("disk"), in lookup order. The caller owns them and closes them after the
    store. ``stats`` (of the lower tiers), ``memory_stats`` and ``history`` are continued, if given.

    Await ``store.adopt()`` first. Await ``store.close()`` before the arena is formatted again or closed. Use
    ``store.memory`` to control aborts, quarantine, ends of leases, budgets and ``usable_slots``.
    """

    def __init__(
        self,
        arena: Arena,
        lower: Mapping[str, LowerTier] | None = None,
        *,
        admit: Admit = Admit.ALL,
        stats: Mapping[str, TieredStats] | None = None,
        memory_stats: MemoryStats | None = None,
        history: ChunkHistory | None = None,
        budgets: Budgets | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.memory = MemoryTier(arena, clock, memory_stats, budgets)
        self.is_closed = False
        self._clock = clock
        self.history = history or ChunkHistory()
        self._absences = Absences(clock)
        self._admit = admit
        self._labels: dict[bytes, bytes] = {}  # label of each shared namespace
        self._chunk_bytes: dict[bytes, set[int]] = {}  # the same: lengths of its rows, per column
        self._outstanding = Outstanding()  # rows to checksum, and rows to write to each tier
        self._tasks = Tasks()
        self._checksums = Checksums(self.memory)
        asked = self._residence_seconds, self._count_outages
        self._refresh = RefreshQueue(arena.num_rows, self._write, self._touch, *asked, clock)
        counts, shared = stats or {}, (self.memory, self._labels, self._outstanding, self._refresh)
        self.lower = {
            name: TierWorker(name, tier, *shared, counts.get(name) or TieredStats(), clock)
            for name, tier in (lower or {}).items()
        }
        tiers = tuple(self.lower.values())
        self._written = [worker for worker in tiers if worker.takes_writes]
        self._reads = Outstanding()  # rows that other pods are reading
        self._promotions = Promotions(
            self.memory,
            self._checksums,
            self._refresh,
            tiers,
            self._absences,
            self.history,
            self._tasks,
            clock,
        )
        self._tasks.spawn(self._refresh.run())

    def is_memory_only(self, namespace: bytes) -> bool:
        """Does the shared index list all rows of a namespace that a lookup could find?"""
        has_lower = self.lower and namespace in self._labels
        return not has_lower and not self.memory.has_unverified

    async def adopt(self) -> None:
        """Rebuild the index from the slot table, in slices between which the loop runs."""
        for _ in self.memory.adopt():
            await asyncio.sleep(0)

    def register(self, namespace: bytes, *, label: bytes = b"", chunk_bytes: Collection[int] = ()) -> None:
        """Share a namespace for good. Rows of other namespaces never leave the memory tier.

        ``label`` (at most 512 bytes) is stored with every object, for people who inspect it. ``chunk_bytes``:
        payload bytes per column of its rows; other pods' rows of another length are not taken over.
        """
        self._labels[namespace] = label
        self._chunk_bytes.setdefault(namespace, set()).update(chunk_bytes)

    # ---- load ----

    def lookup(
        self,
        lease_id: LeaseId,
        chains: Chains,
        *,
        chunk_seconds: float = 0.0,
        is_hint: bool = False,
        num_scheduled_hits: int | None = None,
        is_counted: bool = True,
    ) -> LookupResult:
        """Look up a request: lease its rows in memory (unless it is a hint), and start to promote others.

        Repeat the call to follow the progress of the promotions.

        ``chunk_seconds``: time that the engine needs to compute one chunk (0.0: unknown); rows that load more
        slowly are not promoted. ``num_scheduled_hits``: chunks that the engine found when it scheduled the
        request. It computes the others, so nothing is promoted. ``is_counted``: count hits and misses.
        """
        residency = self.memory.lookup(
            lease_id, chains, is_hint=is_hint, num_found=num_scheduled_hits, is_counted=is_counted
        )
        num_expected, is_probing = residency.num_resident, False
        is_shared = all(keys and self._is_shared(keys[0]) for keys in chains.keys)
        if residency.slots and is_shared:
            self._refresh.add(lease_id, residency.keys, residency.slots)
        if residency.num_resident < chains.num_chunks and num_scheduled_hits is None:
            search = self._promotions.verify(chains, residency.present, lease_id[1])
            num_expected = search.num_expected
            is_probing = is_shared and self._promotions.promote(search, lease_id[1], chunk_seconds)
        return LookupResult(
            residency.num_resident, residency.num_leased, num_expected - residency.num_resident, is_probing
        )

    def prefetch(self, lease_id: LeaseId, chains: Chains) -> asyncio.Task[None]:
        """Repeat a lookup until lower tiers have promoted all that they have of these chunks."""
        return self._tasks.spawn(self._prefetch(lease_id, chains, self._clock() + _PREFETCH_SECONDS))

    async def _prefetch(self, lease_id: LeaseId, chains: Chains, deadline: float) -> None:
        result = self.lookup(lease_id, chains, is_hint=True, is_counted=False)
        while (result.num_pending or result.is_probing) and self._clock() < deadline:
            await asyncio.sleep(_PREFETCH_PAUSE_SECONDS)
            result = self.lookup(lease_id, chains, is_hint=True, is_counted=False)

    @property
    def origins(self) -> MutableMapping[RowKey, str]:
        """Name of the lower tier from which each row was recently promoted. The user of a row removes it."""
        return self._promotions.origins

    def absence(self, key: RowKey, request: str = "") -> Absence:
        """Return the reason why a chunk that an earlier request looked up was not a hit of this request.

        The request itself may store the chunk meanwhile.
        """
        noted, is_known = self._absences.of(key), self.memory.knows(key)
        if is_known or noted is Absence.STORE_REFUSED:
            before = self._absences.before(key, request)
            if before is not None:
                return before
        if is_known:
            if self.memory.is_being_written(key) and not self._promotions.is_under_way(key):
                return Absence.BEING_STORED
            if noted is None and self.memory.is_resident(key):  # since a moment ago
                return Absence.TOO_LATE if key in self.origins else Absence.BEING_STORED
        return self._missing(key, noted)

    def when_answered(self, chains: Chains, num_hit: int, find: Callable[[], T]) -> asyncio.Task[T] | None:
        """Call ``find`` when lower tiers have answered the running questions for chunks after the hit.

        Returns None if there are no questions.
        """
        probes = self._promotions.probes(chains, num_hit)

        async def wait() -> T:
            await asyncio.wait(probes)
            return find()

        return self._tasks.spawn(wait()) if probes else None

    def _missing(self, key: RowKey, noted: Absence | None) -> Absence:
        """Return the reason why memory has no row of this key. ``noted``: result of ``Absences.of``."""
        if self._promotions.is_under_way(key):
            return Absence.TOO_LATE
        if noted is not None:
            return noted
        if not self.history.is_stored(key):
            return Absence.NOT_STORED
        if self.lower and not self._is_shared(key):
            return Absence.PRIVATE
        are_all_healthy = all(worker.is_healthy for worker in self.lower.values())
        return Absence.EVICTED if are_all_healthy else Absence.UNAVAILABLE

    def retain(self, hold: Hold, keys: Sequence[tuple[RowKey, int]], *, is_open: bool) -> None:
        """Retain rows in memory, see ``MemoryTier.retain``. Copies in lower tiers count as used now."""
        self.memory.retain(hold, keys, is_open=is_open)
        resident = {key: slot for key, _ in keys if (slot := self.memory.resident_slot(key)) is not None}
        if resident and self._is_shared(next(iter(resident))):
            self._refresh.add(hold, list(resident), list(resident.values()))

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
        """Reserve slots for a column of several rows. Returns one answer per key, in order, head first.

        ``length``: payload bytes of the column. Rows of one ``request`` are evicted tail first, even across
        calls. New rows count against the quota of ``tenant``.
        """
        group = request or object()
        for key in keys:
            if not self.memory.knows(key):
                self._absences.note_opened(key, request, self._missing(key, self._absences.of(key)))
        reservations = [
            self.memory.reserve(key, column, owner, length=length, depth=depth, request=group, tenant=tenant)
            for depth, key in enumerate(keys, first_chunk)
        ]
        for key, reservation in zip(keys, reservations, strict=True):
            if reservation.result is Reserved.BUSY and not self.memory.knows(key):
                self._absences.note(key, Absence.STORE_REFUSED)
        return reservations

    def commit(self, slots: Sequence[Slot], column: int, owner: bytes) -> None:
        """Commit a column of these slots. Rows that become visible are checksummed and written through.

        Raises StaleSlotError, committing nothing, if a slot is not the owner's."""
        visible = self.memory.commit(slots, column, owner)
        for slot in visible:
            self.memory.pin(slot)  # until its checksums are recorded
            self._refresh.mark_fresh(slot)
            self._absences.forget(self.memory.describe(slot)[0])
        if visible:
            self._outstanding.add(len(visible))
            self._tasks.spawn(self._write_through(visible))

    async def _write_through(self, slots: Sequence[Slot]) -> None:
        """Checksum rows, so that they survive a restart, and queue them for the lower tiers."""
        self.history.note_stored(chunk_names([self.memory.describe(slot)[0] for slot in slots]))
        for slot in slots:
            key, depth = self.memory.describe(slot)
            try:
                write = Write(slot, depth, await self._checksums.record(slot))
                if self._is_shared(key):
                    (self._write if self._admit is Admit.ALL else self._refresh.write_on_reuse)(write)
            finally:
                self._outstanding.done()

    def _write(self, write: Write) -> None:
        for worker in self._written:
            worker.write(write)

    def _touch(self, rows: Mapping[RowKey, Slot]) -> None:
        shared = [(key, slot) for key, slot in rows.items() if self._is_shared(key)]
        for worker in self._written:
            worker.touch(shared)

    def _residence_seconds(self) -> float:
        return min((worker.residence_seconds for worker in self._written), default=math.inf)

    def _count_outages(self) -> int:
        return sum(worker.count_outages() for worker in self._written)

    # ---- for other pods ----

    def can_be_read(self, key: RowKey) -> bool:
        """May other pods read this row, and is it in memory now? Counts as no use of the row.

        An adopted row is verified when it is read."""
        is_present = self.memory.is_resident(key) or self.memory.unverified_slot(key) is not None
        return not self.is_closed and self._is_shared(key) and is_present

    async def begin_read(self, key: RowKey) -> Slot | None:
        """Pin a row that another pod reads; None if it can't be read. Call ``end_read`` with the slot."""
        if self.can_be_read(key):
            await self._promotions.verify_row(key)
        slot = self.memory.resident_slot(key) if self.can_be_read(key) else None
        if slot is not None:
            self.memory.pin(slot)
            self._reads.add()
        return slot

    def end_read(self, slot: Slot) -> None:
        """End the pin of ``begin_read``."""
        self.memory.unpin(slot)
        self._reads.done()

    def hottest_rows(self) -> list[tuple[RowKey, int, bytes]]:
        """Return keys, payload lengths and tenants of the rows that other pods should take over, the hottest
        first."""
        return [row for row in self.memory.hottest_half() if self._is_shared(row[0])]

    async def take_over(self, key: RowKey, length: int, tenant: bytes, tier: str) -> bool:
        """Load a row from a lower tier although no request needs it now. Returns whether it is in memory."""
        is_valid = length in self._chunk_bytes.get(split_row_key(key)[0], ())
        if self.is_closed or not is_valid or tier not in self.lower:
            return False
        taking = self._tasks.spawn(self._promotions.take_over(key, length, tenant, self.lower[tier]))
        await asyncio.wait([taking])  # the store cancels it when it closes
        return not taking.cancelled() and self.memory.is_resident(key)

    # ---- life ----

    @property
    def num_unwritten(self) -> int:
        """Number of rows to checksum, plus rows to write, counted once for every lower tier."""
        return self._outstanding.number

    @property
    def pending_work(self) -> dict[str, int]:
        """Number of rows that the store works on in the background, by kind of work."""
        return {
            "promote": self._promotions.num_pending,
            "refresh": self._refresh.has_hits.is_set() + sum(worker.num_touches for worker in self._written),
            "write": self.num_unwritten,
        }

    async def drain(self, timeout_seconds: float) -> bool:
        """Wait until all rows committed so far are written through. Returns False on time-out."""
        try:
            await asyncio.wait_for(self._outstanding.wait(), timeout_seconds)
        except asyncio.TimeoutError:
            return False
        return True

    async def close(self, timeout_seconds: float | None = None) -> bool:
        """Stop all work. Returns True when no thread uses the arena any more.

        False: a thread still runs after ``timeout_seconds`` (a disk hangs); call again."""
        self.is_closed = True
        await self._tasks.cancel()
        await self._checksums.close()
        ended = [await lower.close(timeout_seconds) for lower in self.lower.values()]
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._reads.wait(), timeout_seconds)
        return all(ended) and not self._reads.number

    def _is_shared(self, key: RowKey) -> bool:
        return split_row_key(key)[0] in self._labels
