"""Apply: carries out the planned steps in order, and records those that failed."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from secrets import token_urlsafe

from lmcache_operator import metrics
from lmcache_operator.contract.base import Observed, Plan, Resize
from lmcache_operator.contract.conditions import Event, Problem
from lmcache_operator.errors import QUOTA, ApiError, NoAnswerError, RefusedError
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.pods.differences import halted, is_unused_by_pods, rendering
from lmcache_operator.pods.resize import refuse
from lmcache_operator.reconcile.contest import ContestLog
from lmcache_operator.reconcile.probe import ReadStats, read_sidecar
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import BY_NAME, POD, ClusterKey, Ref, ref_of
from lmcache_operator.specs.names import PAGES, SIDECAR, secret_name
from lmcache_operator.specs.ownership import spell

logger = logging.getLogger(__name__)

_NOUNS = {
    "make": "creation of ", "apply": "", "delete": "deletion of ", "evict": "eviction of ",
    "resize": "resize of ",
}  # fmt: skip
_CANNOT_RESIZE = "its sidecar image does not support resizing: replace the pod with a later image"


@dataclass
class Applier:
    """Carries out the plans of one reconciliation of one cluster, and collects the outcome."""

    api: KubeApi
    key: ClusterKey
    contests: ContestLog
    time: float
    read_stats: ReadStats
    token: str = ""
    """Token that the operator itself sends to the cluster's sidecars; empty: it has none."""
    problems: list[Problem] = field(default_factory=list)
    """Permanent failures: calls that the API server refused."""
    doubts: list[Problem] = field(default_factory=list)
    """Creations of Secrets that a full quota refused. It refuses even a Secret that exists."""
    failure: ApiError | None = None
    """First failure that a retry may resolve."""
    events: list[Event] = field(default_factory=list)
    """Events about completed steps."""
    num_resized: int = 0
    """Number of completed resize steps."""

    async def carry_out(self, plan: Plan, observed: Observed) -> None:
        """Carry out one component's plan, up to the first refused object that its pods would use.

        Raises:
            NoAnswerError: the API server is unreachable, so further steps would fail, too.
        """
        for wanted in plan.make:
            await self._attempt("make", ref_of(wanted), self._make(wanted))
        for wanted in plan.apply:
            ref = ref_of(wanted)
            live = observed.children.get(ref)
            uid = None if live is None else live["metadata"]["uid"]
            if await self._attempt("apply", ref, self.api.apply(wanted, uid)):
                self._note_repair(plan, ref, is_new=uid is None)
                self.contests.note_write(ref, rendering(wanted), self.time, is_repair=bool(plan.lost[ref]))
            elif not is_unused_by_pods(ref, self.key.name):
                # No pod of another engine waits for a StatefulSet that cannot be created.
                is_new_set = uid is None and ref.kind == "StatefulSet"
                plan = replace(halted(plan), evict=plan.evict if is_new_set else ())
                break
        for ref in plan.delete:
            uid = observed.children[ref]["metadata"]["uid"]
            call = self.api.delete(BY_NAME[ref.kind], self.key.namespace, ref.name, uid)
            await self._attempt("delete", ref, call)
        for pod in plan.abandon:
            name, node = pod["metadata"]["name"], pod["spec"]["nodeName"]
            call = self.api.delete(POD, self.key.namespace, name, pod["metadata"]["uid"], grace_seconds=0)
            if await self._attempt("delete", Ref("pod", name), call):
                message = f"deleted pod {name} by force, because its node {node} is lost"
                self.events.append(Event("Warning", "NodeLost", message))
        for pod in plan.evict:
            ref, uid = Ref("pod", pod["metadata"]["name"]), pod["metadata"]["uid"]
            # The others of an engine over several nodes end with the first pod. If they were only evicted, a
            # budget would keep them among the endpoints, and they would answer new requests with nothing.
            evict = partial(self.api.delete, POD) if pod is not plan.evict[0] else self.api.evict
            if not await self._attempt("evict", ref, evict(self.key.namespace, ref.name, uid)):
                break
            message = f"evicted pod {ref.name}, because it does not match the spec"
            self.events.append(Event("Normal", "Replacing", message))

        await self._resize_pods(plan, observed.now)

    async def _resize_pods(self, plan: Plan, now: datetime) -> None:
        num_starts = plan.num_starts
        for step in plan.resize:
            if step.is_start and not num_starts:
                continue
            ref = Ref("pod", step.pod["metadata"]["name"])
            if await self._attempt("resize", ref, self._resize_if_present(step, now)):
                self.num_resized += 1
                num_starts -= step.is_start

    async def _resize_if_present(self, step: Resize, now: datetime) -> bool:
        """Carry out a resize step. A refusal because the pod was deleted meanwhile counts as False."""
        try:
            return await self._resize(step, now)
        except RefusedError:
            selector = f"metadata.name={step.pod['metadata']['name']}"
            pods = await self.api.find(POD, self.key.namespace, fieldSelector=selector)
            if any(pod["metadata"]["uid"] == step.pod["metadata"]["uid"] for pod in pods):
                raise
            return False

    async def _resize(self, step: Resize, now: datetime) -> bool:
        """Carry out a resize step; False if the sidecar does not meet the step's precondition yet.

        A refusal is recorded on the pod, so that later steps take the resize back.
        """
        try:
            if step.sidecar_bytes is not None:
                stats = await self.read_stats(step.pod["status"]["podIP"])
                if not isinstance(stats, dict):
                    return False
                sidecar = read_sidecar(stats)
                if sidecar.memory_bytes is None:
                    raise RefusedError("resize", _CANNOT_RESIZE)
                if max(sidecar.memory_bytes, sidecar.memory_target) > step.sidecar_bytes:
                    return False
            if step.memory is not None:
                await self.api.resize(step.pod, SIDECAR, step.memory)
        except RefusedError as error:
            step = refuse(step.pod, step.num_bytes, error.message, now)
        if step.annotations is not None:
            await self.api.annotate(step.pod, step.annotations)
        return True

    async def _make(self, secret: Object) -> bool:
        """Create a Secret with a random password; False if it exists, since its password works as well."""
        data = {"password": token_urlsafe(32)}
        if secret["metadata"]["name"] == secret_name(self.key.name, PAGES, self.key.uid):
            data = {"token": data["password"]} | ({"operator": self.token} if self.token else {})
        return await self.api.create(BY_NAME[secret["kind"]], secret | {"stringData": data}) is not None

    async def _attempt(self, verb: str, ref: Ref, call: Awaitable[bool | None]) -> bool:
        """Await one call and record its failure. Returns whether it changed something; None counts as yes."""
        try:
            is_done = await call is not False
        except NoAnswerError:
            raise
        except RefusedError as error:
            # A full quota refuses even a Secret that exists.
            problems = self.doubts if verb == "make" and QUOTA in error.message else self.problems
            problems.append(Problem("Refused", f"{_NOUNS[verb]}{ref}: {error.message}"))
            return False
        except ApiError as error:
            self.failure = self.failure or error
            return False
        if is_done:
            metrics.WRITES.labels(verb).inc()
            if verb != "evict":  # an Event reports evictions
                logger.info("%s: %s %s", self.key, verb, ref)
        return is_done

    def _note_repair(self, plan: Plan, ref: Ref, *, is_new: bool) -> None:
        for path in plan.lost[ref]:
            if not is_new:
                what = spell(path) or "all fields"
                logger.info("%s: restored %s of %s, changed by another client", self.key, what, ref)
            self.contests.note_repair(ref, path, self.time)
