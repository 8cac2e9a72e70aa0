"""One look at one cluster: observe, plan, apply, report. Every look starts from what the API server says."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import NamedTuple

from lmcache_operator import metrics
from lmcache_operator.api import API_VERSION, KIND
from lmcache_operator.errors import ApiError, NoAnswerError, RefusedError
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.reconcile.contest import ContestLog
from lmcache_operator.reconcile.observed import Observed, is_ready
from lmcache_operator.reconcile.ownership import spell
from lmcache_operator.reconcile.plan import Plan, plan
from lmcache_operator.reconcile.problems import Problem
from lmcache_operator.reconcile.sidecars import Ask, Hearing
from lmcache_operator.reconcile.status import (
    derive_status,
    is_flip,
    is_to_be_watched,
    news,
    unobserved_status,
)
from lmcache_operator.specs import Images, Object
from lmcache_operator.specs.kinds import BY_NAME, CLUSTER, Ref, controller_uid, ref_of
from lmcache_operator.specs.names import child_refs, engine_name, selector

logger = logging.getLogger(__name__)

_RESYNC_SECONDS = 600.0
"""Every cluster is looked at this often even when nothing was reported about it."""
_FIRST_WAIT_SECONDS, _MAX_WAIT_SECONDS = 5.0, 60.0
"""Until the next look at what nobody reports: why a pod is not ready, a budget that frees up, a refusal."""


class ClusterKey(NamedTuple):
    """One life of an LMCacheCluster: another one of the same name has another uid."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass
class _Memory:
    """What is remembered of a cluster between looks; nothing breaks when it is lost."""

    hearing: Hearing
    contests: ContestLog = field(default_factory=ContestLog)
    num_failures: int = 0
    """Looks that failed one after the other."""
    num_waits: int = 0
    """Looks one after the other that changed nothing while something was not as it should be."""


class Reconciler:
    """Brings clusters to their declared state."""

    def __init__(
        self,
        api: KubeApi,
        images: Images,
        ask: Ask,
        *,
        operator_namespace: str = "",
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._images = images
        self._ask = ask
        self._operator_namespace = operator_namespace
        self._monotonic = monotonic
        self._memories: dict[str, _Memory] = {}

    async def reconcile(self, key: ClusterKey) -> float | None:
        """Look at a cluster once and do what is due.

        Returns the seconds after which to look again even if nothing happens; None when the cluster, or its
        namespace, is gone or going: its children are the garbage collector's.

        Raises what went wrong after it was reported, so that the cluster is looked at again after a back-off.
        """
        with metrics.RECONCILE_SECONDS.time(), metrics.RECONCILE_FAILURES.count_exceptions():
            resource = await self._api.get(CLUSTER, key.namespace, key.name)
            if resource is None or resource["metadata"]["uid"] != key.uid:
                self._memories.pop(key.uid, None)
                return None
            if "deletionTimestamp" in resource["metadata"]:
                return None
            if key.uid not in self._memories:
                self._memories[key.uid] = _Memory(Hearing(self._ask, self._monotonic))
            return await self._look(key, resource, self._memories[key.uid])

    async def _look(self, key: ClusterKey, resource: Object, memory: _Memory) -> float | None:
        observed, due = Observed(resource=resource, now=datetime.now(UTC)), None
        problems: list[Problem] = []
        failure: Exception | None = None
        try:
            observed = await self._observe(key, observed, memory)
            if len(observed.children) < len(child_refs(key.name)) and await self._api.is_ending(
                key.namespace
            ):
                return None
            due = plan(observed, self._images, self._operator_namespace)
            failure = await self._carry_out(key, observed, due, memory, problems)
            observed = replace(observed, heard=await memory.hearing.listen(observed.pods))
        except Exception as error:
            failure = error
        if failure is not None and (problem := _told(failure, memory)):
            problems.append(problem)
        status = _status(observed, due, problems)
        is_news = await self._report(key, observed, status)
        if failure is not None:
            memory.num_failures += 1
            raise failure
        memory.num_failures = 0
        if problems or due is None or not _is_at_rest(observed, due) or is_to_be_watched(status):
            memory.num_waits = 0 if is_news else memory.num_waits + 1
            return min(_FIRST_WAIT_SECONDS * 2.0 ** min(memory.num_waits, 10), _MAX_WAIT_SECONDS)
        return _RESYNC_SECONDS * random.uniform(0.9, 1.1)

    async def _observe(self, key: ClusterKey, observed: Observed, memory: _Memory) -> Observed:
        refs = child_refs(key.name)
        found, pods = await asyncio.gather(
            asyncio.gather(*(self._api.get(BY_NAME[r.kind], key.namespace, r.name) for r in refs)),
            self._api.list_pods(key.namespace, selector(key.name)),
        )
        live = {ref: child for ref, child in zip(refs, found, strict=True) if child is not None}
        own = {ref: child for ref, child in live.items() if controller_uid(child) == key.uid}
        owner = own.get(Ref("StatefulSet", engine_name(key.name)))
        observed = replace(
            observed,
            children=own,
            taken=frozenset(live.keys() - own.keys()),
            pods=tuple(pod for pod in pods if owner and controller_uid(pod) == owner["metadata"]["uid"]),
            contested=memory.contests.contested(self._monotonic()),
        )
        # Asked only while something is missing; one pod that is not ready stands for all.
        unready = next((pod for pod in observed.pods if not is_ready(pod)), None)
        is_missing = owner is not None and len(observed.pods) < owner["spec"].get("replicas", 0)
        about = [found for found in (owner if is_missing else None, unready) if found is not None]
        warnings = [
            event
            for one in about
            for event in await self._api.list_warnings(key.namespace, one["metadata"]["uid"])
        ]
        return replace(observed, warnings=tuple(warnings))

    async def _carry_out(
        self, key: ClusterKey, observed: Observed, due: Plan, memory: _Memory, problems: list[Problem]
    ) -> ApiError | None:
        """Do what is due, in order, whatever fails: what is refused for good is added to ``problems``.

        Returns the first failure that may go away.
        """
        failure: ApiError | None = None
        for wanted in due.apply:
            ref = ref_of(wanted)
            live = observed.children.get(ref)
            try:
                await self._api.apply(wanted, None if live is None else live["metadata"]["uid"])
            except NoAnswerError:
                raise
            except RefusedError as error:
                problems.append(Problem("Refused", f"{ref}: {error.message}"))
            except ApiError as error:
                failure = failure or error
            else:
                _wrote(key, "apply", ref)
                self._note_healing(key, due, ref, live is None, memory)
        if due.evict is not None:
            await self._evict(key, observed, due.evict, problems)
        return failure

    async def _evict(self, key: ClusterKey, observed: Observed, name: str, problems: list[Problem]) -> None:
        uid = next(p["metadata"]["uid"] for p in observed.pods if p["metadata"]["name"] == name)
        try:
            is_evicted = await self._api.evict(key.namespace, name, uid)
        except RefusedError as error:
            problems.append(Problem("Refused", f"eviction of pod {name}: {error.message}"))
            return
        if is_evicted:
            _wrote(key, "evict", Ref("Pod", name))
            await self._tell(observed, "Normal", "Replacing", f"evicted pod {name}: it is not as declared")

    def _note_healing(self, key: ClusterKey, due: Plan, ref: Ref, is_new: bool, memory: _Memory) -> None:
        for path in due.lost[ref]:
            if not is_new:
                logger.info("%s: %s of %s was changed; healed it", key, spell(path) or "all", ref)
            memory.contests.note_healing(ref, path, self._monotonic())

    async def _report(self, key: ClusterKey, observed: Observed, status: Object) -> bool:
        """Write the status if it is news; whether it is more than other figures."""
        before = observed.resource.get("status") or {}
        if status == before:
            return False
        metadata = {"name": key.name, "namespace": key.namespace, "uid": key.uid}
        header = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata}
        await self._api.apply_status({**header, "status": status})
        metrics.WRITES.labels("status").inc()
        for told in news(before, status):
            await self._tell(observed, *told)
        return is_flip(before, status)

    async def _tell(self, observed: Observed, kind: str, reason: str, message: str) -> None:
        try:
            await self._api.post_event(observed.resource, kind, reason, message, observed.now)
        except ApiError as error:
            logger.warning("an Event was not taken: %s", error)


def _status(observed: Observed, due: Plan | None, problems: list[Problem]) -> Object:
    if due is not None:
        return derive_status(observed, due, problems)
    return unobserved_status(observed, problems) if problems else observed.resource.get("status") or {}


def _told(failure: Exception, memory: _Memory) -> Problem | None:
    """What the user is told of a failure: nothing of one that may be gone at the next look."""
    if isinstance(failure, RefusedError):
        return Problem("Refused", str(failure))
    if not memory.num_failures:
        return None
    if isinstance(failure, ApiError):
        return Problem("ApiError", str(failure))
    return Problem("InternalError", f"a fault of the operator, see its log: {failure!r}")


def _is_at_rest(observed: Observed, due: Plan) -> bool:
    """Whether there is nothing to wait for that the watches don't report."""
    if any(problem.reason == "InvalidSpec" for problem in due.problems):
        return True
    owner = observed.stateful_set
    is_complete = owner is not None and len(observed.pods) == owner["spec"].get("replicas")
    return is_complete and not (due.problems or due.num_outdated) and all(map(is_ready, observed.pods))


def _wrote(key: ClusterKey, what: str, ref: Ref) -> None:
    metrics.WRITES.labels(what).inc()
    logger.info("%s: %s %s", key, what, ref)
