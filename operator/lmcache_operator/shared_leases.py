"""Leases that the operators of all releases share, so that no two of them write to one namespace.

The pods of a release elect their leader by a Lease of the release. The leader also needs shared Leases:

- An operator with a list of namespaces holds the Lease ``lmcache-operator-namespace`` in each of them.
- An operator of all namespaces holds the Lease `ALL`. It leaves out each namespace that has the Lease
  ``lmcache-operator-namespace``, which it looks for before it works or writes there.

The holder of a shared Lease is the release and not a pod. The next leader of the release takes it at once.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from lmcache_operator import metrics
from lmcache_operator.election import LEASE_SECONDS, RETRY_SECONDS, Elector, LeaseName
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.kube.fence import WriteFence
from lmcache_operator.reconcile.measures import unmeasure
from lmcache_operator.specs.kinds import ClusterKey
from lmcache_operator.specs.names import FIELD_MANAGER

ALL = LeaseName("default", f"{FIELD_MANAGER}-all-namespaces")
"""The Lease for all namespaces. No person can delete its namespace."""
_ABANDONED_SECONDS = 60.0
"""Time after which the Lease of a namespace is deleted if no operator renews it. A failover takes 20 s."""
_PAUSE_SECONDS = 15.0
"""Time between two looks for the right to work in a namespace."""
_ADVICE = "Two releases must not serve one namespace: uninstall one of them, or change its watchNamespaces"
_NAMESPACE = re.compile(r"/namespaces/([^/?]+)")
_Work = Callable[[ClusterKey], Awaitable[float | None]]


class SharedLeases(WriteFence):
    """The part of one operator in the shared Leases. Without ``namespaces``, it serves all of them."""

    def __init__(self, api: KubeApi, leader: Elector, namespaces: Sequence[str]) -> None:
        self._api, self._leader = api, leader
        self._of_namespace = {name: self._elector(_lease_in(name)) for name in namespaces}
        self._all = None if namespaces else self._elector(ALL)
        self._held = [self._all] if self._all else list(self._of_namespace.values())

    def _elector(self, lease: LeaseName) -> Elector:
        release = "/".join(self._leader.lease_name)
        return Elector(self._api, lease, release, advice=_ADVICE, clock=self._leader.clock)

    async def lead(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``work`` while this operator leads its release, and may work in at least one namespace.

        Raises:
            LeaseLostError: another pod of the release leads; ``work`` has been cancelled.
            Exception: an exception of ``work``.
        """
        await asyncio.gather(*(lease.prepare() for lease in self._held))
        await self._leader.lead(lambda: self._hold(work))

    async def _hold(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        metrics.LEADING.set_function(lambda: float(any(map(self._seconds_left, self._held))))
        while True:
            if any(await asyncio.gather(*(lease.attempt() for lease in self._held))):
                break
            await asyncio.sleep(RETRY_SECONDS)
        renewals = [asyncio.create_task(lease.renew()) for lease in self._held]
        try:
            await work()
        finally:
            for renewal in renewals:
                renewal.cancel()

    async def renew(self, url: str) -> None:
        """See `WriteFence`. Without a list, look whether an operator with a list serves the namespace."""
        if self._all and (namespace := _NAMESPACE.search(url)):
            await self._renew(namespace[1])

    async def _renew(self, namespace: str) -> None:
        lease = self._of_namespace.get(namespace) or self._elector(_lease_in(namespace))
        if lease.seconds_left() < LEASE_SECONDS - RETRY_SECONDS:
            await lease.renew_absence(_ABANDONED_SECONDS)
        self._of_namespace[namespace] = lease  # now, because a deleted cluster may have removed it meanwhile

    def seconds_left(self, url: str) -> float:
        """See `WriteFence`. Zero: another operator may work in the namespace already."""
        namespace = _NAMESPACE.search(url)
        lease = self._of_namespace.get(namespace[1] if namespace else "")
        return self._seconds_left(lease) if lease else 0.0

    def _seconds_left(self, lease: Elector) -> float:
        """Seconds in which no other operator can work in the namespace of a Lease."""
        return min(each.seconds_left() for each in (self._leader, self._all or lease, lease))

    def guarded(self, work: _Work) -> _Work:
        """Return work of a queue that runs only in namespaces in which no other operator works."""

        async def run(key: ClusterKey) -> float | None:
            if self._all:
                await self._renew(key.namespace)
            if not self._seconds_left(self._of_namespace[key.namespace]):
                unmeasure(key)
                return _PAUSE_SECONDS
            delay = await work(key)
            if delay is None and self._all:  # the cluster is deleted, and perhaps its namespace
                self._of_namespace.pop(key.namespace, None)
            return delay

        return run


def _lease_in(namespace: str) -> LeaseName:
    # The Lease of a release often has the name lmcache-operator, because it has the name of its Deployment.
    return LeaseName(namespace, f"{FIELD_MANAGER}-namespace")
