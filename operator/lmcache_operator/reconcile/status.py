"""Status: merges the components' statuses into the status of the cluster. Pure.

A condition's ``lastTransitionTime`` changes only with its status, as in all Kubernetes objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain

from lmcache_operator.contract.base import ComponentStatus, Plan
from lmcache_operator.contract.conditions import (
    TROUBLES,
    Condition,
    Event,
    Problem,
    Reason,
    former_conditions,
)
from lmcache_operator.specs import Object

_MAX_MESSAGE = 4096
_SUMMED_UP = ("Degraded", "Progressing", "Ready")
_INVALID = "InvalidSpec"


def derive_status(
    resource: Object,
    now: datetime,
    statuses: Sequence[ComponentStatus],
    plans: Mapping[str, Plan],
    failures: Sequence[Problem],
    doubts: Sequence[Problem] = (),
) -> Object:
    """The status of a cluster, merged from those of its components.

    ``failures``: problems that occurred while the plans were made or carried out. Without ``statuses`` the
    result is the former status with these failures. ``doubts``: those that never affect the condition Ready.
    """
    if not statuses:
        return _unobserved(resource, now, failures)
    planned = chain.from_iterable(plan.problems for plan in plans.values())
    problems = list(dict.fromkeys((*planned, *failures)))
    # A component in progress takes precedence, then one that is incomplete, then one that has a message.
    progressing = min(
        (_progressing(*pair) for pair in zip(statuses, plans.values(), strict=True)),
        key=lambda p: (p.status != "True", p.reason == "Complete", not p.message),
    )
    degrading = [*chain(*(status.degraded for status in statuses)), *doubts]
    ready = _ready(statuses, problems, progressing, degrading)
    conditions = {"Degraded": _degraded([*problems, *degrading]), "Progressing": progressing, "Ready": ready}
    fields: Object = {"observedGeneration": resource["metadata"].get("generation", 0)}
    for status in statuses:
        conditions |= status.conditions
        fields |= status.fields
    return {"conditions": _conditions(resource, now, conditions), **fields}


def is_settled(status: Object, statuses: Sequence[ComponentStatus], plans: Mapping[str, Plan]) -> bool:
    """Whether the cluster needs no reconciliation until a watch reports a change."""
    conditions = {c["type"]: c for c in status["conditions"]}
    if conditions["Progressing"]["reason"] == _INVALID:
        problems = (problem for plan in plans.values() for problem in plan.problems)
        is_moving = any(part.degraded or part.progressing.status == "True" for part in statuses)
        return not (is_moving or any(problem.reason != _INVALID for problem in problems))
    if any(part.awaits_sidecars for part in statuses):
        return False
    return "True" not in (conditions["Degraded"]["status"], conditions["Progressing"]["status"])


def changed_conditions(before: Object, after: Object) -> list[Object]:
    """Conditions whose status or reason changed. A change of the message alone does not count."""
    old = {c["type"]: (c["status"], c["reason"]) for c in before.get("conditions") or ()}
    return [c for c in after.get("conditions") or () if old.get(c["type"]) != (c["status"], c["reason"])]


def events(before: Object, changed: Sequence[Object]) -> Iterator[Event]:
    """Events that report changed conditions: one for each reason, the summary conditions first."""
    old = {condition["type"]: condition["status"] for condition in before.get("conditions") or ()}
    new = {condition["type"]: condition for condition in changed}
    if not old and new.get("Degraded", {}).get("status") == "False":
        del new["Degraded"]  # a new cluster without problems needs no Event about it
    # A component's own condition is worth an Event if it fails or recovers.
    parts = [kind for kind, condition in new.items() if "False" in (old.get(kind), condition["status"])]
    messages: dict[str, str] = {}
    for kind in (*_SUMMED_UP, *parts):
        # Other Events say why a cluster that serves is no longer complete.
        is_known = new.get(kind, {}).get("reason") == "Serving" and old.get(kind) == "True"
        if kind in new and not is_known and kind != "EngineAvailable":  # it repeats Ready and Progressing
            messages.setdefault(new[kind]["reason"], new[kind]["message"])
    for reason, message in messages.items():
        yield Event("Warning" if reason in TROUBLES else "Normal", reason, message)


def _ready(
    statuses: Sequence[ComponentStatus],
    problems: Sequence[Problem],
    progressing: Condition,
    degrading: Sequence[Problem],
) -> Condition:
    """Whether requests are served, as with the condition Available of a Deployment. See docs/adr/0057.

    Problems and progress make a cluster unready only if no pod serves. Other conditions have their messages.
    """
    served = [status.serves for status in statuses if status.serves is not None]
    message = "; ".join(status.summary for status in statuses if status.summary)
    # Pods serve during a resize.
    moves = progressing.status == "True" and progressing.reason != "Resizing"
    reasons: list[Reason] = [problem.reason for problem in problems]
    reasons += [progressing.reason] if moves else []
    if all(served) and not reasons:
        return Condition("True", "Ready", message)
    if served and all(served):
        return Condition("True", "Serving", message)
    reasons += [*(problem.reason for problem in degrading), "NoEngineReady"]
    return Condition("False", reasons[0], message)


def _progressing(status: ComponentStatus, plan: Plan) -> Condition:
    """A component's Progressing condition; False if the operator could not plan its steps."""
    for problem in plan.problems:
        if problem.reason in (_INVALID, "InternalError"):
            return Condition("False", problem.reason, "the pods keep their previous configuration")
    progressing = status.progressing
    if plan.crash and progressing.status == "True":
        return progressing._replace(message=f"{progressing.message}; {plan.crash}")
    return progressing


def _unobserved(resource: Object, now: datetime, failures: Sequence[Problem]) -> Object:
    before: Object = resource.get("status") or {}
    if not failures:
        return before
    conditions = former_conditions(resource) | {
        "Degraded": _degraded(failures),
        "Ready": Condition("Unknown", failures[0].reason, "the condition Degraded says what failed"),
    }
    return before | {"conditions": _conditions(resource, now, conditions)}


def _degraded(problems: Sequence[Problem]) -> Condition:
    if not problems:
        return Condition("False", "AsDeclared", "nothing prevents the declared state")
    *messages, last = (problem.message for problem in problems)
    message = "; ".join([*(each.removesuffix(".") for each in messages), last])
    return Condition("True", problems[0].reason, message)


def _conditions(resource: Object, now: datetime, wanted: Mapping[str, Condition]) -> list[Object]:
    before = {c["type"]: c for c in (resource.get("status") or {}).get("conditions") or []}
    generation, conditions = resource["metadata"].get("generation", 0), []
    # Conditions keep their order, so that a different order alone causes no write.
    for kind in sorted(wanted, key=lambda kind: [*before, *wanted].index(kind)):
        status, reason, message, of_generation = wanted[kind]
        last = before.get(kind, {})
        is_flip = last.get("status") != status
        time = now.strftime("%Y-%m-%dT%H:%M:%SZ") if is_flip else last["lastTransitionTime"]
        entry: Object = {"type": kind, "status": status, "reason": reason, "message": message[:_MAX_MESSAGE]}
        entry["observedGeneration"] = generation if of_generation is None else of_generation
        conditions.append(entry | {"lastTransitionTime": time})
    return conditions
