"""Operations of one lower tier, in its own threads. A slow or unavailable tier delays only its own users."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from lmcache_store.common.threads import NICENESS
from lmcache_store.tiers.base import LowerTier
from lmcache_store.tiers.errors import TierUnavailableError
from lmcache_store.tiers.tiered.tasks import Tasks, Turns, Workers

T = TypeVar("T")

_NUM_READERS = 2
_NUM_WRITERS = 2
_ENCRYPTED_FACTOR = 2
"""Factor for the threads of an encrypted tier: some encrypt or decrypt while other ones use the medium."""

_STUCK_SECONDS = 10.0
"""A tier whose oldest operation takes this long counts as unhealthy.

Tiers have deadlines, but a disk's system call may hang in the kernel."""


class TierOperations:
    """Threads of one lower tier, and its health. Belongs to the event loop; only the threads use ``tier``."""

    def __init__(self, name: str, tier: LowerTier, clock: Callable[[], float]) -> None:
        self.name = name
        self._tier = tier
        self._clock = clock
        self._stuck_seconds = _STUCK_SECONDS
        self._loop = asyncio.get_running_loop()
        tier.health.subscribe(self._on_health)
        self._up = asyncio.Event()  # set while the tier's circuit is closed
        self._update_health()  # the circuit may be open since before this subscription
        self._running: dict[object, float] = {}  # operation -> start time, the oldest first
        factor = _ENCRYPTED_FACTOR if tier.is_encrypted else 1
        self.num_writers = factor * _NUM_WRITERS
        """Number of rows that are written at once."""
        # One thread more than there are loads, so that a probe never waits for a load.
        self._readers = Workers(factor * _NUM_READERS + 1, f"{name}-read")
        self._writers = Workers(self.num_writers, f"{name}-write", NICENESS)
        self._loading = Turns(factor * _NUM_READERS)
        self._tasks = Tasks()

    @property
    def is_healthy(self) -> bool:
        """Is the circuit closed, and no operation stuck?"""
        since = next(iter(self._running.values()), self._clock())
        return self._up.is_set() and self._clock() - since < self._stuck_seconds

    @property
    def takes_writes(self) -> bool:
        """See LowerTier."""
        return self._tier.takes_writes

    @property
    def residence_seconds(self) -> float:
        """See LowerTier."""
        return self._tier.residence_seconds

    async def _ask(self, question: Callable[[], T], nothing: T, tenant: bytes = b"") -> T:
        """Return the tier's answer, or ``nothing`` if the tier is unhealthy or does not answer in time."""
        if not self.is_healthy:
            return nothing

        async def ask() -> T:
            with contextlib.suppress(TierUnavailableError):
                return await self._run(self._readers, question, tenant)
            return nothing

        asking = self._tasks.spawn(ask())
        await asyncio.wait([asking], timeout=self._stuck_seconds)  # then the next tier is asked
        return asking.result() if asking.done() and not asking.cancelled() else nothing

    async def _take_turn(self, tenant: bytes) -> bool:
        """Wait until one row more may be loaded at once. False: the tier is unhealthy.

        Tenants take turns: one that waits for many rows delays a row of another tenant by one load."""
        while self.is_healthy:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._loading.take(tenant), self._stuck_seconds)
                if self.is_healthy:
                    return True
                self._loading.give_back()
        return False

    async def _run(self, pool: Workers, operation: Callable[[], T], tenant: bytes = b"") -> T:
        """Run an operation in a thread; tenants take turns. Raises TierUnavailableError; the tier is then
        unhealthy until a probe succeeds."""
        name = object()
        self._running[name] = self._clock()
        try:
            return await pool.run(operation, tenant)
        except TierUnavailableError:
            self._update_health()
            raise
        finally:
            del self._running[name]

    def _on_health(self, failed: bool) -> None:
        """Called in any thread, even after the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._update_health)

    def _update_health(self) -> None:
        (self._up.clear if self._tier.health.is_open else self._up.set)()

    async def close(self, timeout_seconds: float | None = None) -> bool:
        """Stop all tasks and threads. Returns True when no thread uses the tier any more."""
        self._tier.health.unsubscribe(self._on_health)
        await self._tasks.cancel()
        ended = [await pool.close(timeout_seconds) for pool in (self._readers, self._writers)]
        return all(ended)
