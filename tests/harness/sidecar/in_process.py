"""A sidecar on an event loop of the test's process."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from lmcache_sidecar.calls import CallStats
from lmcache_sidecar.config import Config
from lmcache_sidecar.sidecar import Sidecar

T = TypeVar("T")


def run_sidecar(config: Config, use: Callable[[Sidecar], Awaitable[T]]) -> T:
    """Run a sidecar until ``use`` ends. Returns its result."""

    async def run() -> T:
        sidecar = Sidecar(config, CallStats())
        await sidecar.start()
        try:
            return await use(sidecar)
        finally:
            await sidecar.stop()

    return asyncio.run(run())
