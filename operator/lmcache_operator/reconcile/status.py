"""What is told to the user. Pure; a condition's time changes only when its status flips."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from lmcache_operator.reconcile.observed import Observed, Sidecar, is_ready
from lmcache_operator.reconcile.plan import Plan
from lmcache_operator.reconcile.problems import Problem
from lmcache_operator.specs import Object
from lmcache_operator.specs.names import selector

_TRUE, _FALSE, _UNKNOWN = "True", "False", "Unknown"
_MAX_MESSAGE = 4096
_DEADLINE = "ProgressDeadlineExceeded"
_ATTACHED, _REACHABLE = "SidecarAttached", "RemoteTierReachable"
_OF_SIDECARS = (_ATTACHED, _REACHABLE)


class _Verdict(NamedTuple):
    status: str
    reason: str
    message: str


def derive_status(observed: Observed, plan: Plan, failures: Sequence[Problem]) -> Object:
    """The whole status.

    ``failures`` came up while the plan was carried out.
    """
    problems = [*plan.problems, *failures]
    num_pods, num_ready = len(observed.pods), sum(map(is_ready, observed.pods))
    desired = (observed.resource.get("spec", {}).get("engine") or {}).get("replicas", 1)
    count = f"{num_ready} of {desired} engine pods are ready"
    if plan.num_former_size:
        count += f"; {_former_size(plan)}"
    progressing = _progressing(plan, [problem.reason for problem in problems], num_pods, desired, num_ready)
    ready = _Verdict(_TRUE, "Ready", count)
    if problems:
        ready = _Verdict(_FALSE, *problems[0])
    elif progressing.status == _TRUE:
        ready = _Verdict(_FALSE, progressing.reason, progressing.message)
    of_sidecars = _of_sidecars(observed)
    # Engines serve without their cache: it makes nothing unready.
    degrading = [Problem(v.reason, v.message) for v in of_sidecars.values() if v.status == _FALSE]
    verdicts = {
        "Degraded": _degraded([*problems, *degrading]),
        "EngineAvailable": _engine_available(desired, num_ready, count),
        "Progressing": progressing,
        "Ready": ready,
        **of_sidecars,
    }
    return {
        "conditions": _conditions(observed, verdicts),
        "observedGeneration": observed.resource["metadata"].get("generation", 0),
        "readyReplicas": num_ready,
        "replicas": num_pods,
        "selector": ",".join(f"{key}={value}" for key, value in selector(observed.name).items()),
    }


def unobserved_status(observed: Observed, failures: Sequence[Problem]) -> Object:
    """The status when the cluster could not be looked at: as before, and why it is not known to be so."""
    before: Object = observed.resource.get("status") or {}
    verdicts = _former(observed) | {
        "Degraded": _degraded(failures),
        "Ready": _Verdict(_UNKNOWN, *failures[0]),
    }
    return before | {"conditions": _conditions(observed, verdicts)}


def is_to_be_watched(status: Object) -> bool:
    """Whether something is not as it should be that only asking again tells the end of."""
    return any(c["type"] in _OF_SIDECARS and c["status"] == _FALSE for c in status["conditions"])


def is_flip(before: Object, after: Object) -> bool:
    """Whether more has changed than messages and figures."""

    def verdicts(status: Object) -> list[tuple[str, str, str]]:
        return [(c["type"], c["status"], c["reason"]) for c in status.get("conditions") or ()]

    return verdicts(before) != verdicts(after)


def news(before: Object, after: Object) -> Iterator[tuple[str, str, str]]:
    """Type, reason and message of the Events that tell what changed from one status to the next."""
    old = {found["type"]: found for found in before.get("conditions") or ()}
    for found in after["conditions"]:
        last = old.get(found["type"], {})
        is_new = (last.get("status"), last.get("reason")) != (found["status"], found["reason"])
        if is_new and found["type"] == "Degraded" and found["status"] == _TRUE:
            yield "Warning", found["reason"], found["message"]
        if is_new and found["type"] == "Ready" and found["status"] == _TRUE:
            yield "Normal", found["reason"], found["message"]


def _progressing(plan: Plan, reasons: list[str], num_pods: int, desired: int, num_ready: int) -> _Verdict:
    if "InvalidSpec" in reasons:
        return _Verdict(_FALSE, "InvalidSpec", "the pods stay as they were declared before")
    if _DEADLINE in reasons:
        return _Verdict(
            _FALSE, _DEADLINE, f"{num_ready} of {desired} engine pods are ready, and no more get ready"
        )
    if plan.num_outdated:
        message = f"{plan.num_outdated} of {num_pods} engine pods are to be replaced"
        return _Verdict(_TRUE, "Replacing", message)
    if num_pods != desired:
        return _Verdict(_TRUE, "Scaling", f"{num_pods} of {desired} engine pods exist")
    if num_ready != desired:
        return _Verdict(_TRUE, "Starting", f"{num_ready} of {desired} engine pods are ready")
    if plan.num_former_size:
        return _Verdict(_FALSE, "ResizePending", _former_size(plan))
    return _Verdict(_FALSE, "Complete", f"all {desired} engine pods are as declared")


def _former_size(plan: Plan) -> str:
    mend = "replaced pods get the new one; a changed annotation in spec.engine.podTemplate replaces all"
    return f"{plan.num_former_size} still have the former size of the memory tier: {mend}"


def _former(observed: Observed) -> dict[str, _Verdict]:
    """What was told before, by the conditions' types."""
    return {
        found["type"]: _Verdict(found["status"], found["reason"], found["message"])
        for found in (observed.resource.get("status") or {}).get("conditions") or ()
    }


def _of_sidecars(observed: Observed) -> dict[str, _Verdict]:
    former = {kind: verdict for kind, verdict in _former(observed).items() if kind in _OF_SIDECARS}
    if observed.heard is None:
        return former
    sidecars, is_certain = observed.heard
    verdicts = {_ATTACHED: _attached(sidecars)}
    was_known = _ATTACHED in former and former[_ATTACHED].status != _UNKNOWN
    if verdicts[_ATTACHED].status == _UNKNOWN and was_known and not is_certain:
        return former
    with_remote = [sidecar for sidecar in sidecars if sidecar.is_remote_reachable is not None]
    if lost := [sidecar for sidecar in with_remote if not sidecar.is_remote_reachable]:
        message = f"{len(lost)} of {len(sidecars)} sidecars get no answer from it: pod {lost[0].pod}"
        verdicts[_REACHABLE] = _Verdict(_FALSE, "RemoteTierUnreachable", message)
    elif with_remote:
        verdicts[_REACHABLE] = _Verdict(_TRUE, "Reachable", "no sidecar misses an answer from it")
    return verdicts


def _attached(sidecars: Sequence[Sidecar]) -> _Verdict:
    """The first sidecar of which something is to be told stands for all of these."""

    def count(some: Sequence[Sidecar]) -> str:
        return f"{len(some)} of {len(sidecars)}"

    if failed := [sidecar for sidecar in sidecars if sidecar.reason]:
        why = f"pod {failed[0].pod}: {failed[0].reason}"
        return _Verdict(_FALSE, "SidecarNotReady", f"{count(failed)} sidecars are not ready: {why}")
    if silent := [sidecar for sidecar in sidecars if not sidecar.answers]:
        why = f"pod {silent[0].pod}; the operator must reach the pods' metrics port"
        return _Verdict(_UNKNOWN, "NoAnswer", f"{count(silent)} sidecars don't answer: {why}")
    attached = [sidecar for sidecar in sidecars if sidecar.is_attached]
    if bare := [s for s in sidecars if s.is_engine_ready and not s.is_attached]:
        why = f"the log of the engine in pod {bare[0].pod} says why"
        return _Verdict(
            _FALSE, "EngineNotAttached", f"{count(bare)} engines serve without their cache: {why}"
        )
    if not attached:
        return _Verdict(_UNKNOWN, "NoEngine", "no engine runs yet")
    return _Verdict(_TRUE, "Attached", f"{count(attached)} engines use their sidecars")


def _degraded(problems: Sequence[Problem]) -> _Verdict:
    if not problems:
        return _Verdict(_FALSE, "AsDeclared", "nothing stands in the way of the declared state")
    return _Verdict(_TRUE, problems[0].reason, "; ".join(problem.message for problem in problems))


def _engine_available(desired: int, num_ready: int, count: str) -> _Verdict:
    if num_ready:
        return _Verdict(_TRUE, "EnginesReady", count)
    if desired == 0:
        return _Verdict(_FALSE, "ScaledToZero", "no engine pods are asked for")
    return _Verdict(_FALSE, "NoEngineReady", f"none of {desired} engine pods is ready")


def _conditions(observed: Observed, verdicts: dict[str, _Verdict]) -> list[dict[str, Any]]:
    before = {c["type"]: c for c in (observed.resource.get("status") or {}).get("conditions") or []}
    generation = observed.resource["metadata"].get("generation", 0)
    conditions = []
    for kind, (status, reason, message) in verdicts.items():
        last = before.get(kind, {})
        is_flip = last.get("status") != status
        time = _timestamp(observed.now) if is_flip else last["lastTransitionTime"]
        found: Object = {"type": kind, "status": status, "reason": reason, "message": message[:_MAX_MESSAGE]}
        conditions.append({**found, "lastTransitionTime": time, "observedGeneration": generation})
    return conditions


def _timestamp(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")
