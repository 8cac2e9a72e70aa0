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
    num_pods, num_ready = len(observed.pods), sum(map(is_ready, observed.pods))
    desired = (observed.resource.get("spec", {}).get("engine") or {}).get("replicas", 1)
    count = f"{num_ready} of {desired} engine pods are ready"
    progressing: _Verdict = False, "Complete", f"all {desired} engine pods are as declared"
    if plan.num_outdated:
        progressing = True, "Replacing", f"{plan.num_outdated} of {num_pods} engine pods are to be replaced"
    elif num_pods != desired:
        progressing = True, "Scaling", f"{num_pods} of {desired} engine pods exist"
    elif num_ready != desired:
        progressing = True, "Starting", count
    ready: _Verdict = True, "Ready", count
    degraded: _Verdict = False, "AsDeclared", "nothing stands in the way of the declared state"
    if problems:
        ready = False, *problems[0]
        degraded = True, problems[0].reason, "; ".join(problem.message for problem in problems)
    elif progressing[0]:
        ready = False, *progressing[1:]
    verdicts = {
        "Degraded": degraded,
        "EngineAvailable": _engine_available(desired, num_ready, count),
        "Progressing": progressing,
        "Ready": ready,
    }
    return {
        "conditions": _conditions(observed, verdicts, now),
        "observedGeneration": observed.resource["metadata"].get("generation", 0),
        "readyReplicas": num_ready,
        "replicas": num_pods,
        "selector": ",".join(f"{key}={value}" for key, value in selector(observed.name).items()),
    }


def _engine_available(desired: int, num_ready: int, count: str) -> _Verdict:
    if num_ready:
        return True, "EnginesReady", count
    if desired == 0:
        return False, "ScaledToZero", "no engine pods are asked for"
    return False, "NoEngineReady", f"none of {desired} engine pods is ready"


def _conditions(observed: Observed, verdicts: dict[str, _Verdict], now: datetime) -> list[dict[str, Any]]:
    before = {c["type"]: c for c in (observed.resource.get("status") or {}).get("conditions") or []}
    generation = observed.resource["metadata"].get("generation", 0)
    conditions = []
    for kind, (is_true, reason, message) in verdicts.items():
        found: Object = {"type": kind, "status": str(is_true), "reason": reason, "message": message}
        last = before.get(kind, {})
        is_flip = last.get("status") != found["status"]
        found["lastTransitionTime"] = (
            now.strftime("%Y-%m-%dT%H:%M:%SZ") if is_flip else last["lastTransitionTime"]
        )
        conditions.append({**found, "observedGeneration": generation})
    return conditions
