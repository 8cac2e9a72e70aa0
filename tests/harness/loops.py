"""Async tests without a plugin."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable


def in_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test in a new event loop. Its arguments may be fixtures."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        asyncio.run(test(*args, **kwargs))

    return run
