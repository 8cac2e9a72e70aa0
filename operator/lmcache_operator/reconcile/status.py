"""Status: that of a cluster, merged from those of its components. Pure.

A condition's time changes only when its status flips.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import get_args

from lmcache_operator.components.base import (
    Condition,
    Event,
    Plan,
    Problem,
    Status,
    former_conditions,
)
from lmcache_operator.components.reasons import Trouble
from lmcache_operator.specs import Object

_MAX_MESSAGE = 4096
_SUMMED_UP = ("Degraded", "Progressing", "Ready")
_INVALID = "InvalidSpec"


def derive_status(
    resource: Object,
    now: datetime,
    statuses: Sequence[Status],
    plans: Mapping[str, Plan],
    failures: Sequence[Problem],
) -> Object:
    """The whole status, from those of the components; without them as it was, and why it is not known.

    ``failures`` came up while the plans were carried out, or before there were any.
    """
    if not statuses:
        return _unobserved(resource, now, failures)
    planned = chain.from_iterable(plan.problems for plan in plans.values())
    problems = list(dict.fromkeys((*planned, *failures)))
    # Who is on the way leads, then who has not arrived and says why.
    progressing = min(
        (_progressing(*found) for found in zip(statuses, plans.values(), strict=True)),
        key=lambda p: (p.status != "True", p.reason == "Complete", not p.message),
    )
    ready = Condition("True", "Ready", "; ".join(status.summary for status in statuses if status.summary))
    if problems:
        ready = Condition("False", *problems[0])
    elif progressing.status == "True" and progressing.reason != "Resizing":  # all serve meanwhile
        ready = Condition("False", progressing.reason, progressing.message)
    degrading = chain.from_iterable(status.degraded for status in statuses)
    conditions = {"Degraded": _degraded([*problems, *degrading]), "Progressing": progressing, "Ready": ready}
    fields: Object = {"observedGeneration": resource["metadata"].get("generation", 0)}
    for status in statuses:
        conditions |= status.conditions
        fields |= status.fields
    return {"conditions": _conditions(resource, now, conditions), **fields}


def is_at_rest(status: Object, statuses: Sequence[Status], plans: Mapping[str, Plan]) -> bool:
    """Whether there is nothing to wait for that the watches don't report."""
    found = {c["type"]: c for c in status["conditions"]}
    if found["Progressing"]["reason"] == _INVALID:
        others = (problem for plan in plans.values() for problem in plan.problems)
        is_moving = any(own.degraded or own.progressing.status == "True" for own in statuses)
        return not (is_moving or any(problem.reason != _INVALID for problem in others))
    return "True" not in (found["Degraded"]["status"], found["Progressing"]["status"])


def news(before: Object, after: Object) -> list[Object]:
    """The conditions that say something else than before; not those of which only the figures changed."""
    old = {c["type"]: (c["status"], c["reason"]) for c in before.get("conditions") or ()}
    return [c for c in after.get("conditions") or () if old.get(c["type"]) != (c["status"], c["reason"])]


def events(before: Object, changed: Sequence[Object]) -> Iterator[Event]:
    """Those that report changed conditions: one for each reason, first those that sum up the others."""
    old = {condition["type"]: condition["status"] for condition in before.get("conditions") or ()}
    found = {condition["type"]: condition for condition in changed}
    if not old and found.get("Degraded", {}).get("status") == "False":
        del found["Degraded"]  # new, and nothing has stood in its way yet
    # Of a part it is news that it fails, and that it does no longer.
    parts = [kind for kind, said in found.items() if "False" in (old.get(kind), said["status"])]
    told: dict[str, str] = {}
    for kind in (*_SUMMED_UP, *parts):
        if kind in found and kind != "EngineAvailable":  # which says what Ready and Progressing say
            told.setdefault(found[kind]["reason"], found[kind]["message"])
    for reason, message in told.items():
        yield Event("Warning" if reason in get_args(Trouble) else "Normal", reason, message)


def _progressing(status: Status, plan: Plan) -> Condition:
    """What a component says; nothing is on the way where it is not known what is due."""
    for problem in plan.problems:
        if problem.reason in (_INVALID, "InternalError"):
            return Condition("False", problem.reason, "the pods stay as they were declared before")
    return status.progressing


def _unobserved(resource: Object, now: datetime, failures: Sequence[Problem]) -> Object:
    before: Object = resource.get("status") or {}
    if not failures:
        return before
    found = former_conditions(resource) | {
        "Degraded": _degraded(failures),
        "Ready": Condition("Unknown", *failures[0]),
    }
    return before | {"conditions": _conditions(resource, now, found)}


def _degraded(problems: Sequence[Problem]) -> Condition:
    if not problems:
        return Condition("False", "AsDeclared", "nothing stands in the way of the declared state")
    return Condition("True", problems[0].reason, "; ".join(problem.message for problem in problems))


def _conditions(resource: Object, now: datetime, found: Mapping[str, Condition]) -> list[Object]:
    before = {c["type"]: c for c in (resource.get("status") or {}).get("conditions") or []}
    generation, conditions = resource["metadata"].get("generation", 0), []
    # In the order in which they came up, so that nothing is written for another order alone.
    for kind in sorted(found, key=lambda kind: [*before, *found].index(kind)):
        status, reason, message, of_generation = found[kind]
        last = before.get(kind, {})
        is_flip = last.get("status") != status
        time = now.strftime("%Y-%m-%dT%H:%M:%SZ") if is_flip else last["lastTransitionTime"]
        said: Object = {"type": kind, "status": status, "reason": reason, "message": message[:_MAX_MESSAGE]}
        said["observedGeneration"] = generation if of_generation is None else of_generation
        conditions.append(said | {"lastTransitionTime": time})
    return conditions
