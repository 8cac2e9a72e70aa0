"""A component's pods: why they are not there or not ready, and which of them to replace. Pure.

The reasons are in the words of who knows them: scheduler, kubelet, controllers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta

from lmcache_operator.components.base import Observed, Problem
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import controller_uid
from lmcache_operator.specs.names import SPEC_HASH, annotations_of

_STUCK = frozenset({
    "CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError", "ErrImageNeverPull",
    "ErrImagePull", "ImageInspectError", "ImagePullBackOff", "InvalidImageName", "RunContainerError",
})  # fmt: skip
"""What a container waits for that does not come by waiting."""
_DEADLINE = timedelta(minutes=65)
"""For a pod to become ready: the hour that an engine is given to load its model, and what comes before it."""
_RECENT = timedelta(minutes=20)
"""Events older than that say nothing about now; what goes on is reported again."""


def is_ready(pod: Object) -> bool:
    """Whether a pod serves and is not on its way out."""
    conditions = pod.get("status", {}).get("conditions") or []
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


def is_outdated(pod: Object, template: Object) -> bool:
    """Whether the user declared something else than this template says when the pod was made."""
    return annotations_of(pod).get(SPEC_HASH) != annotations_of(template).get(SPEC_HASH)


def next_eviction(owner: Object | None, pods: Sequence[Object], template: Object) -> tuple[Object, ...]:
    """The one pod to replace now, if any.

    One at a time: nothing is evicted while a pod is missing, ending, or new and not ready yet. So a
    declaration that can't run stops after one pod, and the others go on serving. Outdated pods that serve
    nothing go first.
    """
    outdated = [pod for pod in pods if is_outdated(pod, template)]
    if not outdated or owner is None:
        return ()
    # Until the new template is there, and its controller has seen it, the old pod would be made again.
    seen = owner.get("status", {}).get("observedGeneration", 0)
    is_unseen = seen < owner["metadata"].get("generation", 0)
    is_moving = any(
        "deletionTimestamp" in pod["metadata"] or not (is_ready(pod) or pod in outdated) for pod in pods
    )
    is_missing = len(pods) < owner["spec"]["replicas"]
    if is_unseen or is_missing or is_moving or is_outdated(owner["spec"]["template"], template):
        return ()
    return (min(outdated, key=lambda pod: (is_ready(pod), pod["metadata"]["name"])),)


def incomplete_sets(observed: Observed) -> Iterator[tuple[Object, list[Object]]]:
    """StatefulSets that have fewer pods than they should, each with those that it has."""
    for ref, owner in observed.children.items():
        pods = [pod for pod in observed.pods if controller_uid(pod) == owner["metadata"]["uid"]]
        if ref.kind == "StatefulSet" and len(pods) < owner["spec"].get("replicas", 0):
            yield owner, pods


def pod_problems(observed: Observed) -> Iterable[Problem]:
    """One for each reason: the first pod that has it stands for all."""
    found: dict[str, Problem] = {}
    for problem in (*_missing(observed), *(p for pod in observed.pods for p in _unready(observed, pod))):
        found.setdefault(problem.reason, problem)
    return found.values()


def _missing(observed: Observed) -> Iterator[Problem]:
    """Why pods that should exist could not be made."""
    for owner, pods in incomplete_sets(observed):
        made = [_time(pod["metadata"].get("creationTimestamp"), observed) for pod in pods]
        for event in _warnings(observed, owner):
            # A pod that was made since shows that it is over.
            is_over = bool(made) and _last_seen(event, observed) < max(made)
            if event.get("reason") == "FailedCreate" and not is_over:
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
