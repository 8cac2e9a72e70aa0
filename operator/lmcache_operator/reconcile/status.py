"""What is told to the user. Pure; a condition's time changes only when its status flips."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from ..specs import Object
from ..specs.names import selector
from .observed import Observed, is_ready
from .plan import Plan, Problem

_Verdict = tuple[bool, str, str]
"""Status, reason and message of a condition."""


def derive_status(observed: Observed, plan: Plan, refusals: Sequence[Problem], now: datetime) -> Object:
    """The whole status.

    `refusals` are problems that came up while the plan was carried out.
    """
    problems = [*plan.problems, *refusals]
    num_ready = sum(map(is_ready, observed.pods))
    desired = (observed.resource.get("spec", {}).get("engine") or {}).get("replicas", 1)
    progressing = _progressing(observed, plan, desired, num_ready)
    verdicts = {
        "Degraded": _degraded(problems),
        "EngineAvailable": _engine_available(desired, num_ready),
        "Progressing": progressing,
        "Ready": _ready(problems, progressing, desired, num_ready),
    }
    status: Object = {
        "conditions": _conditions(observed, verdicts, now),
        "observedGeneration": observed.resource["metadata"].get("generation", 0),
        "readyReplicas": num_ready,
        "replicas": len(observed.pods),
        "selector": ",".join(f"{key}={value}" for key, value in selector(observed.name).items()),
    }
    if plan.transfer is not None:
        status["transfer"] = {"mode": plan.transfer.mode.value, "reason": plan.transfer.reason}
    return status


def _degraded(problems: Sequence[Problem]) -> _Verdict:
    if not problems:
        return False, "AsDeclared", "nothing stands in the way of the declared state"
    return True, problems[0].reason, "; ".join(problem.message for problem in problems)


def _engine_available(desired: int, num_ready: int) -> _Verdict:
    if num_ready:
        return True, "EnginesReady", f"{num_ready} of {desired} engine pods are ready"
    if desired == 0:
        return False, "ScaledToZero", "no engine pods are asked for"
    return False, "NoEngineReady", f"none of {desired} engine pods is ready"


def _progressing(observed: Observed, plan: Plan, desired: int, num_ready: int) -> _Verdict:
    if plan.num_outdated:
        message = f"{plan.num_outdated} of {len(observed.pods)} engine pods are to be replaced"
        return True, "Replacing", message
    if len(observed.pods) != desired:
        return True, "Scaling", f"{len(observed.pods)} of {desired} engine pods exist"
    if num_ready != desired:
        return True, "Starting", f"{num_ready} of {desired} engine pods are ready"
    return False, "Complete", f"all {desired} engine pods are as declared"


def _ready(problems: Sequence[Problem], progressing: _Verdict, desired: int, num_ready: int) -> _Verdict:
    if blocking := [problem for problem in problems if problem.is_blocking]:
        return False, blocking[0].reason, blocking[0].message
    is_progressing, reason, message = progressing
    if is_progressing:
        return False, reason, message
    return True, "Ready", f"{num_ready} of {desired} engine pods are ready"


def _conditions(observed: Observed, verdicts: dict[str, _Verdict], now: datetime) -> list[dict[str, Any]]:
    before = {c["type"]: c for c in (observed.resource.get("status") or {}).get("conditions") or []}
    generation = observed.resource["metadata"].get("generation", 0)
    present = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    conditions = []
    for kind, (is_true, reason, message) in verdicts.items():
        last, status = before.get(kind, {}), str(is_true)
        unchanged = last.get("status") == status
        found = {"type": kind, "status": status, "reason": reason, "message": message}
        found["lastTransitionTime"] = last["lastTransitionTime"] if unchanged else present
        conditions.append({**found, "observedGeneration": generation})
    return conditions
