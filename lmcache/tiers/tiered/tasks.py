"""Background work on an event loop: tasks that end together, threads for what blocks, and what is
outstanding."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

NICENESS = 10
"""Of threads for what nobody waits for: an engine beside us that needs the processor goes first."""


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
            logger.error("background work ended with an error", exc_info=task.exception())


class Workers:
    """Threads in which what blocks is done. None that never comes back from the kernel (a hung disk) keeps
    the process from ending.

    ``niceness``: how far an engine that needs the processor goes before them, 0-19.
    """

    def __init__(self, number: int, name: str, niceness: int = 0) -> None:
        self._niceness = niceness
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run_all, name=f"{name}_{index}", daemon=True)
            for index in range(number)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, operation: Callable[[], T]) -> T:
        """Do this in a thread, in its turn."""
        return await asyncio.wrap_future(self.submit(operation))

    def submit(self, operation: Callable[[], T]) -> Future[T]:
        """Do this in a thread, in its turn; for those who have no event loop."""
        future: Future[T] = Future()
        self._work.put((future, operation))
        return future

    async def close(self, timeout_seconds: float | None = None) -> bool:
        """Do nothing more, and wait for what is being done. False: it goes on."""
        self.stop()
        return await asyncio.to_thread(self.join, timeout_seconds)

    def stop(self) -> None:
        """Do nothing more; what is being done goes on to its end."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._work.get_nowait()
                if item is not None:
                    item[0].cancel()
        for _ in self._threads:
            self._work.put(None)

    def join(self, timeout_seconds: float | None = None) -> bool:
        """Wait for what was being done when it was stopped. False: it goes on."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run_all(self) -> None:
        thread = threading.get_native_id()
        if os.getpriority(os.PRIO_PROCESS, thread) < self._niceness:  # else the process is nicer still
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread, self._niceness)
        while (item := self._work.get()) is not None:
            _do(*item)
            del item  # else views of the arena stay while it is idle


def _do(future: Future[T], operation: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = operation()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


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
