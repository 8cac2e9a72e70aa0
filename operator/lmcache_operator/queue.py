"""A queue of keys in which no wake-up is lost and no key is worked on twice at a time.

Each key has its own lane: one task that waits for a wake-up or a deadline and then does the work. Wake-ups
that come in a burst, or while the work runs, make one more run. The event is cleared before the work looks at
the world, so a change is either seen by the run or starts the next one.

All times are those of the event loop; a test gives it another clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

logger = logging.getLogger(__name__)


class RetryableError(Exception):
    """A failure that is expected to go away: it is logged as one line, and the key is tried again."""


@dataclass(frozen=True)
class Backoff:
    """Seconds before the next try: doubling, jittered so that not all keys come back at once."""

    first_seconds: float = 0.5
    max_seconds: float = 60.0

    def delay(self, num_failures: int) -> float:
        """Between half and all of the doubled delay."""
        longest = min(self.first_seconds * 2.0 ** min(num_failures - 1, 30), self.max_seconds)
        return longest * random.uniform(0.5, 1.0)


@dataclass
class _Lane:
    wakeup: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    started: float | None = None
    """When the present run began; None between runs."""


class KeyedQueue(Generic[Key]):
    """Runs `work(key)` for every key that was woken. Not thread-safe: it lives on one event loop.

    `work` returns the seconds after which the key is due again by itself, or None when the key is gone: its
    lane ends unless it was woken meanwhile. Work that raises is tried again after a back-off, or at the next
    wake-up.
    """

    def __init__(
        self,
        work: Callable[[Key], Awaitable[float | None]],
        *,
        num_workers: int,
        settle_seconds: float = 0.05,
        backoff: Backoff | None = None,
    ) -> None:
        self._work = work
        self._workers = asyncio.Semaphore(num_workers)
        self._settle_seconds = settle_seconds
        self._backoff = backoff or Backoff()
        self._lanes: dict[Key, _Lane] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._lanes)

    def wake(self, key: Key) -> None:
        """Have the key worked on soon. Nothing happens after `close`."""
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
        return max(
            (now - lane.started for lane in self._lanes.values() if lane.started is not None), default=0.0
        )

    async def close(self) -> None:
        """Cancel everything and wait for it."""
        self._is_closed = True
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._lanes.clear()

    async def _serve(self, key: Key, lane: _Lane) -> None:
        delay: float | None = None
        num_failures = 0
        while True:
            await _first_of(lane.wakeup, delay)
            # What happens to a key comes in bursts: let it settle, then look once.
            await asyncio.sleep(self._settle_seconds)
            async with self._workers:
                lane.wakeup.clear()
                try:
                    delay = await self._run(key, lane)
                    num_failures = 0
                except Exception as error:
                    num_failures += 1
                    delay = self._backoff.delay(num_failures)
                    _log_failure(key, error, delay)
            # No await between this look and the removal, or a wake-up in between would be lost.
            if delay is None and not lane.wakeup.is_set():
                del self._lanes[key]
                return

    async def _run(self, key: Key, lane: _Lane) -> float | None:
        lane.started = asyncio.get_running_loop().time()
        try:
            return await self._work(key)
        finally:
            lane.started = None


async def _first_of(event: asyncio.Event, seconds: float | None) -> None:
    """Wait for the event, or until the time is over if there is a limit."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _log_failure(key: object, error: Exception, delay: float) -> None:
    is_bug = not isinstance(error, RetryableError)
    logger.log(
        logging.ERROR if is_bug else logging.WARNING,
        "%s: %s; trying again in %.1f s",
        key,
        error,
        delay,
        exc_info=error if is_bug else None,
    )
