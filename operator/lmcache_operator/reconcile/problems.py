"""Why pods are not there, or not ready, in the words of who knows: scheduler, kubelet, controllers. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from lmcache_operator.reconcile.observed import Observed, is_ready
from lmcache_operator.specs import Object

_STUCK = frozenset({
    "CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError", "ErrImageNeverPull",
    "ErrImagePull", "ImageInspectError", "ImagePullBackOff", "InvalidImageName", "RunContainerError",
})  # fmt: skip
"""What a container waits for that does not come by waiting."""
_DEADLINE = timedelta(minutes=65)
"""For a pod to become ready: the hour that an engine is given to load its model, and what comes before it."""
_RECENT = timedelta(minutes=20)
"""Events older than that say nothing about now; what goes on is reported again."""


class Problem(NamedTuple):
    """Something that stands in the way, and that the user, and nobody else, can mend."""

    reason: str
    message: str


def pod_problems(observed: Observed) -> Iterator[Problem]:
    """One for each reason: the first pod that has it stands for all."""
    told = set()
    for problem in (*_missing(observed), *(p for pod in observed.pods for p in _unready(observed, pod))):
        if problem.reason not in told:
            told.add(problem.reason)
            yield problem


def _missing(observed: Observed) -> Iterator[Problem]:
    """Why pods that should exist could not be made."""
    owner = observed.stateful_set
    if owner is None or len(observed.pods) >= owner["spec"].get("replicas", 0):
        return
    newest = max(
        (_time(pod["metadata"].get("creationTimestamp"), observed) for pod in observed.pods), default=None
    )
    for event in _warnings(observed, owner):
        # A pod that was made since shows that it is over.
        if event.get("reason") == "FailedCreate" and (
            newest is None or _last_seen(event, observed) >= newest
        ):
            yield Problem("FailedCreate", event.get("message", ""))


def _unready(observed: Observed, pod: Object) -> Iterator[Problem]:
    if is_ready(pod) or "deletionTimestamp" in pod["metadata"]:
        return
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            yield Problem("Unschedulable", f"pod {name}: {condition.get('message', '')}")
    containers = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    for container in containers:
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in _STUCK:
            where = f"pod {name}, container {container['name']}"
            yield Problem(waiting["reason"], f"{where}: {_why(waiting, container)}")
    # Everything is mounted before the first container starts: what was said of it before is over then.
    has_started = any(container.get("state", {}).keys() - {"waiting"} for container in containers)
    for event in () if has_started else _warnings(observed, pod):
        if event.get("reason") in ("FailedMount", "FailedAttachVolume"):
            yield Problem(event["reason"], f"pod {name}: {event.get('message', '')}")
    if observed.now - _time(pod["metadata"].get("creationTimestamp"), observed) > _DEADLINE:
        minutes = _DEADLINE // timedelta(minutes=1)
        yield Problem("ProgressDeadlineExceeded", f"pod {name} has not become ready in {minutes} minutes")


def _why(waiting: Object, container: Object) -> str:
    last = container.get("lastState", {}).get("terminated")
    ended = f"; it ended with {last.get('reason')}, exit code {last.get('exitCode')}" if last else ""
    return f"{waiting.get('message') or waiting['reason']}{ended}"


def _warnings(observed: Observed, about: Object) -> list[Object]:
    """Recent events about an object, the latest first."""
    found = [e for e in observed.warnings if e["involvedObject"].get("uid") == about["metadata"]["uid"]]
    recent = [event for event in found if observed.now - _last_seen(event, observed) < _RECENT]
    return sorted(recent, key=lambda event: _last_seen(event, observed), reverse=True)


def _last_seen(event: Object, observed: Observed) -> datetime:
    series = event.get("series") or {}
    return _time(
        series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime"), observed
    )


def _time(text: str | None, observed: Observed) -> datetime:
    try:
        return datetime.fromisoformat(text) if text else observed.now
    except ValueError:  # the year 0: anybody may post an Event, and the API server takes it
        return datetime.min.replace(tzinfo=UTC)
