"""One lower tier in use: what blocks is done in its own threads, and what it can't take now waits in its own
queue. So a slow or sick tier makes nobody wait but those who wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lmcache.tiers import gate
from lmcache.tiers.base import LowerTier, RowKey, Slot, TierUnavailable, split_row_key
from lmcache.tiers.header import digests, seal_of
from lmcache.tiers.memory import MemoryTier
from lmcache.tiers.seals import payloads
from lmcache.tiers.stats import TieredStats, Unwritten
from lmcache.tiers.tasks import Outstanding, Tasks
from lmcache.tiers.writes import WriteQueue

T = TypeVar("T")

_log = logging.getLogger(__name__)

_NUM_READERS = 2
_NUM_WRITERS = 2
_MAX_TOUCH = 1024  # rows per operation
_PAUSE_SECONDS = 0.005  # between two trials, whatever the tier says
_BROKEN_TRIAL_SECONDS = 1.0  # after one that does not even fail as it should
_STUCK_SECONDS = 10.0
"""Tiers have deadlines, but a disk's system call may hang in the kernel: from then on lookups pass it by."""


class Lower:
    """Belongs to the event loop; ``tier`` is touched by its threads only.

    Rows are pinned or reserved while a thread works on them. ``labels`` are those of the namespaces that may
    leave memory; ``outstanding`` counts rows whose write is still to come.
    """

    def __init__(
        self,
        name: str,
        tier: LowerTier,
        memory: MemoryTier,
        labels: Mapping[bytes, bytes],
        outstanding: Outstanding,
        clock: Callable[[], float],
    ) -> None:
        self.stats = TieredStats()
        self.num_loads = 0  # rows that are being brought, or wait for their turn
        self._name = name
        self._tier = tier
        self._memory = memory
        self._num_columns = memory.arena.table.num_columns
        self._labels = labels
        self._outstanding = outstanding
        self._clock = clock
        self._queue = WriteQueue(memory.arena.num_rows // 4)
        self._has_writes = asyncio.Event()
        self._writes: dict[Slot, asyncio.Future[Unwritten | None]] = {}  # answers somebody may wait for
        self._up = asyncio.Event()  # it answers, as far as is known
        self._up.set()
        self._running: dict[object, float] = {}  # operations since when, the oldest first
        self._rate = gate.Rate()
        self._loading = asyncio.Semaphore(_NUM_READERS)
        # One more than there are loads, so that a probe never queues behind bytes.
        self._readers = ThreadPoolExecutor(_NUM_READERS + 1, f"{name}-read")
        self._writers = ThreadPoolExecutor(_NUM_WRITERS, f"{name}-write")
        self._tasks = Tasks()
        for _ in range(_NUM_WRITERS):
            self._tasks.spawn(self._keep_writing())

    @property
    def is_well(self) -> bool:
        """Does it answer, as far as is known?"""
        since = next(iter(self._running.values()), self._clock())
        return self._up.is_set() and self._clock() - since < _STUCK_SECONDS

    @property
    def num_queued(self) -> int:
        """Rows that wait for their write."""
        return len(self._queue)

    @property
    def bytes_per_second(self) -> float:
        """How fast it loads, as measured of late; 0.0: not known."""
        return self._rate.bytes_per_second(self._clock())

    # ---- load ----

    async def probe(self, keys: Sequence[RowKey]) -> int:
        """Return how many leading rows it has; none while it is not well."""
        if not self.is_well:
            return 0
        with contextlib.suppress(TierUnavailable):
            return await self._run(self._readers, lambda: self._tier.probe(keys, self._num_columns))
        return 0

    def is_worth(self, num_rows: int, row_seconds: float) -> bool:
        """Is bringing these rows sooner done than computing them at ``row_seconds`` each (0.0: not known)?"""
        row_bytes = len(self._memory.arena.view(0, 0)) * self._num_columns
        return gate.is_worth(
            num_rows * row_bytes, self.num_loads * row_bytes, self.bytes_per_second, num_rows * row_seconds
        )

    async def bring(self, key: RowKey, request: str) -> Slot | None:
        """Bring all columns of a row into memory, or nothing."""
        self.num_loads += 1
        try:
            async with self._loading:
                slot = await self._load(key, request) if self.is_well else None
        finally:
            self.num_loads -= 1
        self.stats.promoted += slot is not None
        self.stats.promotions_failed += slot is None
        return slot

    async def _load(self, key: RowKey, request: str) -> Slot | None:
        slot = self._memory.reserve_row(key, request)
        if slot is None:
            return None
        views = [self._memory.arena.view(slot.row, column) for column in range(self._num_columns)]
        loaded = None
        self._rate.begin(self._clock())
        try:
            with contextlib.suppress(TierUnavailable):
                loaded = await self._run(self._readers, lambda: _load_columns(self._tier, key, views))
        finally:
            self._rate.end(self._clock(), sum(loaded[0]) if loaded else 0)
            if loaded is None:
                self._memory.abort_row(slot)
            else:
                self._memory.commit_row(slot, *loaded)
        return slot if loaded else None

    # ---- store ----

    def write(self, slot: Slot, depth: int) -> asyncio.Future[Unwritten | None]:
        """Queue a row; when the queue is full the deepest is dropped.

        The answer comes when the tier has it (None), or as soon as it is known that it will not have it now.
        """
        answer = self._writes[slot] = asyncio.get_running_loop().create_future()
        self._outstanding.add()
        self._enqueue(slot, depth)
        if not self.is_well:
            self._answer(slot, Unwritten.AWAY)
        return answer

    def touch(self, keys: Sequence[RowKey]) -> None:
        """Make the copies of rows that were hit in memory younger, some time; while it is not well, never."""
        for first in range(0, len(keys), _MAX_TOUCH):
            if self.is_well:
                self._tasks.spawn(self._touch(keys[first : first + _MAX_TOUCH]))

    async def _touch(self, keys: Sequence[RowKey]) -> None:
        with contextlib.suppress(TierUnavailable):
            await self._run(self._writers, lambda: self._tier.touch(keys, self._num_columns))

    def _enqueue(self, slot: Slot, depth: int, *, is_first: bool = False) -> None:
        dropped = self._queue.push(slot, depth, is_first=is_first)
        if dropped is not None:
            self._settle(dropped, Unwritten.DROPPED)
        self._has_writes.set()

    async def _keep_writing(self) -> None:
        while True:
            await self._has_writes.wait()
            await self._up.wait()
            item = self._queue.pop()
            if item is None:
                self._has_writes.clear()
                continue
            slot, depth = item
            try:
                self._settle(slot, await self._store(slot))
            except TierUnavailable:
                self._enqueue(slot, depth, is_first=True)
            except Exception:
                _log.exception("a row could not be written to the %s tier", self._name)
                self._settle(slot, Unwritten.FAILED)

    async def _store(self, slot: Slot) -> Unwritten | None:
        key = self._memory.pin(slot)
        if key is None:
            return Unwritten.EVICTED
        label = self._labels.get(split_row_key(key)[0], b"")
        columns = payloads(self._memory.arena, slot)
        try:
            is_stored = await self._run(
                self._writers,
                lambda: all(self._tier.store(key, *column, label) for column in enumerate(columns)),
            )
        finally:
            self._memory.unpin(slot)
        return None if is_stored else Unwritten.REFUSED

    def _settle(self, slot: Slot, why: Unwritten | None) -> None:
        """A row is written, or never will be."""
        if why is None:
            self.stats.written += 1
        else:
            self.stats.unwritten[why] += 1
        self._answer(slot, why)
        self._outstanding.done()

    def _answer(self, slot: Slot, why: Unwritten | None) -> None:
        answer = self._writes.pop(slot, None)
        if answer is not None and not answer.done():
            answer.set_result(why)

    # ---- life ----

    async def close(self) -> None:
        """Stop all work; when this returns no thread uses the tier, or the arena for it."""
        await self._tasks.cancel()
        self._give_up_waiting()
        for pool in (self._readers, self._writers):
            await asyncio.to_thread(pool.shutdown, cancel_futures=True)

    async def _run(self, pool: ThreadPoolExecutor, operation: Callable[[], T]) -> T:
        """Run an operation in a thread. Raises TierUnavailable: then nothing more is asked until a trial
        succeeds."""
        name = object()
        self._running[name] = self._clock()
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, operation)
        except TierUnavailable:
            if self._up.is_set():
                self._up.clear()
                self._give_up_waiting()
                self._tasks.spawn(self._recover())
            raise
        finally:
            del self._running[name]

    def _give_up_waiting(self) -> None:
        for slot in tuple(self._writes):
            self._answer(slot, Unwritten.AWAY)

    async def _recover(self) -> None:
        """Try a sick tier in the background, so that no lookup ever has to."""
        breaker = self._tier.breaker
        while breaker.is_open:
            await asyncio.sleep(max(_PAUSE_SECONDS, breaker.seconds_to_trial))
            try:
                await asyncio.get_running_loop().run_in_executor(self._readers, self._tier.try_again)
            except Exception:  # whatever it is: nobody but this task tries again
                _log.exception("a trial of the %s tier ended with an error", self._name)
                await asyncio.sleep(_BROKEN_TRIAL_SECONDS)
        self._up.set()


def _load_columns(
    tier: LowerTier, key: RowKey, views: Sequence[memoryview]
) -> tuple[list[int], list[bytes]] | None:
    """In a reader thread: lengths and seals of all columns, or nothing."""
    lengths = []
    for column, view in enumerate(views):
        length = tier.load(key, column, view)
        if length is None:
            return None
        lengths.append(length)
    return lengths, [
        seal_of(key, column, length, digests(views[column][:length])) for column, length in enumerate(lengths)
    ]
