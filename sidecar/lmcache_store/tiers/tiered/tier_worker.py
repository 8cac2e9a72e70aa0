"""One lower tier in use: loads into memory, and the queue of rows to write through."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from lmcache_store.tiers.base import (
    BoundedTier,
    Loaded,
    LowerTier,
    ObjectId,
    OwnerBound,
    RowKey,
    split_row_key,
)
from lmcache_store.tiers.errors import TierUnavailableError
from lmcache_store.tiers.header import digests
from lmcache_store.tiers.load_or_recompute import Rate, should_load
from lmcache_store.tiers.memory.contracts import Slot
from lmcache_store.tiers.memory.tier import MemoryTier
from lmcache_store.tiers.probing import num_leading
from lmcache_store.tiers.stats import TieredStats, WriteSkipped
from lmcache_store.tiers.tiered.checksums import checksums_of, recorded_checksums
from lmcache_store.tiers.tiered.refresh import RefreshQueue
from lmcache_store.tiers.tiered.tasks import Outstanding
from lmcache_store.tiers.tiered.tier_operations import TierOperations
from lmcache_store.tiers.tiered.write_queue import Write, WriteQueue

logger = logging.getLogger(__name__)

_MAX_TOUCH = 1024  # rows in one operation
_MAX_FAILURES = 3
"""Operations for one row that may find the tier unavailable. Then the worker counts the row as refused."""

_OFFER_SECONDS = 1.0
"""Pause before the worker offers a refused row again. It doubles with each refusal."""

_MAX_OFFER_SECONDS = 60.0
_DROPPED_FIRST = sys.maxsize  # depth in the queue for a row that another lower tier holds


class TierWorker(TierOperations):
    """Belongs to the event loop; only its threads use ``tier``.

    Rows are pinned or reserved while a thread works on them. ``labels``: the shared namespaces, whose rows
    may leave memory. ``outstanding`` counts rows that are not yet written. ``refresh`` learns of missing
    copies.
    """

    def __init__(
        self,
        name: str,
        tier: LowerTier,
        memory: MemoryTier,
        labels: Mapping[bytes, bytes],
        outstanding: Outstanding,
        refresh: RefreshQueue,
        stats: TieredStats,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(name, tier, clock)
        self.stats = stats
        self.num_loads = 0  # rows that are being loaded, or wait for their turn
        self.num_touches = 0  # rows to be touched
        self._memory = memory
        self._num_columns = memory.arena.table.num_columns
        self._has_missed_touches = False  # since the last outage that is counted
        self._num_missed_outages = 0
        self._labels = labels
        self._outstanding = outstanding
        self._refresh = refresh
        self._queue = WriteQueue(memory.num_frames // 4)
        self._has_writes = asyncio.Event()
        self._unwritten: set[Slot] = set()  # queued, or being written
        self._refused: OrderedDict[Slot, Write] = OrderedDict()  # to be offered again
        self._is_offering = False
        self._offer: tuple[Slot, asyncio.Future[WriteSkipped | None]] | None = None  # the row, and its result
        self._rate = Rate()
        for _ in range(self.num_writers):
            self._tasks.spawn(self._keep_writing())

    @property
    def num_queued(self) -> int:
        """Number of rows in the write queue."""
        return len(self._queue)

    @property
    def bytes_per_second(self) -> float:
        """Rate of recent loads; 0.0 when unknown."""
        return self._rate.bytes_per_second(self._clock())

    # ---- load ----

    def take_invalid(self, key: RowKey) -> bool:
        """Was an object of this row found invalid since the last call?"""
        return self._tier.stats.take_invalid(key)

    async def probe(self, keys: Sequence[RowKey], tenant: bytes = b"") -> int:
        """Return how many leading rows the tier holds; 0 while it is unhealthy."""
        return await self._ask(lambda: num_leading(self._tier, keys, self._num_columns), 0, tenant)

    async def look(self, keys: Sequence[RowKey], tenant: bytes) -> list[bool] | None:
        """Say of each row whether the tier holds all its columns; None: no answer."""
        ids = [ObjectId(key, column) for key in keys for column in range(self._num_columns)]
        nothing: list[bool] | None = None
        present = await self._ask(lambda: self._tier.find_each(ids), nothing, tenant)
        if present is None:
            return None
        return [all(present[i : i + self._num_columns]) for i in range(0, len(ids), self._num_columns)]

    def should_load(self, keys: Sequence[RowKey], column_bytes: int, recompute_seconds: float) -> bool:
        """Is loading rows of ``column_bytes`` per column faster than computing them (0.0: time unknown)?"""
        rate = self._tier.rate_of(keys)
        if rate is None:
            rate = self.bytes_per_second if self._rate.is_certain else 0.0
        return should_load(column_bytes * self._num_columns, rate, recompute_seconds)

    async def load(
        self,
        key: RowKey,
        length: int,
        request: str,
        tenant: bytes,
        on_full: Callable[[], object] = lambda: None,
    ) -> Write | None:
        """Load all columns of a row into memory, each a payload of ``length`` bytes, for this tenant.

        Returns how to write the row to nearer tiers, or None when it was not loaded. ``on_full``: called if
        memory is full of rows in use.
        """
        self.num_loads += 1
        write = None
        try:
            if await self._take_turn(tenant):
                try:
                    write = await self._load(key, length, request, tenant, on_full)
                finally:
                    self._loading.give_back()
        finally:
            self.num_loads -= 1
        self.stats.promoted += write is not None
        self.stats.promotions_failed += write is None and not self._memory.is_resident(key)
        return write

    async def _load(
        self, key: RowKey, length: int, request: str, tenant: bytes, on_full: Callable[[], object]
    ) -> Write | None:
        slot = self._memory.reserve_row(key, length, request, tenant)
        if slot is None:
            if not self._memory.knows(key):
                on_full()
            return None
        views = self._memory.views(slot)
        columns: list[Loaded] = []
        self._rate.begin(self._clock())
        try:
            with contextlib.suppress(TierUnavailableError):
                columns = await self._run(
                    self._readers, lambda: _load_columns(self._tier, key, views, length), tenant
                )
        finally:
            self._rate.end(self._clock(), length * len(columns))
            column_digests = [loaded.digests for loaded in columns]
            if columns:
                payloads = [view[:length] for view in views]
                self._memory.commit_row(slot, checksums_of(key, payloads, column_digests))
            else:
                self._memory.abort_row(slot)
        if not columns:
            return None
        write = Write(slot, _DROPPED_FIRST, column_digests)
        if any(loaded.is_misplaced for loaded in columns):
            self.write(write)
        return write

    # ---- store ----

    def write(self, write: Write) -> None:
        """Queue a row, unless it is queued already. A full queue drops its deepest row."""
        if write.slot in self._unwritten:
            return
        self._unwritten.add(write.slot)
        self._refused.pop(write.slot, None)
        self._outstanding.add()
        self._enqueue(write)

    def touch(self, rows: Sequence[tuple[RowKey, Slot]]) -> None:
        """Mark the copies of rows that were hit in memory as recently used, in the background, and write
        missing copies. While the tier is unhealthy, hits after its outage do so."""
        if not self.is_healthy:
            self._has_missed_touches = True
            return
        for first in range(0, len(rows), _MAX_TOUCH):
            part = rows[first : first + _MAX_TOUCH]
            self.num_touches += len(part)
            self._tasks.spawn(self._touch(part))

    async def _touch(self, rows: Sequence[tuple[RowKey, Slot]]) -> None:
        absent: set[RowKey] = set()
        keys = [key for key, _ in rows]
        try:
            absent = await self._run(self._writers, lambda: self._tier.touch(keys, self._num_columns))
        except TierUnavailableError:
            self._has_missed_touches = True
        for key, slot in rows:
            if key in absent and slot not in self._refused:
                self.write(Write(slot, self._memory.describe(slot)[1]))
        self.num_touches -= len(rows)

    def count_outages(self) -> int:
        """Return how many outages ended, with or without an error. Copies may be missing after each."""
        if self._has_missed_touches and self.is_healthy:
            self._has_missed_touches = False
            self._num_missed_outages += 1
        return self._tier.health.num_outages + self._num_missed_outages

    def _enqueue(self, write: Write, *, is_first: bool = False) -> None:
        dropped = self._queue.push(write, self._memory.tenant(write.slot), is_first=is_first)
        if dropped is not None:
            self._end_write(dropped, WriteSkipped.DROPPED)
        self._has_writes.set()

    async def _keep_writing(self) -> None:
        while True:
            await self._has_writes.wait()
            await self._up.wait()
            write = self._queue.pop()
            if write is None:
                self._has_writes.clear()
                continue
            try:
                self._end_write(write, await self._store(write))
            except TierUnavailableError:
                write = write._replace(num_failures=write.num_failures + 1)
                if write.num_failures < _MAX_FAILURES:
                    self._enqueue(write, is_first=True)
                else:  # this row itself may make the tier fail
                    self._end_write(write, WriteSkipped.REFUSED)
            except Exception:
                logger.exception("a row could not be written to the %s tier", self.name)
                self._end_write(write, WriteSkipped.FAILED)

    async def _store(self, write: Write) -> WriteSkipped | None:
        slot = write.slot
        key = self._memory.pin(slot)
        if key is None:
            return WriteSkipped.EVICTED
        label, tenant = self._labels.get(split_row_key(key)[0], b""), self._memory.tenant(slot)
        columns, bound = self._memory.payloads(slot), self._bound(tenant)
        try:
            if bound is not None and not await self._is_admitted(key, columns, tenant, bound):
                stats = self._memory.stats
                stats.tenant_counts.disk_refused[stats.tenants.budgets.of(tenant).name] += 1
                return WriteSkipped.BOUND
            known = write.digests
            if known is None:  # the checksums may be old: check that the bytes still match
                known = await self._run(self._writers, lambda: list(map(digests, columns)), tenant)
                if checksums_of(key, columns, known) != recorded_checksums(self._memory.arena, slot):
                    self._memory.note_verified(slot, is_intact=False)
                    return WriteSkipped.INVALIDATED
            owner = None if bound is None else bound.owner

            def store() -> bool:  # the row may have waited for the thread
                return not self._memory.arena.is_lost and _store_columns(
                    self._tier, key, columns, label, known, owner
                )

            is_stored = await self._run(self._writers, store, tenant)
        finally:
            self._memory.unpin(slot)
        return None if is_stored else WriteSkipped.REFUSED

    def _bound(self, tenant: bytes) -> OwnerBound | None:
        """Return the tenant's bound in the tier, if any. A tenant that is not named has one of its own."""
        budgets = self._memory.stats.tenants.budgets
        num_bytes = budgets.of(tenant).disk_bytes
        return OwnerBound(budgets.owner(tenant), num_bytes) if num_bytes else None

    async def _is_admitted(
        self, key: RowKey, columns: Sequence[memoryview], tenant: bytes, bound: OwnerBound
    ) -> bool:
        """Does the bound admit all columns of a row? A row with fewer columns would be useless."""
        tier = self._tier
        if not isinstance(tier, BoundedTier):
            return True
        lengths = {ObjectId(key, column): len(payload) for column, payload in enumerate(columns)}
        return await self._run(self._writers, lambda: tier.admits(lengths, bound), tenant)

    def _end_write(self, write: Write, reason: WriteSkipped | None) -> None:
        """Record that a row was written (None), or why it was not."""
        if reason is None:
            self.stats.written += 1
        else:
            self.stats.writes_skipped[reason] += 1
        self._unwritten.remove(write.slot)
        self._outstanding.done()
        if reason is WriteSkipped.REFUSED:
            self._note_refused(write)
        elif reason is WriteSkipped.DROPPED:
            self._refresh.retry_soon(write.slot)
        if self._offer is not None and self._offer[0] == write.slot:
            self._offer[1].set_result(reason)
            self._offer = None

    def _note_refused(self, write: Write) -> None:
        self._refused[write.slot] = write._replace(num_failures=0)
        if len(self._refused) > self._queue.capacity:
            self._refresh.retry_soon(self._refused.popitem(last=False)[0])
        if not self._is_offering:
            self._is_offering = True
            self._tasks.spawn(self._offer_again())

    async def _offer_again(self) -> None:
        """Offer refused rows again, one at a time and less and less often. When the tier takes one row, offer
        all. Rows that left memory meanwhile are skipped without a pause."""
        pause = _OFFER_SECONDS
        try:
            while self._refused:
                await asyncio.sleep(pause)
                await self._up.wait()
                reason: WriteSkipped | None = WriteSkipped.EVICTED
                while self._refused and reason is WriteSkipped.EVICTED:
                    slot, write = next(iter(self._refused.items()))
                    ended = self._loop.create_future()
                    self._offer = slot, ended
                    self.write(write)
                    reason = await ended
                is_refused = reason is WriteSkipped.REFUSED
                pause = min(2 * pause, _MAX_OFFER_SECONDS) if is_refused else _OFFER_SECONDS
                for write in () if reason else tuple(self._refused.values()):
                    self.write(write)
        finally:
            self._is_offering = False

    # ---- life ----

    async def close(self, timeout_seconds: float | None = None) -> bool:
        """Stop all work. Returns True when no thread of this worker uses the tier or the arena any more."""
        has_ended = await super().close(timeout_seconds)
        self.stats.writes_skipped.update([WriteSkipped.DROPPED] * len(self._unwritten))
        self._unwritten.clear()
        return has_ended


def _load_columns(tier: LowerTier, key: RowKey, views: Sequence[memoryview], length: int) -> list[Loaded]:
    """Load all columns of a row, or return an empty list. Runs in a reader thread."""
    columns: list[Loaded] = []
    for column, view in enumerate(views):
        loaded = tier.load(ObjectId(key, column), view, length)
        if loaded is None or loaded.length != length:
            return []
        columns.append(loaded)
    return columns


def _store_columns(
    tier: LowerTier,
    key: RowKey,
    columns: Sequence[memoryview],
    label: bytes,
    column_digests: Sequence[bytes],
    owner: str | None,
) -> bool:
    """Store all columns of a row; False: the tier refused one. Runs in a writer thread."""
    for column, (payload, known) in enumerate(zip(columns, column_digests, strict=True)):
        object_id = ObjectId(key, column)
        is_stored = tier.store(object_id, payload, label, known)
        if owner is not None and isinstance(tier, BoundedTier):
            tier.assign(object_id, owner)
        if not is_stored:
            return False
    return True
