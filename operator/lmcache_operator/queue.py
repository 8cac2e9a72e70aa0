"""A queue of keys that loses no wake-up, and never runs two jobs of one key at the same time.

Keys whose version changed run first, because a user is waiting for the result. A key that changes all the
time runs first only once in some seconds, because other keys would otherwise never run. New keys come next,
because after a restart with a thousand keys, the first keys would otherwise run several times before the last
key starts.

Each key has its own lane: a task that waits for a wake-up or a deadline, and then runs the work. Wake-ups in
a burst, or during a run, cause one more run. The event is cleared before the work observes anything, so a
change is either observed by the run or starts the next one.

All times are those of the event loop, so that tests can use a simulated clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from lmcache_operator.errors import OperatorError
from lmcache_store.common.backoff import Backoff

Key = TypeVar("Key", bound=Hashable)

logger = logging.getLogger(__name__)


BACKOFF = Backoff(0.5, 60.0, jitter=0.5)
"""Delay before failed work is retried."""
NUM_RESERVED = 4
"""Extra workers for keys whose version changed, so that long or hung work does not delay these keys."""
_CHANGE_SECONDS = 5.0
"""Time after the start of a run in which a further change of its key runs like other work."""


class _Rank(enum.IntEnum):
    CHANGED, NEW, USUAL = range(3)


class _Lane:
    task: asyncio.Task[None]
    turn: asyncio.Future[None]
    started: float | None = None
    """Start time of the present run; None between runs."""
    rank = _Rank.NEW
    last_started = -math.inf

    def __init__(self, version: object) -> None:
        self.wakeup, self.version = asyncio.Event(), version


class KeyedQueue(Generic[Key]):
    """Runs ``work(key)`` for every key that was woken. Not thread-safe: use it on one event loop.

    ``work`` returns the seconds until the next run without a wake-up, or None if the key no longer exists.
    Then its lane ends, unless it was woken meanwhile. Work that raises is retried after a back-off, or at the
    next wake-up. ``rest(key)`` runs between two runs of the key, and the next run cancels it.
    """

    def __init__(
        self,
        work: Callable[[Key], Awaitable[float | None]],
        *,
        num_workers: int,
        debounce_seconds: float = 0.05,
        rest: Callable[[Key], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self._work, self._rest = work, rest
        self._num_free = num_workers
        self._waiting: list[_Lane] = []
        self._debounce_seconds = debounce_seconds
        self._lanes: dict[Key, _Lane] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def num_waiting(self) -> int:
        """Number of keys whose work is due, and waits for a free worker."""
        return len(self._waiting)

    def wake(self, key: Key, version: object = None) -> None:
        """Schedule a run of a key. It runs ahead of others if its known ``version`` changed.

        Does nothing if the version is unchanged, or after ``close``.
        """
        if self._is_closed:
            return
        lane = self._lanes.get(key)
        if lane is not None and version is not None and version == lane.version:
            return
        if lane is None:
            lane = self._lanes[key] = _Lane(version)
            lane.task = asyncio.get_running_loop().create_task(self._serve(key, lane), name=f"lane {key}")
        elif version is not None:
            # The first version of a key is no change: an event of a child may have created the lane before.
            is_due = asyncio.get_running_loop().time() - lane.last_started >= _CHANGE_SECONDS
            lane.rank = _Rank.CHANGED if is_due and lane.version is not None else lane.rank
            lane.version = version
            self._start_next()
        lane.wakeup.set()

    def longest_run_seconds(self) -> float:
        """Seconds since the start of the oldest unfinished run. A large value means that work hangs."""
        now = asyncio.get_running_loop().time()
        starts = [lane.started for lane in self._lanes.values() if lane.started is not None]
        return now - min(starts, default=now)

    async def close(self) -> None:
        """Cancel all work, and wait until it has ended."""
        self._is_closed = True
        tasks = [lane.task for lane in self._lanes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._lanes.clear()

    async def _serve(self, key: Key, lane: _Lane) -> None:
        delay: float | None = None
        num_failures = 0
        while True:
            # Python 3.11's `wait_for` may ignore that `close` cancels it while a wake-up arrives.
            with contextlib.suppress(TimeoutError):
                async with self._resting(key, lane), asyncio.timeout(delay):
                    await lane.wakeup.wait()
            # Changes of a key arrive in bursts, and one run handles all of them.
            await asyncio.sleep(self._debounce_seconds)
            async with self._turn(lane):
                lane.wakeup.clear()
                try:
                    delay = await self._work(key)
                    num_failures = 0
                except Exception as error:
                    num_failures += 1
                    delay = BACKOFF.seconds(num_failures)
                    _log_failure(key, error, delay)
            # No await between this check and the removal, or a wake-up in between would be lost.
            if delay is None and not lane.wakeup.is_set():
                del self._lanes[key]
                return

    @contextlib.asynccontextmanager
    async def _resting(self, key: Key, lane: _Lane) -> AsyncIterator[None]:
        """Run ``rest`` of a key while the context is open, unless a run is due already."""
        if self._rest is None or lane.wakeup.is_set():
            yield
            return
        task = asyncio.create_task(self._rest(key), name=f"rest of {key}")
        try:
            yield
        finally:
            task.cancel()

    @contextlib.asynccontextmanager
    async def _turn(self, lane: _Lane) -> AsyncIterator[None]:
        """Wait for a worker, and occupy it for one run of this lane."""
        loop = asyncio.get_running_loop()
        lane.turn = loop.create_future()
        self._waiting.append(lane)
        self._start_next()
        await lane.turn  # only `close` cancels this, and it ends all lanes
        lane.rank = _Rank.USUAL
        lane.started = lane.last_started = loop.time()
        yield
        lane.started = None
        self._num_free += 1
        self._start_next()

    def _start_next(self) -> None:
        if not self._waiting:
            return
        following = min(self._waiting, key=lambda waiting: waiting.rank)  # the first of equal rank
        if self._num_free > (-NUM_RESERVED if following.rank is _Rank.CHANGED else 0):
            self._num_free -= 1
            self._waiting.remove(following)
            following.turn.set_result(None)


def _log_failure(key: object, error: Exception, delay: float) -> None:
    is_bug = not isinstance(error, OperatorError)
    level, trace = (logging.ERROR, error) if is_bug else (logging.WARNING, None)
    logger.log(level, "%s: %s; retrying in %.1f s", key, error, delay, exc_info=trace)
