"""Which of several operators works: the one that holds the Lease.

As client-go does it: the holder writes the Lease every 2 s; another takes it when nobody has written it for
15 s by its own clock, so clocks need not agree. Every write of it names the version that it replaces: of two
who try, one succeeds.

The holder may write to the API server for 15 s from when it sent its last renewal that was answered: before
anybody else can have waited for as long. A process that was frozen sees by its clock alone that this is over.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
import uuid
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any, NamedTuple

from lmcache_operator import metrics
from lmcache_operator.errors import LeaseLostError
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import LEASE

logger = logging.getLogger(__name__)

LEASE_SECONDS = 15.0
_TRY_SECONDS = 5.0
"""For one look at the Lease, or one write of it."""
_RETRY_SECONDS = 2.0
_RELEASED_SECONDS = 1
"""Duration in a Lease that its holder gave up, and that has none; as client-go writes it."""
# Made where there is none, and then waited for: that none was there all the time can't be seen.
_UNHELD = {"leaseDurationSeconds": int(LEASE_SECONDS)}
_MAX_TRANSITIONS = 2**31 - 1


class LeaseName(NamedTuple):
    """Where the Lease is."""

    namespace: str
    name: str


def _boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # goes on while the machine sleeps


class _Seen(NamedTuple):
    """A version of the Lease that was new to us."""

    version: str
    time: float
    """When we knew of it. Until it is another one, nobody has written the Lease since."""


class Elector:
    """One operator's part in the election. ``seconds_left`` is the fence for whatever its leader writes."""

    def __init__(
        self,
        api: KubeApi,
        lease: LeaseName,
        pod: str,
        *,
        clock: Callable[[], float] = _boot_time,
    ) -> None:
        self._api = api
        self._lease_name = lease
        self.identity = f"{pod}_{uuid.uuid4().hex[:8]}"
        self._clock = clock
        self._seen = _Seen("", clock())
        self._stored: Object | None = None
        """The Lease as we wrote it; None when it may be another by now."""
        self._renewed = -math.inf
        """When that was sent."""
        self._is_leading = False
        self._said = ""

    def seconds_left(self) -> float:
        """For how long nobody else can lead; 0: somebody may."""
        return max(0.0, self._renewed + LEASE_SECONDS - self._clock())

    async def lead(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait for the Lease, then ``work`` while it is held, and give it up.

        Raises LeaseLostError when another has it, after the work was cancelled; and what the work raises.
        """
        while not await self._try():
            runs_out = self._seen.time + LEASE_SECONDS - self._clock()
            await asyncio.sleep(min(_RETRY_SECONDS * random.uniform(1.0, 1.2), max(0.1, runs_out)))
        self._is_leading = True
        self._say(logging.INFO, f"leading as {self.identity}")
        metrics.LEADING.set_function(lambda: float(self.seconds_left() > 0))
        tasks = asyncio.create_task(work()), asyncio.create_task(self._renew())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            metrics.LEADING.set_function(lambda: 0.0)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await self._release()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RETRY_SECONDS)
            await self._try()

    async def _try(self) -> bool:
        """Take the Lease, or renew it, if it is ours to take; whether that was done."""
        try:
            async with asyncio.timeout(_TRY_SECONDS):
                return await self._take()
        except LeaseLostError:
            raise
        except Exception as error:  # whatever it is: at the next try it may be over, and until then time runs
            self._say(logging.WARNING, f"the lease can't be had: {str(error) or type(error).__name__}")
            return False

    async def _take(self) -> bool:
        lease, self._stored = self._stored or await self._look(), None
        may_take = self._may_take(lease)
        if lease and not may_take:
            return False
        sent = self._clock()
        stored = await self._store(lease, self._record(lease) if may_take else _UNHELD)
        if stored is None or not may_take:
            return False
        self._stored, self._renewed = stored, sent
        return True

    async def _look(self) -> Object | None:
        lease = await self._api.get(LEASE, *self._lease_name)
        if lease and (version := lease["metadata"]["resourceVersion"]) != self._seen.version:
            self._seen = _Seen(version, self._clock())
        return lease

    def _may_take(self, lease: Object | None) -> bool:
        """Whether nobody else can lead. One that is gone, or was edited, may have a holder all the same."""
        spec = _spec(lease)
        holder = spec.get("holderIdentity")
        if holder == self.identity or (not holder and self.seconds_left()):
            return True
        if lease is None:
            return False
        if self._is_leading:
            raise LeaseLostError(f"the lease is held by {holder or 'nobody'}")
        self._say(logging.INFO, f"standing by: the lease is held by {holder or 'nobody'}")
        is_released = not holder and spec.get("leaseDurationSeconds") == _RELEASED_SECONDS
        return is_released or self._clock() - self._seen.time >= LEASE_SECONDS

    def _record(self, lease: Object | None) -> Object:
        now, before = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"), _spec(lease)
        is_ours = before.get("holderIdentity") == self.identity
        transitions = before.get("leaseTransitions") or 0
        return {
            "acquireTime": (is_ours and before.get("acquireTime")) or now,
            "holderIdentity": self.identity,
            "leaseDurationSeconds": int(LEASE_SECONDS),
            "leaseTransitions": transitions if is_ours else min(transitions + 1, _MAX_TRANSITIONS),
            "renewTime": now,
        }

    async def _store(self, lease: Object | None, spec: Object) -> Object | None:
        """The Lease as stored; None if it is not any more what was read."""
        namespace, name = self._lease_name
        metadata = lease["metadata"] if lease else {"namespace": namespace, "name": name}
        wanted = {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata, "spec": spec}
        return await (self._api.replace if lease else self._api.create)(LEASE, wanted)

    async def _release(self) -> None:
        """Give the Lease up, if it is ours, so that nobody waits for it to run out."""
        self._renewed = -math.inf
        try:
            async with asyncio.timeout(_TRY_SECONDS):
                await self._api.settle()  # the last renewal, which may have been cancelled
                lease = self._stored or await self._look()
                if _spec(lease).get("holderIdentity") == self.identity:
                    spec = self._record(lease) | {"leaseDurationSeconds": _RELEASED_SECONDS}
                    del spec["holderIdentity"]
                    await self._store(lease, spec)
        except Exception as error:
            logger.warning("the lease was not released, it runs out: %s", str(error) or type(error).__name__)

    def _say(self, level: int, text: str) -> None:
        if text != self._said:
            self._said = text
            logger.log(level, text)


def _spec(lease: Object | None) -> Object:
    return (lease or {}).get("spec") or {}
