"""One look at one cluster: observe, plan, apply, report. Every look starts from what the API server says."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

from .. import metrics
from ..api import API_VERSION, KIND
from ..kube.client import KubeApi
from ..kube.errors import Refused
from ..specs import Images, Object
from ..specs.kinds import BY_NAME, CLUSTER, Ref, controller_uid, ref_of
from ..specs.merge import first_difference
from ..specs.names import RENDERED_HASH, child_refs, engine_name, selector
from .contest import ContestLog
from .observed import Observed, annotations_of
from .plan import Plan, Problem, plan, referenced_secrets
from .status import derive_status

logger = logging.getLogger(__name__)

_RESYNC_SECONDS = 600.0
"""Every cluster is looked at this often even when nothing was reported about it."""
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

    def __init__(self, api: KubeApi, images: Images, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._images = images
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
            due = plan(observed, self._images)
            refusals = await self._carry_out(key, observed, due)
            await self._report(key, observed, due, refusals)
        return _next_look(observed, due, refusals)

    async def _observe(self, key: ClusterKey, resource: Object) -> Observed:
        refs, secrets = child_refs(key.name), referenced_secrets(resource)
        found, pods, exist = await asyncio.gather(
            asyncio.gather(*(self._api.get(BY_NAME[r.kind], key.namespace, r.name) for r in refs)),
            self._api.list_pods(key.namespace, selector(key.name)),
            asyncio.gather(*(self._api.secret_exists(key.namespace, name) for name in secrets)),
        )
        live = {ref: child for ref, child in zip(refs, found, strict=True) if child is not None}
        own = {ref: child for ref, child in live.items() if controller_uid(child) == key.uid}
        owner = own.get(Ref("StatefulSet", engine_name(key.name)))
        return Observed(
            resource=resource,
            children=own,
            taken=frozenset(live.keys() - own.keys()),
            pods=tuple(pod for pod in pods if owner and controller_uid(pod) == owner["metadata"]["uid"]),
            missing_secrets=tuple(name for name, exists in zip(secrets, exist, strict=True) if not exists),
            contested=self._contests.setdefault(key.uid, ContestLog()).contested(self._monotonic()),
        )

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
        if due.evict is not None:
            uid = next(p["metadata"]["uid"] for p in observed.pods if p["metadata"]["name"] == due.evict)
            if await self._api.evict(key.namespace, due.evict, uid):
                _wrote(key, "evict", Ref("Pod", due.evict))
        return refusals

    def _note_healing(self, key: ClusterKey, wanted: Object, live: Object | None) -> None:
        """Record a field that was not as we had applied it; a change of ours is none."""
        if live is None or annotations_of(live).get(RENDERED_HASH) != annotations_of(wanted)[RENDERED_HASH]:
            return
        where, ref = first_difference(wanted, live) or "", ref_of(wanted)
        logger.info("%s: %s of %s was changed; healing it", key, where, ref)
        self._contests[key.uid].note_healing(ref, where, self._monotonic())

    async def _report(self, key: ClusterKey, observed: Observed, due: Plan, refusals: list[Problem]) -> None:
        status = derive_status(observed, due, refusals, datetime.now(UTC))
        if status == observed.resource.get("status"):
            return
        metadata = {"name": key.name, "namespace": key.namespace, "uid": key.uid}
        header = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata}
        await self._api.apply_status({**header, "status": status})
        metrics.WRITES.labels("status").inc()


def _next_look(observed: Observed, due: Plan, refusals: list[Problem]) -> float:
    """Seconds until then."""
    if observed.missing_secrets:
        return _MISSING_SECRET_SECONDS
    if due.num_outdated:
        # Events wake us when pods become ready; this is for a disruption budget that frees up.
        return _PROGRESS_SECONDS
    if refusals or observed.taken:
        return _REFUSED_SECONDS
    return _RESYNC_SECONDS * random.uniform(0.9, 1.1)


def _wrote(key: ClusterKey, what: str, ref: Ref) -> None:
    metrics.WRITES.labels(what).inc()
    logger.info("%s: %s %s", key, what, ref)
