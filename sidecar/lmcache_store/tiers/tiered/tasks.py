"""Background work of an event loop: tasks, threads for blocking operations, and a count of pending work."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

from lmcache_store.common.fair_queue import FairQueue
from lmcache_store.common.threads import lower_priority

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Tasks:
    """Tasks of one owner. A failed task is logged and does not affect the others."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task on the running loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    async def cancel(self) -> None:
        """Cancel all tasks, and wait for their end."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a background task failed", exc_info=task.exception())


class Workers:
    """Daemon threads for blocking operations. A thread that is stuck in the kernel (hung disk) does not block
    process exit.

    ``niceness``: 0-19; at a higher value, other processes run first.
    """

    def __init__(self, number: int, name: str, niceness: int = 0) -> None:
        self._niceness = niceness
        self._changed = threading.Condition()  # protects the next two
        self._work: FairQueue[tuple[Future[Any], Callable[[], Any]]] = FairQueue()
        self._is_stopped = False
        self._threads = [
            threading.Thread(target=self._run_all, name=f"{name}_{index}", daemon=True)
            for index in range(number)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, operation: Callable[[], T], turn: Hashable = None) -> T:
        """Run an operation in a thread, and return its result. See ``submit``."""
        return await asyncio.wrap_future(self.submit(operation, turn))

    def submit(self, operation: Callable[[], T], turn: Hashable = None) -> Future[T]:
        """Queue an operation for a thread. For callers without an event loop.

        Operations of one ``turn`` start in order. If several turns have queued operations, they alternate.
        """
        future: Future[T] = Future()
        with self._changed:
            self._work.put(turn, ((future, operation),))
            self._changed.notify()
        return future

    async def close(self, timeout_seconds: float | None = None) -> bool:
        """Stop, and wait for running operations. False: one is still running after the time-out."""
        self.stop()
        return await asyncio.to_thread(self.join, timeout_seconds)

    def stop(self) -> None:
        """Cancel queued operations. Running operations continue to their end."""
        with self._changed:
            while self._work:
                self._work.take_next()[0].cancel()
            self._is_stopped = True
            self._changed.notify_all()

    def join(self, timeout_seconds: float | None = None) -> bool:
        """Wait for running operations after ``stop``. False: one is still running after the time-out."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run_all(self) -> None:
        lower_priority(self._niceness)
        while (item := self._next()) is not None:
            _do(*item)
            del item  # otherwise an idle thread would keep views of the arena

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """Wait for the next operation; None: the threads must end."""
        with self._changed:
            self._changed.wait_for(lambda: self._work or self._is_stopped)
            return None if self._is_stopped else self._work.take_next()


def _do(future: Future[T], operation: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = operation()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


class Turns:
    """A semaphore of the event loop for which tenants take turns, however many tasks of each are waiting.

    All operations take constant time, also the end of a wait: thousands of waits may time out at once.
    """

    def __init__(self, number: int) -> None:
        """``number``: tasks that may have a turn at once."""
        self._num_free = number
        # Tasks that wait, by tenant: the next ones first. No tenant is without tasks.
        self._waiting: OrderedDict[Hashable, OrderedDict[asyncio.Future[None], None]] = OrderedDict()

    async def take(self, tenant: Hashable) -> None:
        """Wait for a turn, which the caller must give back."""
        if self._num_free:
            self._num_free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, OrderedDict())[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(tenant, turn)
            else:  # the turn came at the same time
                self.give_back()
            raise

    def give_back(self) -> None:
        """End a turn. The next waiting task gets it."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            self._waiting.move_to_end(tenant)
            turn = next(iter(self._waiting[tenant]))
            self._leave(tenant, turn)
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._num_free += 1

    def _leave(self, tenant: Hashable, turn: asyncio.Future[None]) -> None:
        """Remove a task that no longer waits; it may have been removed before."""
        turns = self._waiting.get(tenant, OrderedDict())
        turns.pop(turn, None)
        if not turns:
            self._waiting.pop(tenant, None)


class Outstanding:
    """A count of outstanding work, with a wait for zero."""

    def __init__(self) -> None:
        self.number = 0
        self._is_zero = asyncio.Event()
        self._is_zero.set()

    def add(self, number: int = 1) -> None:
        """Add outstanding work."""
        self.number += number
        if number:
            self._is_zero.clear()

    def done(self) -> None:
        """Count one piece of work as done."""
        self.number -= 1
        if self.number == 0:
            self._is_zero.set()

    async def wait(self) -> None:
        """Wait until the count is zero."""
        await self._is_zero.wait()
