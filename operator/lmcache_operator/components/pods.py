"""A component's pods: why they are not there or not ready, and which of them to replace. Pure.

The reasons are in the words of who knows them: scheduler, kubelet, controllers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from lmcache_operator.components.base import Observed, Problem
from lmcache_operator.components.reasons import Trouble
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import controller_uid
from lmcache_operator.specs.names import SPEC_HASH, annotations_of

_STUCK: dict[str, Trouble] = {
    "CrashLoopBackOff": "CrashLoopBackOff",
    "CreateContainerConfigError": "CreateContainerConfigError",
    **dict.fromkeys(
        ("CreateContainerError", "PostStartHookError", "PreCreateHookError", "PreStartHookError",
         "RunContainerError"),
        "CreateContainerError",
    ),
    **dict.fromkeys(
        ("ErrImageNeverPull", "ErrImagePull", "ImageInspectError", "ImagePullBackOff", "InvalidImageName",
         "RegistryUnavailable", "SignatureValidationFailed"),
        "ImagePullBackOff",
    ),
}  # fmt: skip
"""What a container waits for that does not come by waiting, by the kubelet's words. It takes turns between
some of them, and that is no news."""
_OF_PODS = ("FailedAttachVolume", "FailedCreatePodSandBox", "FailedMount", "FailedPrepareDynamicResources")
_OF_CLAIMS = ("FailedBinding", "ProvisioningFailed")
_LOADING = timedelta(minutes=5)
"""For what comes before a pod's slowest startup probe begins."""
_UNPLACED = timedelta(minutes=10)
"""For a node to come that has the memory, as the cluster's autoscaler adds one."""
_RECENT = timedelta(minutes=20)
"""What was longer ago says nothing about now; what goes on is reported again."""
_MAX_LAST_LINES, _MAX_LAST_WORDS = 5, 600
_LONGEST_SECONDS = 10**9
"""As good as for ever; what a probe may say is more than a timedelta holds."""


def is_ready(pod: Object) -> bool:
    """Whether a pod serves and is not on its way out."""
    conditions = pod.get("status", {}).get("conditions") or []
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


def ready_since(pod: Object, observed: Observed) -> datetime:
    """Since when a pod is ready, as far as is known; one that is not: since now."""
    conditions = pod.get("status", {}).get("conditions") or []
    since = [c.get("lastTransitionTime") for c in conditions if c["type"] == "Ready"]
    if not is_ready(pod):
        return observed.now
    return _time(since[0], observed) if since[0] else datetime.min.replace(tzinfo=UTC)


def started_at(pod: Object, observed: Observed) -> datetime:
    """When a pod or one of its containers began, the last of them: what they hold in memory is no older.

    Readiness does not tell: it comes and goes with a network.
    """
    containers = pod.get("status", {}).get("containerStatuses") or []
    running = [container.get("state", {}).get("running") or {} for container in containers]
    told = [pod["metadata"].get("creationTimestamp"), *(state.get("startedAt") for state in running)]
    return max((_time(time, observed) for time in told if time), default=ready_since(pod, observed))


def is_outdated(pod: Object, template: Object) -> bool:
    """Whether the user declared something else than this template says when the pod was made."""
    return annotations_of(pod).get(SPEC_HASH) != annotations_of(template).get(SPEC_HASH)


def why_unplaced(pod: Object, observed: Observed) -> str:
    """The scheduler's message about a pod whose memory has fitted on no node for 10 minutes; else empty."""
    condition = _unplaced(pod)
    message, since = condition.get("message", ""), _time(condition.get("lastTransitionTime"), observed)
    # For any resource that its nodes lack the scheduler names that resource: "Insufficient memory".
    return plain(message) if "memory" in message and observed.now - since >= _UNPLACED else ""


def has_no_node(pod: Object) -> bool:
    """Whether the scheduler has found no node for a pod. Such a pod serves nothing."""
    return bool(_unplaced(pod)) and "deletionTimestamp" not in pod["metadata"]


def _unplaced(pod: Object) -> Object:
    """The condition that says so; empty: the pod has a node, or the scheduler has not seen it yet."""
    conditions = pod.get("status", {}).get("conditions") or ()
    found = (one for one in conditions if one["type"] == "PodScheduled" and one["status"] == "False")
    return next(found, {})


def next_eviction(
    owner: Object | None, pods: Sequence[Object], template: Object, too_large: Sequence[Object] = ()
) -> tuple[Object, ...]:
    """The one pod to replace now, if any.

    One at a time: nothing is evicted while a pod is missing, ending, or new and not ready yet. So a
    declaration that can't run stops after one pod, and the others go on serving. Outdated pods that serve
    nothing go first, then those that come first in ``pods``.

    Pods of ``too_large`` have no node and serve nothing. They wait for no other pod.
    """
    outdated = [pod for pod in pods if is_outdated(pod, template)]
    if owner is None or not (outdated or too_large):
        return ()
    # Until the new template is there, and its controller has seen it, the old pod would be made again.
    seen = owner.get("status", {}).get("observedGeneration", 0)
    is_unseen = seen < owner["metadata"].get("generation", 0)
    if is_unseen or is_outdated(owner["spec"]["template"], template):
        return ()
    if too_large:
        return (too_large[0],)
    is_moving = any(
        "deletionTimestamp" in pod["metadata"] or not (is_ready(pod) or pod in outdated) for pod in pods
    )
    is_missing = len(pods) < owner["spec"]["replicas"]
    return () if is_missing or is_moving else (min(outdated, key=is_ready),)


def incomplete_sets(observed: Observed) -> Iterator[tuple[Object, list[Object]]]:
    """StatefulSets that have fewer pods than they should, each with those that it has."""
    for ref, owner in observed.children.items():
        pods = [pod for pod in observed.pods if controller_uid(pod) == owner["metadata"]["uid"]]
        if ref.kind == "StatefulSet" and len(pods) < owner["spec"].get("replicas", 0):
            yield owner, pods


def pod_problems(observed: Observed) -> Iterable[Problem]:
    """One for each reason: the first pod that has it stands for all."""
    unready = (problem for pod in observed.pods for problem in _unready(observed, pod))
    missing = (Problem("FailedCreate", event.get("message", "")) for event in not_made(observed))
    return _first_of_each((*missing, *unready))


def kill_problems(observed: Observed) -> Iterable[Problem]:
    """Containers of pods that serve, killed for their memory a while ago: they may be so again."""
    found = ((pod, *one) for pod in observed.pods if is_ready(pod) for one in _ended(pod))
    return _first_of_each(
        Problem("OOMKilled", _history(pod, container, ended))
        for pod, container, ended in found
        if _is_oom(ended) and _is_recent(ended, observed)
    )


def has_started(pod: Object) -> bool:
    """Whether a container of it runs or ran. Everything is mounted before."""
    return any(container.get("state", {}).keys() - {"waiting"} for container in _containers(pod))


def claim_names(pod: Object) -> list[str]:
    """The claims of a pod that has not been placed on a node yet."""
    name, spec = pod["metadata"]["name"], pod["spec"]
    volumes = [] if spec.get("nodeName") else spec.get("volumes") or ()
    named = [(volume.get("persistentVolumeClaim") or {}).get("claimName") for volume in volumes]
    own = [f"{name}-{volume['name']}" for volume in volumes if "ephemeral" in volume]
    return [*filter(None, named), *own]


def plain(text: Any, most: int = 512) -> str:
    """One printable line of bounded length: what stands in front of the rest is kept."""
    cut = text[:most] if isinstance(text, str) else ""
    return " ".join("".join(c if c.isprintable() else " " for c in cut).split())


def _first_of_each(problems: Iterable[Problem]) -> Iterable[Problem]:
    found: dict[str, Problem] = {}
    for problem in problems:
        found.setdefault(problem.reason, problem)
    return found.values()


def not_made(observed: Observed, age: timedelta = timedelta.min) -> Iterator[Object]:
    """Events, of that age at least, that say why pods that should exist could not be made."""
    for owner, pods in incomplete_sets(observed):
        made = [_time(pod["metadata"].get("creationTimestamp"), observed) for pod in pods]
        for event in _warnings(observed, owner["metadata"]["uid"]):
            # A pod that was made since shows that it is over.
            is_over = bool(made) and _last_seen(event, observed) < max(made)
            since = _time(event.get("firstTimestamp") or event.get("eventTime"), observed)
            if event.get("reason") == "FailedCreate" and not is_over and observed.now - since >= age:
                yield event


def _unready(observed: Observed, pod: Object) -> Iterator[Problem]:
    if is_ready(pod) or "deletionTimestamp" in pod["metadata"]:
        return
    name, status = pod["metadata"]["name"], pod.get("status", {})
    if status.get("phase") == "Failed":  # evicted, or refused by its node
        yield Problem("PodFailed", f"pod {name}: {_said('PodFailed', status)}")
    # What is behind it comes first: the scheduler only says that a claim is not bound.
    for event in _warnings(observed, *claim_names(pod)):
        if event.get("reason") in _OF_CLAIMS:
            claim = event["involvedObject"]["name"]
            yield Problem("FailedBinding", f"pod {name}, claim {claim}: {event.get('message', '')}")
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    if (placed := conditions.get("PodScheduled", {})).get("reason") in ("SchedulingGated", "Unschedulable"):
        yield Problem("Unschedulable", f"pod {name}: {placed.get('message', '')}")
    yield from _stuck(observed, pod)
    # What was said of its volumes before is over then.
    for event in () if has_started(pod) else _warnings(observed, pod["metadata"]["uid"]):
        if event.get("reason") in _OF_PODS:
            yield Problem("FailedMount", f"pod {name}: {_said('FailedMount', event)}")
    since = conditions.get("Ready", {}).get("lastTransitionTime") or pod["metadata"].get("creationTimestamp")
    if observed.now - _time(since, observed) > (deadline := _deadline(pod)):
        minutes = deadline // timedelta(minutes=1)
        yield Problem("ProgressDeadlineExceeded", f"pod {name} has not become ready in {minutes} minutes")


def _stuck(observed: Observed, pod: Object) -> Iterator[Problem]:
    """Containers that do not run, or that run between two crashes."""
    # One that came up, and is not ready now, is so for another reason than what ended it long ago.
    endings = {
        container["name"]: ended
        for container, ended in _ended(pod)
        if not container.get("started") or _is_recent(ended, observed)
    }
    for container in _containers(pod):
        waiting, ended = container.get("state", {}).get("waiting") or {}, endings.get(container["name"])
        reason = _STUCK.get(waiting.get("reason", ""))
        if reason and reason != "CrashLoopBackOff":
            yield Problem(reason, f"{_where(pod, container)}: {_said(reason, waiting)}")
        elif container.get("ready"):
            continue
        elif ended and _is_oom(ended):
            yield Problem("OOMKilled", _history(pod, container, ended))
        elif reason or (ended and container.get("restartCount", 0) > 1):
            yield Problem("CrashLoopBackOff", _history(pod, container, ended or {}))


def _containers(pod: Object) -> list[Object]:
    status = pod.get("status", {})
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _ended(pod: Object) -> Iterator[tuple[Object, Object]]:
    """Containers that ended, each with how it did the last time."""
    for container in _containers(pod):
        now, before = (container.get(state, {}).get("terminated") for state in ("state", "lastState"))
        if ended := now or before:
            yield container, ended


def _is_oom(ended: Object) -> bool:
    return ended.get("reason") == "OOMKilled"


def _is_recent(ended: Object, observed: Observed) -> bool:
    return observed.now - _time(ended.get("finishedAt"), observed) < _RECENT


def _where(pod: Object, container: Object) -> str:
    return f"pod {pod['metadata']['name']}, container {container['name']}"


def _said(reason: Trouble, told: Object) -> str:
    """The words of who knows it, after its own reason where that is another than ours."""
    kind = told.get("reason", reason)
    return f"{'' if kind == reason else f'{kind}: '}{told.get('message', '')}"


def _history(pod: Object, container: Object, ended: Object) -> str:
    """How often a container ended and how, with the last lines that it wrote."""
    often = container.get("restartCount", 0) + ("running" not in container.get("state", {}))
    how = f", the last time with {ended.get('reason')}, exit code {ended.get('exitCode')}" if ended else ""
    lines = [plain(line, _MAX_LAST_WORDS) for line in (ended.get("message") or "").splitlines()]
    said = " | ".join(list(filter(None, lines))[-_MAX_LAST_LINES:])[-_MAX_LAST_WORDS:]
    return f"{_where(pod, container)}: ended {often} times{how}" + (f": {said}" if said else "")


def _deadline(pod: Object) -> timedelta:
    """As long as the startup probes allow, which are the user's to set; an hour is rendered."""
    probes = [container.get("startupProbe") or {} for container in pod["spec"].get("containers") or ()]
    tries = (probe.get("failureThreshold", 3) * probe.get("periodSeconds", 10) for probe in probes)
    return timedelta(seconds=min(max(tries, default=0), _LONGEST_SECONDS)) + _LOADING


def _warnings(observed: Observed, *about: str) -> list[Object]:
    """Recent events about objects, by uid or name, the latest first."""
    involved = [(event, event["involvedObject"]) for event in observed.warnings]
    found = [e for e, whom in involved if whom.get("uid") in about or whom.get("name") in about]
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
