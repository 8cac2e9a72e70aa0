"""One look at one cluster: observe, plan, apply, report. Every look starts from what the API server says."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple

from .. import metrics
from ..api.parse import InvalidSpec, parse
from ..kube.client import KubeApi
from ..kube.errors import Refused
from ..settings import Settings
from ..specs import Object
from ..specs.kinds import BY_NAME, CHILDREN, CLUSTER, POD, Ref, controller_uid, ref_of
from ..specs.merge import first_difference
from ..specs.names import CLUSTER_LABEL, selector
from .contest import ContestLog
from .observed import Observed, rendered_hash_of
from .plan import Plan, Problem, plan, referenced_secrets
from .status import derive_status

logger = logging.getLogger(__name__)

_MISSING_SECRET_SECONDS = 3.0
_PROGRESS_SECONDS = 15.0
_REFUSED_SECONDS = 30.0


class ClusterKey(NamedTuple):
    """One life of an LMCacheCluster: another one of the same name has another uid."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Reconciler:
    """Brings clusters to their declared state. Between looks it remembers only who contests which child."""

    def __init__(
        self,
        api: KubeApi,
        settings: Settings,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._settings = settings
        self._now = now
        self._monotonic = monotonic
        self._contests: dict[str, ContestLog] = {}

    async def reconcile(self, key: ClusterKey) -> float | None:
        """Look at a cluster once and do what is due.

        Returns the seconds after which to look again even if nothing happens; None when the cluster is gone
        or going: its children are the garbage collector's.
        """
        with metrics.RECONCILE_SECONDS.time(), metrics.RECONCILE_FAILURES.count_exceptions():
            resource = await self._api.get(CLUSTER, key.namespace, key.name)
            if resource is None or resource["metadata"]["uid"] != key.uid:
                self._contests.pop(key.uid, None)
                return None
            if "deletionTimestamp" in resource["metadata"]:
                return None
            observed = await self._observe(key, resource)
            due = plan(observed, self._settings.render)
            if unknown := [rendered for rendered in due.apply if ref_of(rendered) not in observed.children]:
                # Before something is made for the first time: is the name free?
                observed = await self._look_up(key, observed, unknown)
                due = plan(observed, self._settings.render)
            refusals = await self._carry_out(key, observed, due)
            await self._report(key, observed, due, refusals)
        return self._next_look(observed, due, refusals)

    async def _observe(self, key: ClusterKey, resource: Object) -> Observed:
        labels = {CLUSTER_LABEL: key.name}
        lists, pods, missing = await asyncio.gather(
            asyncio.gather(*(self._api.list(kind, key.namespace, labels) for kind in CHILDREN)),
            self._api.list(POD, key.namespace, selector(key.name)),
            self._missing_secrets(key, resource),
        )
        own = {ref_of(live): live for found in lists for live in found if controller_uid(live) == key.uid}
        contests = self._contests.setdefault(key.uid, ContestLog())
        contested = contests.contested(self._monotonic())
        observed = Observed(resource=resource, children=own, missing_secrets=missing, contested=contested)
        owner = observed.stateful_set
        uid = owner["metadata"]["uid"] if owner else None
        return replace(observed, pods=tuple(pod for pod in pods if uid and controller_uid(pod) == uid))

    async def _missing_secrets(self, key: ClusterKey, resource: Object) -> tuple[str, ...]:
        try:
            names = referenced_secrets(parse(resource))
        except InvalidSpec:
            return ()
        exist = await asyncio.gather(*(self._api.secret_exists(key.namespace, name) for name in names))
        return tuple(name for name, found in zip(names, exist, strict=True) if not found)

    async def _look_up(self, key: ClusterKey, observed: Observed, unknown: list[Object]) -> Observed:
        """Find the objects of these names that our labels did not find."""
        refs = [ref_of(rendered) for rendered in unknown]
        found = await asyncio.gather(*(self._api.get(BY_NAME[r.kind], key.namespace, r.name) for r in refs))
        live = {ref: child for ref, child in zip(refs, found, strict=True) if child is not None}
        own = {ref: child for ref, child in live.items() if controller_uid(child) == key.uid}
        children = {**observed.children, **own}
        return replace(observed, children=children, taken=frozenset(live.keys() - own.keys()))

    async def _carry_out(self, key: ClusterKey, observed: Observed, due: Plan) -> list[Problem]:
        """Do what is due, in order. What the API server refuses for good becomes a problem."""
        refusals = []
        for wanted in due.apply:
            ref = ref_of(wanted)
            self._note_healing(key, wanted, observed.children.get(ref))
            try:
                await self._api.apply(wanted)
            except Refused as error:
                refusals.append(Problem("Refused", f"{ref}: {error.message}"))
                continue
            _wrote(key, "apply", ref)
        for ref in due.delete:
            await self._api.delete(ref, key.namespace, observed.children[ref]["metadata"]["uid"])
            _wrote(key, "delete", ref)
        if due.evict is not None:
            uid = next(p["metadata"]["uid"] for p in observed.pods if p["metadata"]["name"] == due.evict)
            if await self._api.evict(key.namespace, due.evict, uid):
                _wrote(key, "evict", Ref("Pod", due.evict))
        return refusals

    def _note_healing(self, key: ClusterKey, wanted: Object, live: Object | None) -> None:
        """Record a field that was not as we had applied it; a change of ours is none."""
        if live is None or rendered_hash_of(live) != rendered_hash_of(wanted):
            return
        where = first_difference(wanted, live) or ""
        logger.info("%s: %s of %s was changed; healing it", key, where, ref_of(wanted))
        self._contests[key.uid].note_healing(ref_of(wanted), where, self._monotonic())

    async def _report(self, key: ClusterKey, observed: Observed, due: Plan, refusals: list[Problem]) -> None:
        status = derive_status(observed, due, refusals, self._now())
        if status == observed.resource.get("status"):
            return
        metadata = {"name": key.name, "namespace": key.namespace, "uid": key.uid}
        header = {"apiVersion": CLUSTER.api_version, "kind": CLUSTER.kind}
        await self._api.apply_status({**header, "metadata": metadata, "status": status})
        metrics.WRITES.labels("status").inc()

    def _next_look(self, observed: Observed, due: Plan, refusals: list[Problem]) -> float:
        seconds = self._settings.resync_seconds * random.uniform(0.9, 1.1)
        if due.num_outdated:
            # Events wake us when pods become ready; this is for a disruption budget that frees up.
            seconds = min(seconds, _PROGRESS_SECONDS)
        if refusals or observed.taken:
            seconds = min(seconds, _REFUSED_SECONDS)
        if observed.missing_secrets:
            seconds = min(seconds, _MISSING_SECRET_SECONDS)
        return seconds


def _wrote(key: ClusterKey, what: str, ref: Ref) -> None:
    metrics.WRITES.labels(what).inc()
    logger.info("%s: %s %s", key, what, ref)
