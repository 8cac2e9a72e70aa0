"""The steps that resize the memory tier of running pods. Pure.

To grow a pod, the operator first asks the kubelet for memory, by an in-place resize of the sidecar's
container. After the kubelet has granted it, the operator writes the new size into the pod's annotation, which
the sidecar follows. To shrink a pod, it writes the annotation first, and reduces the container's memory after
the sidecar has released its own. The pod alone records the progress, so that an operator that was killed at
any step, or its successor, continues from there.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from lmcache_operator.contract.base import Resize
from lmcache_operator.pods.pods import is_running
from lmcache_operator.specs import Object, names
from lmcache_operator.specs.merge import dig
from lmcache_store.common.text import plain
from lmcache_store.common.units import ceil_div, format_mebibytes, parse_quantity

MAX_SIZE, SIZE_FILE = "LMCACHE_MEMORY_MAX_SIZE", "LMCACHE_MEMORY_SIZE_FILE"
"""Variables of the sidecar. They are not arguments, because images of earlier versions must ignore them."""
CONTEXT_BYTES = 256 * 2**20
"""Host memory of the process that reads one GPU: its interpreter and the CUDA driver."""
# Interpreter, gRPC and libraries of the sidecar, for any size of the arena.
_BASE_BYTES = 512 * 2**20
_PODS_PER_START = 10
"""One in so many pods, and at least one, grows at a time. A failure thus affects few pods."""
_PATIENCE = timedelta(minutes=10)
"""Time for the kubelet to grant memory. Afterwards the operator takes the request back."""
_PAUSE = timedelta(hours=1)
"""Time until the operator tries a refused size again."""
_WAITING = ("PodResizePending", "PodResizeInProgress")


def sidecar_memory(memory_bytes: int, num_gpus: int = 0) -> int:
    """Bytes of the sidecar's memory request and limit.

    The sum of:
    - the arena, because the kernel charges tmpfs pages to the process that touches them first;
    - 512 MiB for the process;
    - 1/32 of the tier for its index, page tables, and objects in transfer to or from other tiers;
    - 256 MiB for the reader process of each GPU.
    """
    return memory_bytes + _BASE_BYTES + memory_bytes // 32 + num_gpus * CONTEXT_BYTES


class RefusedResize(NamedTuple):
    """A refused size, as the pod's annotation records it."""

    num_bytes: int
    time: datetime
    message: str

    @classmethod
    def of(cls, pod: Object, now: datetime) -> RefusedResize | None:
        """Read the refusal from a pod; None: there is none, or the size may be tried again."""
        try:
            record = json.loads(names.annotations_of(pod)[names.RESIZE_REFUSED])
            time, message = datetime.fromisoformat(record["at"]), plain(record["message"])
            return cls(int(record["bytes"]), time, message) if abs(now - time) < _PAUSE else None
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            return None


class Resizing(NamedTuple):
    """Progress of the resize of all pods of a cluster."""

    steps: tuple[Resize, ...] = ()
    """Next steps: first of pods whose resize is in progress, then those that start a growth."""
    num_starts: int = 0
    """Number of pods that may start to grow now."""
    waits: tuple[str, ...] = ()
    """Sentences on pods that wait for the kubelet."""
    refused: tuple[tuple[str, RefusedResize], ...] = ()
    """Refused sizes with the names of their pods, which keep their previous size."""
    followed: tuple[str, ...] = ()
    """Names of pods that were resized at least once while running."""
    fixed: tuple[str, ...] = ()
    """Names of pods with another size that can change only by replacing the pod."""


class _Memory(NamedTuple):
    """Sizes of a pod's memory tier and of its sidecar's container, in bytes."""

    initial: int
    """Size of the tier at creation of the pod."""
    annotated: int
    """Size of the tier in the pod's annotation, which the sidecar follows."""
    largest: int
    """Size that the tier may grow to; 0: this pod's sidecar cannot resize."""
    limit: int = 0
    """Memory limit of the sidecar's container in the pod's spec."""
    granted: int = 0
    """Memory limit that the kubelet reports as applied; 0: not reported yet."""
    request: int = 0
    """Memory request of the sidecar's container in the pod's spec."""
    num_gpus: int = 0


def resizing(pods: Iterable[Object], wanted: int, num_gpus: int, now: datetime) -> Resizing:
    """Plan the next steps of running pods until each memory tier has ``wanted`` bytes.

    ``num_gpus``: GPUs of an engine. A sidecar that sees them runs a reader process for each.
    """
    begun, starts = list[Resize](), list[Resize]()
    waits, fixed, followed = list[str](), list[str](), list[str]()
    refused = list[tuple[str, RefusedResize]]()
    running, sizes = list[tuple[Object, _Memory, int]](), dict[str, int]()
    num_pods = num_growing = 0
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
        num_pods += 1
        memory, name = _memory_of(pod, num_gpus), str(pod["metadata"]["name"])
        if memory.annotated != wanted and memory.largest < wanted:
            fixed.append(name)
        if not (memory.largest and is_running(pod)):
            continue
        if _resized_at(pod):
            followed.append(name)
        target, refusal = min(wanted, memory.largest), RefusedResize.of(pod, now)
        if refusal and refusal.num_bytes == target:
            refused.append((name, refusal))
            if memory.annotated >= target:
                continue  # the tier has shrunk, and its sidecar keeps memory that it can't release
            target = memory.annotated
        running.append((pod, memory, target))
        # Requests reach all pods of an engine alike, so it has the largest size that all of them can have.
        sizes[_engine_of(pod)] = min(target, sizes.get(_engine_of(pod), target))
    waiting = {
        engine
        for pod, memory, _ in running
        if memory.annotated < (size := sizes[engine := _engine_of(pod)])
        and memory.granted < _limit(size, memory.num_gpus)
    }
    for pod, memory, target in running:
        engine = _engine_of(pod)
        target = min(target, max(sizes[engine], memory.annotated))
        step = _next_step(pod, memory, target, now, can_grow=engine not in waiting)
        if isinstance(step, str):
            waits += [f"pod {pod['metadata']['name']}: {step}"] if step else []
            num_growing += bool(step) and memory.annotated < target
        elif step.is_start:
            starts.append(step)
        else:
            begun.append(step)
            num_growing += memory.annotated < target
    # An engine whose pods started one after another would wait for its own pods.
    num_together = max(Counter(_engine_of(pod) for pod, *_ in running).values(), default=1)
    budget = max(0, max(ceil_div(num_pods, _PODS_PER_START), num_together) - num_growing)
    return Resizing((*begun, *starts), budget, tuple(waits), tuple(refused), tuple(followed), tuple(fixed))


def _engine_of(pod: Object) -> str:
    """The group of a pod, or the name of a pod without a group."""
    return str((pod["metadata"].get("labels") or {}).get(names.GROUP_LABEL, pod["metadata"]["name"]))


def initial_bytes(pod_or_template: Object) -> int:
    """Bytes of the memory tier at creation of a pod; 0: unknown."""
    return _memory_of(pod_or_template, 0).initial


def largest_in_place(pod: Object) -> int:
    """Largest number of bytes that a pod's memory tier can have without replacing the pod; 0: unknown."""
    memory = _memory_of(pod, 0)
    return max(memory.largest, memory.annotated)


def refuse(pod: Object, num_bytes: int, message: str, now: datetime) -> Resize:
    """The step that records a refused size on a pod. Later steps then take the resize back."""
    record = {"bytes": num_bytes, "at": now.isoformat(timespec="seconds"), "message": plain(message)}
    present = names.annotations_of(pod).get(names.MEMORY_SIZE)
    size = {} if present is None else {names.MEMORY_SIZE: present}
    return Resize(pod, num_bytes, {names.RESIZE_REFUSED: json.dumps(record)} | size)


def _next_step(pod: Object, memory: _Memory, target: int, now: datetime, *, can_grow: bool) -> Resize | str:
    """The next step of a pod; or, if it has to wait, a sentence on the reason; or "" if nothing is due.

    ``can_grow``: whether all pods of the engine have the memory for it.
    """
    annotate = Resize(pod, target, {names.MEMORY_SIZE: f"{target}"})
    if target < memory.annotated:
        return annotate
    limit, former = (_limit(size, memory.num_gpus) for size in (target, memory.annotated))
    # The operator that created the pod may have computed another limit. That alone starts no resize.
    is_begun = (resized_at := _resized_at(pod)) is not None or memory.annotated != memory.initial
    if memory.limit != limit and (is_begun or target != memory.annotated):
        # A request that the user set stays, up to the new limit.
        request = limit if memory.request in (0, memory.limit) else min(memory.request, limit)
        amounts = {"limits": _quantity(limit), "requests": _quantity(request)}
        # Memory that the kubelet never granted can be taken back without checking what the sidecar uses.
        is_safe = target == memory.annotated and limit == memory.granted
        is_start = target > memory.annotated and memory.limit == former
        return Resize(pod, target, None, amounts, None if is_safe else target, is_start)
    if target > memory.annotated:
        if memory.granted >= limit:
            return annotate if can_grow else "waiting until the other pods of its engine have the memory, too"
        message = _refused(pod, now - resized_at if resized_at else timedelta())
        return refuse(pod, target, message, now) if message else "waiting for the kubelet to grant the memory"
    is_granted = memory.granted in (0, memory.limit) or not is_begun
    return "" if is_granted else f"the kubelet has not reclaimed the memory yet{_kubelet_message(pod)}"


def _limit(memory_bytes: int, num_gpus: int) -> int:
    return _bytes(format_mebibytes(sidecar_memory(memory_bytes, num_gpus)))


def _quantity(num_bytes: int) -> Object:
    return {"memory": format_mebibytes(num_bytes)}


def _refused(pod: Object, waited: timedelta) -> str:
    """Why the operator stops waiting for memory; empty: it still waits."""
    for condition in _conditions(pod):
        if condition.get("reason") == "Infeasible":
            return f"its node cannot grant the memory: {condition.get('message', '')}"
    if waited < _PATIENCE:
        return ""
    minutes = _PATIENCE // timedelta(minutes=1)
    return f"the kubelet has not granted the memory for {minutes} minutes{_kubelet_message(pod)}"


def _kubelet_message(pod: Object) -> str:
    return "".join(f": {condition['message']}" for condition in _conditions(pod) if condition.get("message"))


def _conditions(pod: Object) -> list[Object]:
    """The kubelet's conditions on the latest resize of a pod."""
    generation = pod["metadata"].get("generation", 0)
    return [
        condition
        for condition in pod.get("status", {}).get("conditions") or ()
        if condition["type"] in _WAITING
        and condition["status"] == "True"
        and condition.get("observedGeneration", generation) >= generation
    ]


def _resized_at(pod: Object) -> datetime | None:
    """Time of the operator's last resize of the sidecar's container, from the API server's field records."""
    for entry in pod["metadata"].get("managedFields") or ():
        if entry.get("manager") == names.FIELD_MANAGER and entry.get("subresource") == "resize":
            return datetime.fromisoformat(entry["time"])
    return None


def _memory_of(pod: Object, num_gpus: int) -> _Memory:
    """The sizes of a pod or of a pod template. Sizes that can't be read are 0."""
    sidecar = _named_sidecar(pod["spec"].get("initContainers"))
    status = _named_sidecar(pod.get("status", {}).get("initContainerStatuses"))
    env = env_of_sidecar(pod)
    arguments = [text for text in sidecar.get("args") or () if text.startswith(names.SIZE_ARGUMENT)]
    initial = largest = 0
    with contextlib.suppress(ValueError, LookupError):
        initial = int(arguments[-1].removeprefix(names.SIZE_ARGUMENT))
        largest = int(env.get(MAX_SIZE, 0))
    sees_gpus = dig(sidecar, "resources", "claims") or env.get("NVIDIA_VISIBLE_DEVICES") == "all"
    num_gpus = num_gpus if sees_gpus else 0
    if volume := _volume_bytes(pod, initial, num_gpus):
        largest = min(largest, volume)
    annotation = names.annotations_of(pod).get(names.MEMORY_SIZE, "")
    is_valid = re.fullmatch("[0-9]{1,18}", annotation) and 0 < int(annotation) <= largest
    return _Memory(
        initial,
        int(annotation) if is_valid else initial,
        largest,
        _bytes(dig(sidecar, "resources", "limits", "memory")),
        _bytes(dig(status, "resources", "limits", "memory")),
        _bytes(dig(sidecar, "resources", "requests", "memory")),
        num_gpus,
    )


def _volume_bytes(pod: Object, initial: int, num_gpus: int) -> int:
    """Size of the arena's volume if the kubelet limits it; 0: the volume has its declared size.

    If all containers have a memory limit, the kubelet creates in-memory volumes no larger than the sum of the
    initial limits. It never enlarges them.
    """
    spec = pod["spec"]
    containers = [*spec.get("containers", ()), *(spec.get("initContainers") or ())]
    limits = {item["name"]: _bytes(dig(item, "resources", "limits", "memory")) for item in containers}
    if not all(limits.values()):
        return 0
    return sum(limits[item["name"]] for item in spec["containers"]) + _limit(initial, num_gpus)


def _bytes(quantity: Any) -> int:
    return 0 if quantity is None else int(parse_quantity(quantity))


def env_of_sidecar(pod_or_template: Object) -> dict[str, str]:
    """The variables of the sidecar in a pod or a pod template; empty if it is missing."""
    variables = _named_sidecar(pod_or_template["spec"].get("initContainers")).get("env") or ()
    return {item["name"]: item.get("value", "") for item in variables}


def _named_sidecar(containers: Any) -> Mapping[str, Any]:
    """The sidecar in a list of containers or of container statuses; empty if it is missing."""
    return next((item for item in containers or () if item["name"] == names.SIDECAR), {})
