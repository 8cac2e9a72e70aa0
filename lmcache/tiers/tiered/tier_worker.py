"""One lower tier in use: what blocks is done in its own threads, and what it can't take now waits in its own
queue. So a slow or unavailable tier makes nobody wait but those who wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from lmcache.tiers.base import Loaded, LowerTier, ObjectId, RowKey, split_row_key
from lmcache.tiers.errors import TierUnavailableError
from lmcache.tiers.header import digests
from lmcache.tiers.memory.contracts import Slot
from lmcache.tiers.memory.tier import MemoryTier
from lmcache.tiers.stats import TieredStats, WriteSkipped
from lmcache.tiers.tiered.checksums import checksums_of, recorded_checksums
from lmcache.tiers.tiered.load_or_recompute import Rate, should_load
from lmcache.tiers.tiered.refresh import RefreshQueue
from lmcache.tiers.tiered.tasks import NICENESS, Outstanding, Tasks, Workers
from lmcache.tiers.tiered.write_queue import Write, WriteQueue

T = TypeVar("T")

logger = logging.getLogger(__name__)

_NUM_READERS = 2
_NUM_WRITERS = 2
_MAX_TOUCH = 1024  # rows per operation
_STUCK_SECONDS = 10.0
"""Tiers have deadlines, but a disk's system call may hang in the kernel: from then on lookups pass it by."""

_MAX_FAILURES = 3  # operations for one row that found the tier unavailable: then others have their turn
_OFFER_SECONDS = 1.0  # until one of the rows that were refused is offered again; doubles
_MAX_OFFER_SECONDS = 60.0
_DROPPED_FIRST = sys.maxsize  # the depth, in a queue of writes, of a row that another lower tier has


class TierWorker:
    """Belongs to the event loop; ``tier`` is touched by its threads only.

    Rows are pinned or reserved while a thread works on them. ``labels`` are those of the namespaces that may
    leave memory; ``outstanding`` counts rows whose write is still to come; ``refresh`` is told of copies that
    are missing.
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
        self.name = name
        self.stats = stats
        self.num_loads = 0  # rows that are being brought, or wait for their turn
        self._tier = tier
        self._memory = memory
        self._num_columns = memory.arena.table.num_columns
        self._labels = labels
        self._outstanding = outstanding
        self._refresh = refresh
        self._num_outages = tier.health.num_outages
        self._loop = asyncio.get_running_loop()
        tier.health.subscribe(self._on_health)
        self._clock = clock
        self._queue = WriteQueue(memory.num_frames // 4)
        self._has_writes = asyncio.Event()
        self._unwritten: set[Slot] = set()  # queued, or being written
        self._refused: OrderedDict[Slot, Write] = OrderedDict()  # to be offered again
        self._is_offering = False
        self._offer: tuple[Slot, asyncio.Future[WriteSkipped | None]] | None = None  # and what became of it
        self._up = asyncio.Event()  # it answers, as far as is known
        self._up.set()
        self._running: dict[object, float] = {}  # operations since when, the oldest first
        self._rate = Rate()
        self._loading = asyncio.Semaphore(_NUM_READERS)
        # One more than there are loads, so that a probe never queues behind bytes.
        self._readers = Workers(_NUM_READERS + 1, f"{name}-read")
        self._writers = Workers(_NUM_WRITERS, f"{name}-write", NICENESS)
        self._tasks = Tasks()
        for _ in range(_NUM_WRITERS):
            self._tasks.spawn(self._keep_writing())

    @property
    def is_healthy(self) -> bool:
        """Does it answer, as far as is known?"""
        since = next(iter(self._running.values()), self._clock())
        return self._up.is_set() and self._clock() - since < _STUCK_SECONDS

    @property
    def num_queued(self) -> int:
        """Rows that wait for their write."""
        return len(self._queue)

    @property
    def bytes_per_second(self) -> float:
        """How fast it loads, as measured recently; 0.0: not known."""
        return self._rate.bytes_per_second(self._clock())

    @property
    def residence_seconds(self) -> float:
        """See LowerTier."""
        return self._tier.residence_seconds

    # ---- load ----

    async def probe(self, keys: Sequence[RowKey]) -> int:
        """Return how many leading rows it has; none while it is unhealthy."""
        return await self._ask(lambda: self._tier.probe(keys, self._num_columns), 0)

    async def find_each(self, keys: Sequence[RowKey]) -> list[bool]:
        """Say of each row whether it has all of it; of none while it is unhealthy."""
        ids = [ObjectId(key, column) for key in keys for column in range(self._num_columns)]
        found = await self._ask(lambda: self._tier.find_each(ids), [False] * len(ids))
        return [all(found[at : at + self._num_columns]) for at in range(0, len(ids), self._num_columns)]

    async def _ask(self, question: Callable[[], T], nothing: T) -> T:
        if not self.is_healthy:
            return nothing

        async def ask() -> T:
            with contextlib.suppress(TierUnavailableError):
                return await self._run(self._readers, question)
            return nothing

        asking = self._tasks.spawn(ask())
        await asyncio.wait([asking], timeout=_STUCK_SECONDS)  # another tier may have them
        return asking.result() if asking.done() and not asking.cancelled() else nothing

    def should_load(self, column_bytes: int, recompute_seconds: float) -> bool:
        """Is bringing so many payload bytes per column sooner done than computing them (0.0: not known)?"""
        rate = self.bytes_per_second if self._rate.is_certain else 0.0
        return should_load(column_bytes * self._num_columns, rate, recompute_seconds)

    async def bring(self, key: RowKey, length: int, request: str, tenant: bytes) -> Write | None:
        """Bring all columns of a row, each a payload of ``length`` bytes, into memory, or nothing, for the
        tenant. Return how nearer tiers are to keep it."""
        self.num_loads += 1
        brought = None
        try:
            if await self._take_turn():
                try:
                    brought = await self._load(key, length, request, tenant)
                finally:
                    self._loading.release()
        finally:
            self.num_loads -= 1
        self.stats.promoted += brought is not None
        self.stats.promotions_failed += brought is None and not self._memory.is_resident(key)
        return brought

    async def _take_turn(self) -> bool:
        """Wait until fewer than ``_NUM_READERS`` rows are being loaded. False: it is unhealthy."""
        while self.is_healthy:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._loading.acquire(), _STUCK_SECONDS)
                if self.is_healthy:
                    return True
                self._loading.release()
        return False

    async def _load(self, key: RowKey, length: int, request: str, tenant: bytes) -> Write | None:
        slot = self._memory.reserve_row(key, length, request, tenant)
        if slot is None:
            return None
        views = self._memory.views(slot)
        columns: list[Loaded] = []
        self._rate.begin(self._clock())
        try:
            with contextlib.suppress(TierUnavailableError):
                columns = await self._run(
                    self._readers, lambda: _load_columns(self._tier, key, views, length)
                )
        finally:
            self._rate.end(self._clock(), length * len(columns))
            known = [loaded.digests for loaded in columns]
            if columns:
                self._memory.commit_row(slot, checksums_of(key, [view[:length] for view in views], known))
            else:
                self._memory.abort_row(slot)
        if not columns:
            return None
        brought = Write(slot, _DROPPED_FIRST, known)
        if any(loaded.is_misplaced for loaded in columns):
            self.write(brought)
        return brought

    # ---- store ----

    def write(self, write: Write) -> None:
        """Queue a row, unless it is; when the queue is full the deepest is dropped."""
        if write.slot in self._unwritten:
            return
        self._unwritten.add(write.slot)
        self._refused.pop(write.slot, None)
        self._outstanding.add()
        self._enqueue(write)

    def touch(self, rows: Sequence[tuple[RowKey, Slot]]) -> None:
        """Mark the copies of rows that were hit in memory as recently used, some time, and write those that
        are not there (any more); while it is unhealthy, never."""
        for first in range(0, len(rows), _MAX_TOUCH):
            if self.is_healthy:
                self._tasks.spawn(self._touch(rows[first : first + _MAX_TOUCH]))

    async def _touch(self, rows: Sequence[tuple[RowKey, Slot]]) -> None:
        absent: set[RowKey] = set()
        keys = [key for key, _ in rows]
        with contextlib.suppress(TierUnavailableError):
            absent = await self._run(self._writers, lambda: self._tier.touch(keys, self._num_columns))
        for key, slot in rows:
            if key in absent and slot not in self._refused:
                self.write(Write(slot, self._memory.describe(slot)[1]))

    def _enqueue(self, write: Write, *, is_first: bool = False) -> None:
        dropped = self._queue.push(write, is_first=is_first)
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
                else:  # it may be this row that the tier can't bear
                    self._end_write(write, WriteSkipped.REFUSED)
            except Exception:
                logger.exception("a row could not be written to the %s tier", self.name)
                self._end_write(write, WriteSkipped.FAILED)

    async def _store(self, write: Write) -> WriteSkipped | None:
        slot = write.slot
        key = self._memory.pin(slot)
        if key is None:
            return WriteSkipped.EVICTED
        label = self._labels.get(split_row_key(key)[0], b"")
        columns = self._memory.payloads(slot)
        try:
            known = write.digests
            if known is None:  # it was hashed long ago: is it still what it was?
                known = await self._run(self._writers, lambda: list(map(digests, columns)))
                if checksums_of(key, columns, known) != recorded_checksums(self._memory.arena, slot):
                    self._memory.verified(slot, is_intact=False)
                    return WriteSkipped.INVALIDATED
            is_stored = await self._run(
                self._writers, lambda: _store_columns(self._tier, key, columns, label, known)
            )
        finally:
            self._memory.unpin(slot)
        return None if is_stored else WriteSkipped.REFUSED

    def _end_write(self, write: Write, why: WriteSkipped | None) -> None:
        """A row is written, or not for the time being."""
        if why is None:
            self.stats.written += 1
        else:
            self.stats.writes_skipped[why] += 1
        self._unwritten.remove(write.slot)
        self._outstanding.done()
        if why is WriteSkipped.REFUSED:
            self._note_refused(write)
        elif why is WriteSkipped.DROPPED:
            self._refresh.retry_soon(write.slot)
        if self._offer is not None and self._offer[0] == write.slot:
            self._offer[1].set_result(why)
            self._offer = None

    def _note_refused(self, write: Write) -> None:
        self._refused[write.slot] = write._replace(num_failures=0)
        if len(self._refused) > self._queue.capacity:
            self._refresh.retry_soon(self._refused.popitem(last=False)[0])
        if not self._is_offering:
            self._is_offering = True
            self._tasks.spawn(self._offer_again())

    async def _offer_again(self) -> None:
        """Offer what was refused, a row at a time and ever less often, until one is taken: then all. Those
        that left memory meanwhile take nobody's turn."""
        pause = _OFFER_SECONDS
        try:
            while self._refused:
                await asyncio.sleep(pause)
                await self._up.wait()
                why: WriteSkipped | None = WriteSkipped.EVICTED
                while self._refused and why is WriteSkipped.EVICTED:
                    slot, write = next(iter(self._refused.items()))
                    ended = self._loop.create_future()
                    self._offer = slot, ended
                    self.write(write)
                    why = await ended
                pause = min(2 * pause, _MAX_OFFER_SECONDS) if why is WriteSkipped.REFUSED else _OFFER_SECONDS
                for write in () if why else tuple(self._refused.values()):
                    self.write(write)
        finally:
            self._is_offering = False

    # ---- life ----

    async def close(self, timeout_seconds: float | None = None) -> bool:
        """Stop all work. True: no thread uses the tier, or the arena for it, any more."""
        self._tier.health.unsubscribe(self._on_health)
        await self._tasks.cancel()
        self.stats.writes_skipped[WriteSkipped.DROPPED] += len(self._unwritten)
        self._unwritten.clear()
        ended = [await pool.close(timeout_seconds) for pool in (self._readers, self._writers)]
        return all(ended)

    async def _run(self, pool: Workers, operation: Callable[[], T]) -> T:
        """Run an operation in a thread. Raises TierUnavailableError: then nothing more is asked until a probe
        succeeds."""
        name = object()
        self._running[name] = self._clock()
        try:
            return await pool.run(operation)
        except TierUnavailableError:
            self._update_health()
            raise
        finally:
            del self._running[name]
            if self._num_outages != self._tier.health.num_outages:
                self._num_outages = self._tier.health.num_outages
                self._refresh.doubt_all()

    def _on_health(self, failed: bool) -> None:
        """In any thread, and at any time: the loop may have ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._update_health)

    def _update_health(self) -> None:
        (self._up.clear if self._tier.health.is_open else self._up.set)()


def _load_columns(tier: LowerTier, key: RowKey, views: Sequence[memoryview], length: int) -> list[Loaded]:
    """In a reader thread: all columns, or nothing."""
    found: list[Loaded] = []
    for column, view in enumerate(views):
        loaded = tier.load(ObjectId(key, column), view, length)
        if loaded is None or loaded.length != length:
            return []
        found.append(loaded)
    return found


def _store_columns(
    tier: LowerTier, key: RowKey, columns: Sequence[memoryview], label: bytes, column_digests: Sequence[bytes]
) -> bool:
    """In a writer thread."""
    return all(
        tier.store(ObjectId(key, column), payload, label, known)
        for column, (payload, known) in enumerate(zip(columns, column_digests, strict=True))
    )
