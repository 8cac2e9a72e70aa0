"""A queue of keys in which no wake-up is lost and no key is worked on twice at a time.

Whose version changed comes first: somebody waits for it. Then those that were never worked on, for a restart
or a thousand new keys would otherwise work on the first ones again and again before it begins with the last.

Each key has its own lane: one task that waits for a wake-up or a deadline and then does the work. Wake-ups
that come in a burst, or while the work runs, make one more run. The event is cleared before the work observes
anything, so a change is either seen by the run or starts the next one.

All times are those of the event loop; a test gives it another clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from lmcache.backoff import Backoff
from lmcache_operator.errors import OperatorError

Key = TypeVar("Key", bound=Hashable)

logger = logging.getLogger(__name__)


BACKOFF = Backoff(0.5, 60.0, jitter=0.5)
"""Before a key whose work failed is worked on again."""
NUM_RESERVED = 4
"""Workers beside the others that keys whose version changed may have, so that work that hangs or is long does
not hold them up."""


class _Rank(enum.IntEnum):
    CHANGED, NEW, USUAL = range(3)


class _Lane:
    task: asyncio.Task[None]
    turn: asyncio.Future[None]
    started: float | None = None
    """When the present run began; None between runs."""
    rank = _Rank.NEW

    def __init__(self, version: object) -> None:
        self.wakeup, self.version = asyncio.Event(), version


class KeyedQueue(Generic[Key]):
    """Runs ``work(key)`` for every key that was woken. Not thread-safe: it lives on one event loop.

    ``work`` returns the seconds after which the key is due again by itself, or None when the key is gone: its
    lane ends unless it was woken meanwhile. Work that raises is tried again after a back-off, or at the next
    wake-up.
    """

    def __init__(
        self,
        work: Callable[[Key], Awaitable[float | None]],
        *,
        num_workers: int,
        debounce_seconds: float = 0.05,
    ) -> None:
        self._work = work
        self._num_free = num_workers
        self._waiting: list[_Lane] = []
        self._debounce_seconds = debounce_seconds
        self._lanes: dict[Key, _Lane] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._lanes)

    def wake(self, key: Key, version: object = None) -> None:
        """Have the key worked on soon, ahead of others if its ``version`` was known and is another now.

        Nothing happens if it is the same, or after ``close``.
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
            # Not the first that is heard of it: a child may have been heard of before.
            lane.rank = lane.rank if lane.version is None else _Rank.CHANGED
            lane.version = version
            self._start_next()
        lane.wakeup.set()

    def longest_run_seconds(self) -> float:
        """Age of the oldest run that has not ended; a large value means that work hangs."""
        now = asyncio.get_running_loop().time()
        starts = [lane.started for lane in self._lanes.values() if lane.started is not None]
        return now - min(starts, default=now)

    async def close(self) -> None:
        """Cancel everything and wait for it."""
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
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(lane.wakeup.wait(), delay)
            # What happens to a key comes in bursts: one run for all of it.
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
    async def _turn(self, lane: _Lane) -> AsyncIterator[None]:
        """One of the workers, as soon as it is this lane's turn."""
        loop = asyncio.get_running_loop()
        lane.turn = loop.create_future()
        self._waiting.append(lane)
        self._start_next()
        await lane.turn  # cancelled by `close` alone, after which nobody's turn comes
        lane.rank, lane.started = _Rank.USUAL, loop.time()
        yield
        lane.started = None
        self._num_free += 1
        self._start_next()

    def _start_next(self) -> None:
        if not self._waiting:
            return
        following = min(self._waiting, key=lambda waiting: waiting.rank)  # the first one of equals
        if self._num_free > (-NUM_RESERVED if following.rank is _Rank.CHANGED else 0):
            self._num_free -= 1
            self._waiting.remove(following)
            following.turn.set_result(None)


def _log_failure(key: object, error: Exception, delay: float) -> None:
    is_bug = not isinstance(error, OperatorError)
    level, trace = (logging.ERROR, error) if is_bug else (logging.WARNING, None)
    logger.log(level, "%s: %s; trying again in %.1f s", key, error, delay, exc_info=trace)
