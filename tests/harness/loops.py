"""Calls in an event loop, in threads, and until they succeed."""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from testing.child_process import wait_until

T = TypeVar("T")


def in_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test in a new event loop. Its arguments may be fixtures."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def in_threads(work: Callable[[T], object], arguments: Collection[T]) -> None:
    """Call ``work`` with each argument in a thread of its own, and raise what a call raised."""
    with ThreadPoolExecutor(len(arguments)) as threads:
        list(threads.map(work, arguments))


def retried(call: Callable[[], T]) -> T:
    """Return the result of the first call that raises no ConnectionError."""
    results: list[T] = []

    def has_result() -> bool:
        with contextlib.suppress(ConnectionError):
            results.append(call())
        return bool(results)

    wait_until(has_result)
    return results[0]
