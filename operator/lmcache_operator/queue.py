"""A queue of keys in which no wake-up is lost and no key is worked on twice at a time.

Each key has its own lane: one task that waits for a wake-up or a deadline and then does the work. Wake-ups
that come in a burst, or while the work runs, make one more run. The event is cleared before the work observes
anything, so a change is either seen by the run or starts the next one.

All times are those of the event loop; a test gives it another clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from lmcache.backoff import Backoff
from lmcache_operator.errors import OperatorError

Key = TypeVar("Key", bound=Hashable)

logger = logging.getLogger(__name__)


BACKOFF = Backoff(0.5, 60.0, jitter=0.5)
"""Before a key whose work failed is worked on again."""


class _Lane:
    task: asyncio.Task[None]
    started: float | None = None
    """When the present run began; None between runs."""

    def __init__(self) -> None:
        self.wakeup = asyncio.Event()


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
        self._workers = asyncio.Semaphore(num_workers)
        self._debounce_seconds = debounce_seconds
        self._lanes: dict[Key, _Lane] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._lanes)

    def wake(self, key: Key) -> None:
        """Have the key worked on soon. Nothing happens after ``close``."""
        if self._is_closed:
            return
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane()
            lane.task = asyncio.get_running_loop().create_task(self._serve(key, lane), name=f"lane {key}")
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
            async with self._workers:
                lane.wakeup.clear()
                lane.started = asyncio.get_running_loop().time()
                try:
                    delay = await self._work(key)
                    num_failures = 0
                except Exception as error:
                    num_failures += 1
                    delay = BACKOFF.seconds(num_failures)
                    _log_failure(key, error, delay)
                lane.started = None
            # No await between this check and the removal, or a wake-up in between would be lost.
            if delay is None and not lane.wakeup.is_set():
                del self._lanes[key]
                return


def _log_failure(key: object, error: Exception, delay: float) -> None:
    is_bug = not isinstance(error, OperatorError)
    level, trace = (logging.ERROR, error) if is_bug else (logging.WARNING, None)
    logger.log(level, "%s: %s; trying again in %.1f s", key, error, delay, exc_info=trace)
