"""Reconciles a cluster: observe, plan, apply, probe, status. Each run starts from the API server's state."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Protocol

from lmcache_operator import metrics
from lmcache_operator.api import API_VERSION, HEARTBEAT, KIND
from lmcache_operator.components.registry import COMPONENTS
from lmcache_operator.contract.base import Component, ComponentStatus, Context, Observed, Plan
from lmcache_operator.contract.conditions import Event, Problem
from lmcache_operator.errors import ApiError, RefusedError
from lmcache_operator.kube import refused_reads
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.policy.report import Report
from lmcache_operator.reconcile.absent import AbsentChildren
from lmcache_operator.reconcile.apply import Applier
from lmcache_operator.reconcile.contest import ContestLog
from lmcache_operator.reconcile.measures import measure, unmeasure
from lmcache_operator.reconcile.observe import LargestNodes, observe
from lmcache_operator.reconcile.plan import creates_something, internal_error, plan
from lmcache_operator.reconcile.probe import ReadStats, SidecarProber
from lmcache_operator.reconcile.references import References
from lmcache_operator.reconcile.status import changed_conditions, derive_status, events, is_settled
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import CLUSTER, ClusterKey
from lmcache_operator.specs.merge import dig
from lmcache_operator.specs.names import HEARTBEAT_MANAGER
from lmcache_store.common.backoff import Backoff

logger = logging.getLogger(__name__)

_RESYNC_SECONDS = 900.0
"""Time between reconciliations of a cluster without any change."""
_HEARTBEAT_SECONDS = 60.0
"""Longest time between two heartbeats of an idle cluster."""
_ALWAYS_KNOWN = ("conditions", "observedGeneration", "readyReplicas", "replicas", "selector")
"""Fields of the status in every version of the LMCacheCluster definition."""
_GET_CLUSTER = f"get {CLUSTER.plural}"
_UNDECLARED = re.compile(r"\.status\.(\w+)\S*: field not declared in schema")
"""Field of the status that the API server refuses, as its message names it."""
_WAIT = Backoff(base=5.0, cap=60.0)
"""Back-off for changes that no watch reports, such as a freed disruption budget or a granted permission."""


@dataclass
class _Memory:
    """State of a cluster between reconciliations. Nothing breaks if it is lost."""

    prober: SidecarProber
    contests: ContestLog = field(default_factory=ContestLog)
    """Fields that another client keeps changing back."""
    absent: AbsentChildren = field(default_factory=AbsentChildren)
    """Children that need no read, because they do not exist and the spec does not ask for them."""
    confirmed: float = -math.inf
    """Time of the answer to the latest heartbeat."""
    num_failures: int = 0
    """Consecutive reconciliations that failed."""
    num_waits: int = 0
    """Consecutive reconciliations that changed nothing although the cluster did not match its spec."""

    def seconds_to_next_try(self, has_changed: bool) -> float:
        """Delay after a reconciliation that left the cluster unsettled. It grows while nothing changes."""
        self.num_waits = 0 if has_changed else self.num_waits + 1
        return _WAIT.seconds(self.num_waits + 1)


class Autoscaler(Protocol):
    """Sizes the tiers of clusters, and wakes a cluster after a decision. No call blocks or raises."""

    def report(self, key: ClusterKey, observed: Mapping[str, Observed]) -> Report | None:
        """Give the autoscaler the observed state of a cluster, and return its latest report on the cluster.

        ``observed``: the spec, the pods and, from the component ``autoscaling``, the autoscaler's own state,
        which was persisted before a restart of the operator.
        """

    def forget(self, key: ClusterKey) -> None:
        """Drop the state of a cluster that is deleted or terminating."""


class Reconciler:
    """Brings clusters to the state that their specs declare."""

    def __init__(
        self,
        api: KubeApi,
        context: Context,
        read_stats: Callable[[str, str], Awaitable[Any]],
        *,
        token_of: Callable[[str], str] = lambda _: "",
        components: Sequence[Component] = COMPONENTS,
        autoscaler: Autoscaler | None = None,
        wake: Callable[[ClusterKey], None] = lambda _: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            read_stats: reads /stats of the sidecar at an IP address, with the token for a cluster's uid.
            token_of: the operator's token for the sidecars of the cluster with this uid; empty: none.
            wake: schedules a reconciliation: of another cluster, which a change of this one affects, or of a
                cluster whose change was overlooked.
        """
        self._api = api
        self._context = context
        self._read_stats, self._token_of = read_stats, token_of
        self._components = components
        self._autoscaler = autoscaler
        self._monotonic = monotonic
        self._memories: dict[ClusterKey, _Memory] = {}
        self._wake = wake
        self._references = References()
        self._nodes = LargestNodes(api, monotonic)

    async def reconcile(self, key: ClusterKey) -> float | None:
        """Observe a cluster once and carry out the steps that are due.

        Returns:
            Seconds until the next reconciliation if nothing changes; None if the cluster or its namespace is
            deleted or terminating. The garbage collector then deletes the children.

        Raises:
            Exception: the failure of this run, after the status reported it. The queue retries later.
        """
        with metrics.RECONCILE_SECONDS.time(), metrics.RECONCILE_FAILURES.count_exceptions():
            try:
                resource = await self._api.get(CLUSTER, key.namespace, key.name)
            except RefusedError as error:
                refused_reads.refuse(key.namespace, _GET_CLUSTER, error.message)
                self._memories.pop(key, None)  # an operator that reads nothing confirms nothing
                return _WAIT.cap
            refused_reads.allow(key.namespace, _GET_CLUSTER)
            if resource is None or resource["metadata"]["uid"] != key.uid:
                self._forget(key)
                self._wake_affected(key, None)
                if resource is None:
                    unmeasure(key)
                return None
            if "deletionTimestamp" in resource["metadata"]:
                self._forget(key)
                return None
            self._wake_affected(key, resource)
            (resource.get("status") or {}).pop(HEARTBEAT, None)  # `rest` writes it, with a manager of its own
            fresh = _Memory(SidecarProber(self._read_stats_of(key), self._monotonic))
            return await self._reconcile(key, resource, self._memories.setdefault(key, fresh))

    async def rest(self, key: ClusterKey) -> None:
        """Confirm the status of a cluster once a minute, until the caller cancels this for the next run.

        Thus readers see that an operator works. The answer reveals a change whose event was lost.
        """
        while memory := self._memories.get(key):
            due = memory.confirmed + _HEARTBEAT_SECONDS * random.uniform(0.8, 1.0)
            await asyncio.sleep(max(0.0, due - self._monotonic()))
            status = {HEARTBEAT: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
            try:
                live = await self._api.apply_status(_header(key) | {"status": status}, HEARTBEAT_MANAGER)
            except ApiError as error:
                memory.confirmed = self._monotonic()  # the next try is due in a minute
                logger.info("%s: no heartbeat: %s", key, error)
                continue
            # Only after the answer: the next run may cancel the write, and then it is due at once.
            memory.confirmed = self._monotonic()
            if live is None or live["metadata"].get("generation") != live["status"].get("observedGeneration"):
                self._wake(key)

    def _read_stats_of(self, key: ClusterKey) -> ReadStats:
        return lambda address: self._read_stats(address, key.uid)

    def _wake_affected(self, key: ClusterKey, resource: Object | None) -> None:
        """Wake the clusters that a change of this one affects. ``resource``: None if it was deleted."""
        referred = {each.referred(resource) for each in self._components} if resource else set[str]()
        # Lists of peers have the pods of another cluster once it has some.
        has_pods = bool(dig(resource, "status", "replicas"))
        version = (resource["metadata"].get("generation", 0), has_pods) if resource else None
        for other in self._references.note(key, referred, version):
            self._wake(other)

    def _forget(self, key: ClusterKey) -> None:
        self._memories.pop(key, None)
        if self._autoscaler:
            self._autoscaler.forget(key)

    async def _reconcile(self, key: ClusterKey, resource: Object, memory: _Memory) -> float | None:
        now, observed, plans = datetime.now(UTC), dict[str, Observed](), dict[str, Plan]()
        read_stats, token = self._read_stats_of(key), self._token_of(key.uid)
        applier = Applier(self._api, key, memory.contests, self._monotonic(), read_stats, token)
        failure: Exception | None = None
        try:
            observed = await self._observe(key, resource, memory, now)
            plans, fault = plan(self._components, resource, observed, self._context)
            if creates_something(plans, observed) and await self._api.is_ending(key.namespace):
                return None
            for component in self._components:
                # After a problem, do not apply objects that change users' own pods.
                if not (component.changes_foreign_pods and (fault or applier.problems or applier.failure)):
                    await applier.carry_out(plans[component.name], observed[component.name])
            failure = fault or applier.failure
            observed = await self._probe(observed, memory)
        except Exception as error:
            failure = error
        statuses: list[ComponentStatus] = []
        try:
            statuses = [c.status(observed[c.name], plans[c.name]) for c in self._components if plans]
        except Exception as error:  # an internal error, which is reported like any other failure
            failure = error
        problems = [*applier.problems, *_problems_of(failure, memory)]
        status = derive_status(resource, now, statuses, plans, problems, applier.doubts)
        await self._post(key, resource, applier.events, now)
        has_changed = await self._report(key, resource, status, now)
        await self._post(key, resource, chain.from_iterable(part.events for part in statuses), now)
        memory.num_failures = 0 if failure is None else memory.num_failures + 1
        if failure is not None:
            memory.absent.forget()
            raise failure
        memory.absent.note(self._components, observed, plans)
        if is_settled(status, statuses, plans):
            due = min((each.due_seconds for each in plans.values()), default=math.inf)
            return min(_RESYNC_SECONDS * random.uniform(0.9, 1.1), due + 1)
        return memory.seconds_to_next_try(has_changed or applier.num_resized > 0)

    async def _observe(
        self, key: ClusterKey, resource: Object, memory: _Memory, now: datetime
    ) -> dict[str, Observed]:
        contested = memory.contests.contested(self._monotonic())
        absent = memory.absent.known(resource, self._monotonic())
        parts = await asyncio.gather(
            *(observe(self._api, each, resource, contested, absent, now) for each in self._components)
        )
        observed = {each.name: part for each, part in zip(self._components, parts, strict=True)}
        report = self._autoscaler.report(key, observed) if self._autoscaler else None
        largest = await self._nodes.amounts(parts)
        return {name: replace(part, autoscaling=report, largest=largest) for name, part in observed.items()}

    async def _probe(self, observed: dict[str, Observed], memory: _Memory) -> dict[str, Observed]:
        probed = await memory.prober.probe([pod for part in observed.values() for pod in part.pods])
        return {name: replace(part, probed=probed) for name, part in observed.items()}

    async def _report(self, key: ClusterKey, resource: Object, status: Object, now: datetime) -> bool:
        """Write the status if it changed. Returns whether a condition's status or reason changed."""
        before = resource.get("status") or {}
        changed = changed_conditions(before, status)
        measure(key, status)
        if status != before:
            header = _header(key)
            try:
                await self._api.apply_status(header | {"status": status})
            except RefusedError as error:
                logger.warning(
                    "%s: status refused; is the LMCacheCluster CRD older than this operator? %s", key, error
                )
                await self._report_known(header, status, error)
            metrics.WRITES.labels("status").inc()
        await self._post(key, resource, events(before, changed), now)
        return bool(changed)

    async def _report_known(self, header: Object, status: Object, refusal: RefusedError) -> None:
        """Write the status without the fields that an older definition lacks, or its oldest fields only."""
        unknown = _UNDECLARED.findall(str(refusal))
        try:
            known = {
                field: status[field] for field in status if field in _ALWAYS_KNOWN or field not in unknown
            }
            await self._api.apply_status({**header, "status": known})
        except RefusedError:
            oldest = {field: status[field] for field in status if field in _ALWAYS_KNOWN}
            await self._api.apply_status({**header, "status": oldest})

    async def _post(self, key: ClusterKey, resource: Object, events: Iterable[Event], now: datetime) -> None:
        for event in events:
            level = logging.WARNING if event.type == "Warning" else logging.INFO
            logger.log(level, "%s: %s: %s", key, event.reason, event.message)
            try:
                await self._api.post_event(resource, *event, now)
            except ApiError as error:
                logger.warning("%s: could not post an Event: %s", key, error)


def _header(key: ClusterKey) -> Object:
    metadata = {"name": key.name, "namespace": key.namespace, "uid": key.uid}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata}


def _problems_of(failure: Exception | None, memory: _Memory) -> list[Problem]:
    """Problems that report a failure. A first failure that a retry may resolve is not reported."""
    if isinstance(failure, RefusedError):
        return [Problem("Refused", str(failure))]
    if failure is None or not memory.num_failures:
        return []
    if isinstance(failure, ApiError):
        return [Problem("ApiError", str(failure))]
    return [internal_error(failure)]
