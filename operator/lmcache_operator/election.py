"""Leader election: of several operators, only the holder of the Lease works.

The protocol is that of client-go. The holder renews the Lease every 2 s. Another operator takes the Lease
after it saw no write for 15 s by its own clock, so clocks need not agree. Every write names the version that
it replaces, so of two candidates only one succeeds.

The holder may write to the API server until 15 s after it sent its last confirmed renewal. No other operator
can have waited that long by then. A process that was frozen notices the end of this time by its own clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
import uuid
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any, NamedTuple

from lmcache_operator import metrics
from lmcache_operator.errors import ApiError, LeaseLostError
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import LEASE

logger = logging.getLogger(__name__)

LEASE_SECONDS = 15.0
_TRY_SECONDS = 5.0
"""Timeout of one attempt to read and write the Lease."""
RETRY_SECONDS = 2.0
_RELEASED_SECONDS = 1
"""Duration in a Lease that its holder released; client-go writes the same."""
# A missing Lease is created without a holder, and then waited for: a deleted Lease may still have a holder.
_UNHELD = {"leaseDurationSeconds": int(LEASE_SECONDS)}
_MAX_TRANSITIONS = 2**31 - 1


class LeaseName(NamedTuple):
    """Namespace and name of the Lease."""

    namespace: str
    name: str


def _boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # includes time in which the machine sleeps


def new_identity(pod: str) -> str:
    """Return the identity of an operator process in a pod."""
    return f"{pod}_{uuid.uuid4().hex[:8]}"


class _LeaseVersion(NamedTuple):
    """The latest version of the Lease that this operator read."""

    version: str
    time: float
    """Time at which it was first read. While the version stays, no operator has written the Lease since."""


class Elector:
    """One operator's part in the election. ``seconds_left`` is the fence for all writes of the leader."""

    def __init__(
        self,
        api: KubeApi,
        lease: LeaseName,
        identity: str,
        *,
        advice: str = "",
        clock: Callable[[], float] = _boot_time,
    ) -> None:
        """``advice``: what an administrator can do while another operator holds the Lease; empty: nothing."""
        self._api, self._advice = api, advice
        self.lease_name = lease
        self.identity = identity
        self.clock = clock
        self._last_version = _LeaseVersion("", clock())
        self._stored: Object | None = None
        """The Lease as this operator wrote it; None if it may have changed since."""
        self._renewed = -math.inf
        """Time at which the last confirmed renewal was sent."""
        self._is_leading = False
        self._last_message = ""

    def seconds_left(self) -> float:
        """Seconds in which no other operator can lead; 0: another may lead already."""
        return max(0.0, self._renewed + LEASE_SECONDS - self.clock())

    async def lead(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait for the Lease, run ``work`` while holding it, and release it.

        Raises:
            LeaseLostError: another operator holds the Lease; ``work`` has been cancelled.
            Exception: an exception of ``work``.
        """
        while not await self.attempt():
            runs_out = self._last_version.time + LEASE_SECONDS - self.clock()
            await asyncio.sleep(min(RETRY_SECONDS * random.uniform(1.0, 1.2), max(0.1, runs_out)))
        self._is_leading = True
        self._log(logging.INFO, f"leading as {self.identity}")
        metrics.LEADING.set_function(lambda: float(self.seconds_left() > 0))
        tasks = asyncio.create_task(work()), asyncio.create_task(self.renew())
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

    async def renew(self) -> None:
        """Renew the Lease until the task is cancelled."""
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            await self.attempt()

    async def prepare(self) -> None:
        """Create the Lease without a holder if it is missing. The time to wait for it begins now."""
        with contextlib.suppress(ApiError):  # the first attempt repeats this
            if await self._look() is None:
                await self._create_unheld()

    async def renew_absence(self, abandoned_seconds: float) -> None:
        """Renew as long as the Lease is missing: an operator that creates the Lease leads 15 s later.

        Deletes a Lease that no operator has written for ``abandoned_seconds``. Raises ApiError.
        """
        sent = self.clock()
        if lease := await self._look():
            metadata, holder = lease["metadata"], _spec(lease).get("holderIdentity")
            is_abandoned = self.clock() - self._last_version.time >= abandoned_seconds
            if (is_abandoned or holder == self.identity) and await self._api.delete(
                LEASE, *self.lease_name, metadata["uid"], resourceVersion=metadata["resourceVersion"]
            ):
                lease = await self._look()  # with finalizers it still exists, so another may take it
            if lease:
                self._log_standby(_spec(lease).get("holderIdentity"))
        self._renewed = -math.inf if lease else sent

    async def attempt(self) -> bool:
        """Take or renew the Lease if this operator may. Returns whether it did."""
        try:
            async with asyncio.timeout(_TRY_SECONDS):
                return await self._take()
        except LeaseLostError:
            raise
        except Exception as error:  # the next try may succeed; meanwhile the fence expires
            name = "/".join(self.lease_name)
            self._log(logging.WARNING, f"cannot access Lease {name}: {str(error) or type(error).__name__}")
            return False

    async def _take(self) -> bool:
        lease, self._stored = self._stored or await self._look(), None
        may_take = self._may_take(lease)
        if lease and not may_take:
            return False
        if not may_take:
            await self._create_unheld()
            return False
        sent = self.clock()
        if (stored := await self._store(lease, self._record(lease))) is None:
            return False
        self._stored, self._renewed = stored, sent
        return True

    async def _create_unheld(self) -> None:
        self._note_version(await self._store(None, _UNHELD))

    async def _look(self) -> Object | None:
        lease = await self._api.get(LEASE, *self.lease_name)
        self._note_version(lease)
        return lease

    def _note_version(self, lease: Object | None) -> None:
        if lease and (version := lease["metadata"]["resourceVersion"]) != self._last_version.version:
            self._last_version = _LeaseVersion(version, self.clock())

    def _may_take(self, lease: Object | None) -> bool:
        """Whether no other operator can lead. Even a deleted or edited Lease may still have a holder."""
        spec = _spec(lease)
        holder = spec.get("holderIdentity")
        if holder == self.identity or (not holder and self.seconds_left()):
            return True
        if lease is None:
            return False
        if self._is_leading:
            raise LeaseLostError(f"the lease is held by {holder or 'no operator'}")
        self._log_standby(holder)
        is_released = not holder and spec.get("leaseDurationSeconds") == _RELEASED_SECONDS
        return is_released or self.clock() - self._last_version.time >= LEASE_SECONDS

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
        """Write the Lease. Returns it as stored, or None if another client changed it since it was read."""
        namespace, name = self.lease_name
        metadata = lease["metadata"] if lease else {"namespace": namespace, "name": name}
        wanted = {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata, "spec": spec}
        return await (self._api.replace if lease else self._api.create)(LEASE, wanted)

    async def _release(self) -> None:
        """Release the Lease if this operator holds it, so that no other has to wait until it expires."""
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
            logger.warning(
                "could not release the lease; it will expire: %s", str(error) or type(error).__name__
            )

    def _log_standby(self, holder: str | None) -> None:
        text = f"standing by: Lease {'/'.join(self.lease_name)} is held by {holder or 'no operator'}"
        is_conflict = bool(holder and self._advice)
        self._log(*((logging.WARNING, f"{text}. {self._advice}") if is_conflict else (logging.INFO, text)))

    def _log(self, level: int, text: str) -> None:
        if text != self._last_message:
            self._last_message = text
            logger.log(level, text)


def _spec(lease: Object | None) -> Object:
    return (lease or {}).get("spec") or {}
