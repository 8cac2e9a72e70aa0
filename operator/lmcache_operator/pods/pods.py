"""A component's pods: why they are missing or not ready, and which pod to replace next. Pure.

Messages quote the scheduler, the kubelet and the controllers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta

from lmcache_operator.contract.base import Observed
from lmcache_operator.contract.conditions import Problem, Trouble
from lmcache_operator.pods.fields import image_field, missing_object, model_field
from lmcache_operator.pods.output import last_error
from lmcache_operator.pods.placement import lacking, unplaced_message
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import controller_uid
from lmcache_operator.specs.names import SPEC_HASH, annotations_of
from lmcache_store.common.text import plain

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
"""Reasons of conditions for containers that can't start, by the kubelet's reason for waiting. The kubelet
alternates between some of its reasons, which then share one reason here."""
_OF_PODS = ("FailedAttachVolume", "FailedCreatePodSandBox", "FailedMount", "FailedPrepareDynamicResources")
_OF_CLAIMS = ("FailedBinding", "ProvisioningFailed")
_LOADING = timedelta(minutes=5)
"""Time for scheduling, volumes and images, before the slowest startup probe of a pod begins."""
_UNPLACED = timedelta(minutes=10)
"""Time for a node with enough memory to appear, such as one from the cluster autoscaler."""
_RECENT = timedelta(minutes=20)
"""Older events are ignored. If the problem persists, Kubernetes reports it again."""
_LONGEST_SECONDS = 10**9
"""Upper bound on a probe's deadline: users may set values that a timedelta can't hold."""


def is_ready(pod: Object) -> bool:
    """Whether a pod is Ready and not terminating."""
    is_true = condition_of(pod, "Ready").get("status") == "True"
    return is_true and "deletionTimestamp" not in pod["metadata"]


def is_running(pod: Object) -> bool:
    """Whether a pod runs, has an address, and is not terminating."""
    is_running = pod.get("status", {}).get("phase") == "Running" and pod["status"].get("podIP")
    return bool(is_running) and "deletionTimestamp" not in pod["metadata"]


def condition_of(pod_or_node: Object, kind: str) -> Object:
    """The condition of this type; empty if there is none."""
    conditions = pod_or_node.get("status", {}).get("conditions") or ()
    return next((condition for condition in conditions if condition["type"] == kind), {})


def ready_since(pod: Object, observed: Observed) -> datetime:
    """Time since which a pod is ready; now if it is not ready, the earliest time if that is unknown."""
    if not is_ready(pod):
        return observed.now
    since = condition_of(pod, "Ready").get("lastTransitionTime")
    return time_of(since, observed) if since else datetime.min.replace(tzinfo=UTC)


def started_at(pod: Object, observed: Observed) -> datetime:
    """Latest start of a pod or of one of its containers: no data in their memory is older.

    Readiness is not a substitute, because a network failure changes it, too.
    """
    containers = pod.get("status", {}).get("containerStatuses") or []
    running = [container.get("state", {}).get("running") or {} for container in containers]
    times = [pod["metadata"].get("creationTimestamp"), *(state.get("startedAt") for state in running)]
    return max((time_of(time, observed) for time in times if time), default=ready_since(pod, observed))


def is_outdated(pod: Object, template: Object) -> bool:
    """Whether a pod was created from another spec than this template."""
    return annotations_of(pod).get(SPEC_HASH) != annotations_of(template).get(SPEC_HASH)


def why_unplaced(pod: Object, observed: Observed) -> str:
    """The scheduler's message on a pod whose memory request has fitted no node for 10 minutes; else empty."""
    condition = _unplaced(pod)
    message, since = condition.get("message", ""), time_of(condition.get("lastTransitionTime"), observed)
    # The scheduler names each resource that the nodes lack, as in "Insufficient memory".
    return plain(message) if "memory" in message and observed.now - since >= _UNPLACED else ""


def has_no_node(pod: Object) -> bool:
    """Whether the scheduler has found no node for a pod, so that the pod serves nothing."""
    return bool(_unplaced(pod)) and "deletionTimestamp" not in pod["metadata"]


def lacks_resources(pods: Iterable[Object]) -> bool:
    """Whether a pod waits for a node with more of a resource."""
    return any(lacking(_unplaced(pod).get("message", "")) for pod in pods)


def _unplaced(pod: Object) -> Object:
    """The false PodScheduled condition; empty: the pod has a node, or the scheduler has not seen it yet."""
    condition = condition_of(pod, "PodScheduled")
    return condition if condition.get("status") == "False" else {}


def is_unseen(owner: Object, template: Object) -> bool:
    """Whether a StatefulSet's controller has not observed the template, and would recreate an old pod."""
    observed_generation = owner.get("status", {}).get("observedGeneration", 0)
    is_old = observed_generation < owner["metadata"].get("generation", 0)
    return is_old or is_outdated(owner["spec"]["template"], template)


def incomplete_sets(observed: Observed) -> Iterator[tuple[Object, list[Object]]]:
    """StatefulSets with too few pods, each with its existing pods."""
    pods = pods_by_owner(observed)
    for owner in (child for ref, child in observed.children.items() if ref.kind == "StatefulSet"):
        existing = pods.get(owner["metadata"]["uid"], [])
        if len(existing) < owner["spec"].get("replicas", 0):
            yield owner, existing


def pods_by_owner(observed: Observed) -> dict[str | None, list[Object]]:
    """The pods of each StatefulSet, by its uid. A cluster may have 500 sets and 1,000 pods."""
    pods: dict[str | None, list[Object]] = {}
    for pod in observed.pods:
        pods.setdefault(controller_uid(pod), []).append(pod)
    return pods


def pod_problems(observed: Observed) -> Iterable[Problem]:
    """Why pods are missing or not ready: one problem per reason, which quotes the first pod."""
    unready = (problem for pod in _causes_first(observed.pods) for problem in _unready(observed, pod))
    missing = (Problem("FailedCreate", event.get("message", "")) for event in creation_failures(observed))
    return _first_of_each((*missing, *unready))


def kill_problems(observed: Observed) -> Iterable[Problem]:
    """Recent out-of-memory kills in pods that are ready again. They may recur."""
    endings = ((pod, *ending) for pod in observed.pods if is_ready(pod) for ending in _ended(pod))
    return _first_of_each(
        Problem("OOMKilled", _history(observed, pod, container, ended))
        for pod, container, ended in endings
        if _is_oom(ended) and _is_recent(ended, observed)
    )


def has_started(pod: Object) -> bool:
    """Whether any container of a pod runs or ran. If so, all its volumes are mounted."""
    return any(container.get("state", {}).keys() - {"waiting"} for container in _containers(pod))


def claim_names(pod: Object) -> list[str]:
    """Names of the PersistentVolumeClaims of a pod that has no node yet; empty once it has a node."""
    name, spec = pod["metadata"]["name"], pod["spec"]
    volumes = [] if spec.get("nodeName") else spec.get("volumes") or ()
    named = [(volume.get("persistentVolumeClaim") or {}).get("claimName") for volume in volumes]
    ephemeral = [f"{name}-{volume['name']}" for volume in volumes if "ephemeral" in volume]
    return [*filter(None, named), *ephemeral]


def _first_of_each(problems: Iterable[Problem]) -> Iterable[Problem]:
    first: dict[str, Problem] = {}
    for problem in problems:
        first.setdefault(problem.reason, problem)
    return first.values()


def creation_failures(observed: Observed, age: timedelta = timedelta.min) -> Iterator[Object]:
    """Events that say why missing pods could not be created. ``age``: minimum age of an event."""
    for owner, pods in incomplete_sets(observed):
        created = [time_of(pod["metadata"].get("creationTimestamp"), observed) for pod in pods]
        for event in _warnings(observed, owner["metadata"]["uid"]):
            # A pod that was created after the event shows that the failure is over.
            is_over = bool(created) and _last_seen(event, observed) < max(created)
            since = time_of(event.get("firstTimestamp") or event.get("eventTime"), observed)
            if event.get("reason") == "FailedCreate" and not is_over and observed.now - since >= age:
                yield event


def _unready(observed: Observed, pod: Object) -> Iterator[Problem]:
    if is_ready(pod) or "deletionTimestamp" in pod["metadata"]:
        return
    name, status = pod["metadata"]["name"], pod.get("status", {})
    if status.get("phase") == "Failed":  # evicted, or rejected by its node
        yield Problem("PodFailed", f"pod {name}: {_quote('PodFailed', status)}")
    # The cause comes first: the scheduler only reports that a claim is not bound.
    for event in _warnings(observed, *claim_names(pod)):
        if event.get("reason") in _OF_CLAIMS:
            claim = event["involvedObject"]["name"]
            yield Problem("FailedBinding", f"pod {name}, claim {claim}: {event.get('message', '')}")
    if (placed := condition_of(pod, "PodScheduled")).get("reason") in ("SchedulingGated", "Unschedulable"):
        yield Problem("Unschedulable", unplaced_message(pod, placed.get("message", ""), observed))
    yield from _stuck(observed, pod)
    # Once a container has started, older events about volumes are obsolete.
    for event in () if has_started(pod) else _warnings(observed, pod["metadata"]["uid"]):
        if event.get("reason") in _OF_PODS:
            cause = missing_object(event.get("message", ""), observed) or _quote("FailedMount", event)
            yield Problem("FailedMount", f"pod {name}: {cause}")
    if observed.now - unready_since(pod, observed) > (limit := start_limit(pod)):
        minutes = limit // timedelta(minutes=1)
        yield Problem("ProgressDeadlineExceeded", f"pod {name} has not become ready in {minutes} minutes")


def _stuck(observed: Observed, pod: Object) -> Iterator[Problem]:
    """Problems of containers that do not run, or that run between two crashes."""
    endings = _relevant_endings(observed, pod)
    for container in _containers(pod):
        waiting, ended = container.get("state", {}).get("waiting") or {}, endings.get(container["name"])
        reason = _STUCK.get(waiting.get("reason", ""))
        if reason and reason != "CrashLoopBackOff":
            field = image_field(pod, container["name"]) if reason == "ImagePullBackOff" else ""
            yield Problem(reason, f"{_where(pod, container)}{field}: {_quote(reason, waiting)}")
        elif container.get("ready"):
            continue
        elif ended and _is_oom(ended):
            yield Problem("OOMKilled", _history(observed, pod, container, ended))
        elif reason or (ended and container.get("restartCount", 0) > 1):
            yield Problem("CrashLoopBackOff", _history(observed, pod, container, ended or {}))


def first_crash(observed: Observed) -> str:
    """A container that failed once and starts again, which is no problem yet; empty if none did."""
    for pod in _causes_first(observed.pods):
        endings = {} if is_ready(pod) else _relevant_endings(observed, pod)
        for container in _containers(pod):
            ended = endings.get(container["name"])
            is_first = container.get("restartCount", 0) + _is_down(container) == 1
            if (
                ended
                and ended.get("exitCode")
                and is_first
                and not (container.get("ready") or _is_oom(ended))
            ):
                return _history(observed, pod, container, ended)
    return ""


def _relevant_endings(observed: Observed, pod: Object) -> dict[str, Object]:
    """The last termination of each container of an unready pod, by the container's name.

    An old crash does not explain why a container that has started since is not ready now.
    """
    return {
        container["name"]: ended
        for container, ended in _ended(pod)
        if not container.get("started") or _is_recent(ended, observed)
    }


def _containers(pod: Object) -> list[Object]:
    status = pod.get("status", {})
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _ended(pod: Object) -> Iterator[tuple[Object, Object]]:
    """Containers that have terminated at least once, each with its last termination."""
    for container in _containers(pod):
        now, before = (container.get(state, {}).get("terminated") for state in ("state", "lastState"))
        if ended := now or before:
            yield container, ended


def _causes_first(pods: Sequence[Object]) -> list[Object]:
    """The pods. Those that another pod of their engine prevents from being placed or started come last."""

    def is_consequence(pod: Object) -> bool:
        outputs = (ended.get("message") or "" for _, ended in _ended(pod))
        waits = "minCount pods from a gang" in condition_of(pod, "PodScheduled").get("message", "")
        return waits or any("\nerror: part " in f"\n{output}" for output in outputs)

    return sorted(pods, key=is_consequence)


def _is_oom(ended: Object) -> bool:
    return ended.get("reason") == "OOMKilled"


def _is_recent(ended: Object, observed: Observed) -> bool:
    return observed.now - time_of(ended.get("finishedAt"), observed) < _RECENT


def _where(pod: Object, container: Object) -> str:
    return f"pod {pod['metadata']['name']}, container {container['name']}"


def _quote(reason: Trouble, source: Object) -> str:
    """The message of an event or state, after its own reason if that differs from the condition's."""
    kind = source.get("reason", reason)
    return f"{'' if kind == reason else f'{kind}: '}{source.get('message', '')}"


def _is_down(container: Object) -> bool:
    return "running" not in container.get("state", {})


def _history(observed: Observed, pod: Object, container: Object, ended: Object) -> str:
    """Number of a container's terminations and its last one, with the last error in its output."""
    count, code = container.get("restartCount", 0) + _is_down(container), ended.get("exitCode")
    how = f"ended {count} times"
    if ended and count == 1:
        began, end = (time_of(ended.get(key), observed) for key in ("startedAt", "finishedAt"))
        # A container that could not start (StartError) has 1970 as the time of its start.
        after = f" after {(end - began).total_seconds():.0f} s" if began.year > 1970 else ""
        how = f"ended once with exit code {code}{after}, and starts again"
    elif ended:
        how += f", the last time with {ended.get('reason')}, exit code {code}"
    output = last_error(ended.get("message") or "")
    field = model_field(ended.get("message") or "", observed)
    return f"{_where(pod, container)}{field}: {how}" + (f": {output}" if output else "")


def unready_since(pod: Object, observed: Observed) -> datetime:
    """Time since which a pod that is not ready has been so, or exists."""
    since = condition_of(pod, "Ready").get("lastTransitionTime") or pod["metadata"].get("creationTimestamp")
    return time_of(since, observed)


def start_limit(pod: Object) -> timedelta:
    """Time for a pod to become ready: its slowest startup probe (one hour by default) plus ``_LOADING``."""
    probes = [container.get("startupProbe") or {} for container in pod["spec"].get("containers") or ()]
    tries = (probe.get("failureThreshold", 3) * probe.get("periodSeconds", 10) for probe in probes)
    return timedelta(seconds=min(max(tries, default=0), _LONGEST_SECONDS)) + _LOADING


def _warnings(observed: Observed, *about: str) -> list[Object]:
    """Recent events about objects that ``about`` gives by uid or name, latest first."""
    involved = [(event, event["involvedObject"]) for event in observed.warnings]
    matching = [event for event, ref in involved if ref.get("uid") in about or ref.get("name") in about]
    recent = [event for event in matching if observed.now - _last_seen(event, observed) < _RECENT]
    return sorted(recent, key=lambda event: _last_seen(event, observed), reverse=True)


def _last_seen(event: Object, observed: Observed) -> datetime:
    series = event.get("series") or {}
    return time_of(
        series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime"), observed
    )


def time_of(text: str | None, observed: Observed) -> datetime:
    """Parse a time of the API server; now if it is missing, the earliest time if it is invalid."""
    try:
        return datetime.fromisoformat(text) if text else observed.now
    except ValueError:  # any client may post an Event of the year 0, and the API server accepts it
        return datetime.min.replace(tzinfo=UTC)
