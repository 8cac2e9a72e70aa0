"""Reconciles a cluster: observe, plan, apply, status. Each starts from what the API server says."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain
from typing import Protocol

from lmcache.backoff import Backoff
from lmcache_operator import metrics
from lmcache_operator.api import API_VERSION, KIND
from lmcache_operator.autoscaling.report import Report
from lmcache_operator.components import COMPONENTS
from lmcache_operator.components.base import Component, Context, Event, Observed, Plan, Problem, Status
from lmcache_operator.errors import ApiError, RefusedError
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.reconcile.apply import Applier
from lmcache_operator.reconcile.contest import ContestLog
from lmcache_operator.reconcile.measured import measure, unmeasure
from lmcache_operator.reconcile.observe import observe
from lmcache_operator.reconcile.plan import creates_something, internal_error, plan
from lmcache_operator.reconcile.probe import ReadStats, SidecarProber
from lmcache_operator.reconcile.status import derive_status, events, is_at_rest, news
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import CLUSTER, ClusterKey

logger = logging.getLogger(__name__)

_RESYNC_SECONDS = 900.0
"""Every cluster is reconciled this often even when nothing was reported about it."""
_ALWAYS_KNOWN = ("conditions", "observedGeneration", "readyReplicas", "replicas", "selector")
"""Fields of the status in every version of the LMCacheCluster definition."""
_WAIT = Backoff(base=5.0, cap=60.0)
"""Until the next try at what nobody reports: why a pod is not ready, a budget that frees up, a refusal."""


@dataclass
class _Memory:
    """What is remembered of a cluster between reconciliations; nothing breaks when it is lost."""

    prober: SidecarProber
    contests: ContestLog = field(default_factory=ContestLog)
    num_failures: int = 0
    """Reconciliations that failed one after the other."""
    num_waits: int = 0
    """Those one after the other that changed nothing while something was not as it should be."""

    def seconds_to_next_try(self, is_news: bool) -> float:
        """After a reconciliation that left something as it should not be; longer and longer."""
        self.num_waits = 0 if is_news else self.num_waits + 1
        return _WAIT.seconds(self.num_waits + 1)


class Autoscaler(Protocol):
    """Watches what clusters look up, and wakes those that it has news of. Neither call waits, or raises."""

    def report(self, key: ClusterKey, observed: Mapping[str, Observed]) -> Report | None:
        """Its latest of a cluster, of which it learns here: its spec, its pods, and by the component
        ``autoscaling`` what survived a restart."""

    def forget(self, key: ClusterKey) -> None:
        """The cluster is gone, or going."""


class Reconciler:
    """Brings clusters to their declared state."""

    def __init__(
        self,
        api: KubeApi,
        context: Context,
        read_stats: ReadStats,
        *,
        components: Sequence[Component] = COMPONENTS,
        autoscaler: Autoscaler | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._context = context
        self._read_stats = read_stats
        self._components = components
        self._autoscaler = autoscaler
        self._monotonic = monotonic
        self._memories: dict[str, _Memory] = {}

    async def reconcile(self, key: ClusterKey) -> float | None:
        """Observe a cluster once and do what is due.

        Returns the seconds after which it is due again even if nothing happens; None when the cluster, or its
        namespace, is gone or going: its children are the garbage collector's.

        Raises what went wrong after it was reported, so that it is due again after a back-off.
        """
        with metrics.RECONCILE_SECONDS.time(), metrics.RECONCILE_FAILURES.count_exceptions():
            resource = await self._api.get(CLUSTER, key.namespace, key.name)
            if resource is None or resource["metadata"]["uid"] != key.uid:
                self._forget(key)
                if resource is None:
                    unmeasure(key)
                return None
            if "deletionTimestamp" in resource["metadata"]:
                self._forget(key)
                return None
            fresh = _Memory(SidecarProber(self._read_stats, self._monotonic))
            return await self._reconcile(key, resource, self._memories.setdefault(key.uid, fresh))

    def _forget(self, key: ClusterKey) -> None:
        self._memories.pop(key.uid, None)
        if self._autoscaler:
            self._autoscaler.forget(key)

    async def _reconcile(self, key: ClusterKey, resource: Object, memory: _Memory) -> float | None:
        now, observed, plans = datetime.now(UTC), dict[str, Observed](), dict[str, Plan]()
        applier = Applier(self._api, key, memory.contests, self._monotonic(), self._read_stats)
        failure: Exception | None = None
        try:
            observed = await self._observe(key, resource, memory, now)
            plans, fault = plan(self._components, resource, observed, self._context)
            if creates_something(plans, observed) and await self._api.is_ending(key.namespace):
                return None
            for own in self._components:
                if not (own.is_for_others and (fault or applier.problems or applier.failure)):
                    await applier.carry_out(plans[own.name], observed[own.name])
            failure = fault or applier.failure
            observed = await self._probe(observed, memory)
        except Exception as error:
            failure = error
        statuses: list[Status] = []
        try:
            statuses = [own.status(observed[own.name], plans[own.name]) for own in self._components if plans]
        except Exception as error:  # a fault of ours, which is reported like any other
            failure = error
        problems = [*applier.problems, *_problems_of(failure, memory)]
        status = derive_status(resource, now, statuses, plans, problems)
        await self._post(key, resource, applier.events, now)
        is_news = await self._report(key, resource, status, now)
        await self._post(key, resource, chain.from_iterable(own.events for own in statuses), now)
        memory.num_failures = 0 if failure is None else memory.num_failures + 1
        if failure is not None:
            raise failure
        if is_at_rest(status, statuses, plans):
            due = min((own.due_seconds for own in plans.values()), default=math.inf)
            return min(_RESYNC_SECONDS * random.uniform(0.9, 1.1), due + 1)
        return memory.seconds_to_next_try(is_news or applier.num_resized > 0)

    async def _observe(
        self, key: ClusterKey, resource: Object, memory: _Memory, now: datetime
    ) -> dict[str, Observed]:
        contested = memory.contests.contested(self._monotonic())
        found = await asyncio.gather(
            *(observe(self._api, own, resource, contested, now) for own in self._components)
        )
        observed = {own.name: one for own, one in zip(self._components, found, strict=True)}
        report = self._autoscaler.report(key, observed) if self._autoscaler else None
        return {name: replace(one, autoscaling=report) for name, one in observed.items()}

    async def _probe(self, observed: dict[str, Observed], memory: _Memory) -> dict[str, Observed]:
        probed = await memory.prober.probe([pod for own in observed.values() for pod in own.pods])
        return {name: replace(own, probed=probed) for name, own in observed.items()}

    async def _report(self, key: ClusterKey, resource: Object, status: Object, now: datetime) -> bool:
        """Write the status if it is news; whether more has changed than figures."""
        before = resource.get("status") or {}
        changed = news(before, status)
        measure(key, status)
        if status != before:
            metadata = {"name": key.name, "namespace": key.namespace, "uid": key.uid}
            header = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata}
            try:
                await self._api.apply_status({**header, "status": status})
            except RefusedError as error:  # conditions are told also where the definition is an older one
                logger.warning(
                    "%s: is the LMCacheCluster definition older than this operator? %s", key, error
                )
                kept = {field: status[field] for field in _ALWAYS_KNOWN if field in status}
                await self._api.apply_status({**header, "status": kept})
            metrics.WRITES.labels("status").inc()
        await self._post(key, resource, events(before, changed), now)
        return bool(changed)

    async def _post(self, key: ClusterKey, resource: Object, events: Iterable[Event], now: datetime) -> None:
        for event in events:
            level = logging.WARNING if event.type == "Warning" else logging.INFO
            logger.log(level, "%s: %s: %s", key, event.reason, event.message)
            try:
                await self._api.post_event(resource, *event, now)
            except ApiError as error:
                logger.warning("an Event was not taken: %s", error)


def _problems_of(failure: Exception | None, memory: _Memory) -> list[Problem]:
    """What the status says of a failure: nothing of one that may be gone the next time."""
    if isinstance(failure, RefusedError):
        return [Problem("Refused", str(failure))]
    if failure is None or not memory.num_failures:
        return []
    if isinstance(failure, ApiError):
        return [Problem("ApiError", str(failure))]
    return [internal_error(failure)]
