"""Apply: carries out what is due, in order, whatever fails, and keeps what came of it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from dataclasses import dataclass, field
from datetime import datetime
from secrets import token_urlsafe

from lmcache_operator import metrics
from lmcache_operator.components.base import Event, Observed, Plan, Problem, Resize
from lmcache_operator.components.differences import rendering
from lmcache_operator.components.resize import refuse
from lmcache_operator.errors import ApiError, NoAnswerError, RefusedError
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.reconcile.contest import ContestLog
from lmcache_operator.reconcile.probe import ReadStats, read_sidecar
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import BY_NAME, POD, ClusterKey, Ref, ref_of
from lmcache_operator.specs.names import SIDECAR
from lmcache_operator.specs.ownership import spell

logger = logging.getLogger(__name__)

_NOUNS = {
    "make": "making ", "apply": "", "delete": "deletion of ", "evict": "eviction of ", "resize": "resize of "
}  # fmt: skip
_FOLLOWS_NONE = "its sidecar's image is from before sizes could change: replace the pod with a later image"


@dataclass
class Applier:
    """Carries out the plans of one reconciliation of one cluster."""

    api: KubeApi
    key: ClusterKey
    contests: ContestLog
    time: float
    read_stats: ReadStats
    problems: list[Problem] = field(default_factory=list)
    """What was refused for good."""
    failure: ApiError | None = None
    """The first failure that may go away."""
    events: list[Event] = field(default_factory=list)
    """Of what was done."""
    num_resized: int = 0
    """Steps of running pods towards another size."""

    async def carry_out(self, plan: Plan, observed: Observed) -> None:
        """One component's plan. Raises only NoAnswerError, since what comes next would fare no better."""
        for wanted in plan.make:
            await self._attempt("make", ref_of(wanted), self._make(wanted))
        for wanted in plan.apply:
            ref = ref_of(wanted)
            live = observed.children.get(ref)
            uid = None if live is None else live["metadata"]["uid"]
            if await self._attempt("apply", ref, self.api.apply(wanted, uid)):
                self._note_repair(plan, ref, is_new=uid is None)
                self.contests.note_write(ref, rendering(wanted), self.time, is_repair=bool(plan.lost[ref]))
        for ref in plan.delete:
            uid = observed.children[ref]["metadata"]["uid"]
            call = self.api.delete(BY_NAME[ref.kind], self.key.namespace, ref.name, uid)
            await self._attempt("delete", ref, call)
        for pod in plan.abandon:
            name, node = pod["metadata"]["name"], pod["spec"]["nodeName"]
            call = self.api.delete(POD, self.key.namespace, name, pod["metadata"]["uid"], grace_seconds=0)
            if await self._attempt("delete", Ref("pod", name), call):
                message = f"deleted pod {name} by force: its node {node} is gone"
                self.events.append(Event("Warning", "NodeLost", message))
        for pod in plan.evict:
            ref = Ref("pod", pod["metadata"]["name"])
            call = self.api.evict(self.key.namespace, ref.name, pod["metadata"]["uid"])
            if await self._attempt("evict", ref, call):
                message = f"evicted pod {ref.name}: it is not as declared"
                self.events.append(Event("Normal", "Replacing", message))

        await self._resize_some(plan, observed.now)

    async def _resize_some(self, plan: Plan, now: datetime) -> None:
        num_starts = plan.num_starts
        for step in plan.resize:
            if step.is_start and not num_starts:
                continue
            if await self._attempt(
                "resize", Ref("pod", step.pod["metadata"]["name"]), self._unless_gone(step, now)
            ):
                self.num_resized += 1
                num_starts -= step.is_start

    async def _unless_gone(self, step: Resize, now: datetime) -> bool:
        """Of a pod that somebody deleted meanwhile anything is refused."""
        try:
            return await self._resize(step, now)
        except RefusedError:
            selector = f"metadata.name={step.pod['metadata']['name']}"
            pods = await self.api.find(POD, self.key.namespace, fieldSelector=selector)
            if any(pod["metadata"]["uid"] == step.pod["metadata"]["uid"] for pod in pods):
                raise
            return False

    async def _resize(self, step: Resize, now: datetime) -> bool:
        """False: its sidecar is not that far. What is refused is noted on the pod, and taken back then."""
        try:
            if step.sidecar_bytes is not None:
                stats = await self.read_stats(step.pod["status"]["podIP"])
                if not isinstance(stats, dict):
                    return False
                sidecar = read_sidecar(stats)
                if sidecar.memory_bytes is None:
                    raise RefusedError("resize", _FOLLOWS_NONE)
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
        """False: there is one, with a password that works as well."""
        password = {"password": token_urlsafe(32)}
        return await self.api.create(BY_NAME[secret["kind"]], secret | {"stringData": password}) is not None

    async def _attempt(self, verb: str, ref: Ref, call: Awaitable[bool | None]) -> bool:
        """Whether it was done: None counts as done."""
        try:
            is_done = await call is not False
        except NoAnswerError:
            raise
        except RefusedError as error:
            self.problems.append(Problem("Refused", f"{_NOUNS[verb]}{ref}: {error.message}"))
            return False
        except ApiError as error:
            self.failure = self.failure or error
            return False
        if is_done:
            metrics.WRITES.labels(verb).inc()
            if verb != "evict":  # told by an Event
                logger.info("%s: %s %s", self.key, verb, ref)
        return is_done

    def _note_repair(self, plan: Plan, ref: Ref, *, is_new: bool) -> None:
        for path in plan.lost[ref]:
            if not is_new:
                what = spell(path) or "all"
                logger.info("%s: %s of %s was changed; repaired it", self.key, what, ref)
            self.contests.note_repair(ref, path, self.time)
