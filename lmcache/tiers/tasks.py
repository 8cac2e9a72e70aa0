"""Background work on an event loop: tasks that end together, and what is outstanding."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Tasks:
    """Tasks of one owner. One that fails says so in the log, and ends nobody else's."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run it on the running loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    async def cancel(self) -> None:
        """End all of them."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("background work ended with an error", exc_info=task.exception())


class Outstanding:
    """A count whose return to zero can be waited for."""

    def __init__(self) -> None:
        self.number = 0
        self._is_zero = asyncio.Event()
        self._is_zero.set()

    def add(self, number: int = 1) -> None:
        """So much more is to be done."""
        self.number += number
        if number:
            self._is_zero.clear()

    def done(self) -> None:
        """One is done."""
        self.number -= 1
        if self.number == 0:
            self._is_zero.set()

    async def wait(self) -> None:
        """Until nothing is outstanding."""
        await self._is_zero.wait()
