"""Another size of the memory tier for pods that run: which step is next for which of them. Pure.

A pod that grows has to get the memory first: it asks its node, by an in-place resize of the sidecar's
container, and is told its size when the kubelet has confirmed. One that shrinks is told first, and gives back
memory when its sidecar holds no more. How far a pod has come is read off the pod alone, so that an operator
that was killed anywhere, or a second one, goes on from there.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from lmcache.units import ceil_div, format_mebibytes, parse_quantity
from lmcache_operator.components.base import Resize
from lmcache_operator.components.pods import plain
from lmcache_operator.specs import Object, names
from lmcache_operator.specs.merge import at

MAX_SIZE, SIZE_FILE = "LMCACHE_MEMORY_MAX_SIZE", "LMCACHE_MEMORY_SIZE_FILE"
"""Variables of the sidecar, and no arguments: images of earlier versions ignore them."""
SIZE_ARGUMENT = "--memory-size="
CONTEXT_BYTES = 256 * 2**20
"""Host memory of the process that copies out of one GPU: its interpreter and the driver's."""
# Interpreter, gRPC and libraries of the sidecar, whatever the arena's size.
_BASE_BYTES = 512 * 2**20
_PARTS_AT_ONCE = 10
"""One in so many pods begins to grow at a time, and one at least: what goes wrong stops there."""
_PATIENCE = timedelta(minutes=10)
"""For a kubelet's answer; with none, or "Deferred" for that long, the memory is not waited for."""
_PAUSE = timedelta(hours=1)
"""Until a size that a pod could not get is tried again."""
_WAITING = ("PodResizePending", "PodResizeInProgress")


def sidecar_memory(memory_bytes: int, num_gpus: int = 0) -> int:
    """Bytes of the sidecar's memory request and limit.

    The arena (tmpfs is charged to who touches it first), 512 MiB for the process, and 1/32 of the tier for
    its index, for what the kernel keeps about its pages, and for objects on their way to or from other tiers;
    and a process for each GPU that the sidecar copies out of.
    """
    return memory_bytes + _BASE_BYTES + memory_bytes // 32 + num_gpus * CONTEXT_BYTES


class Refusal(NamedTuple):
    """A size that a pod could not get, as it is noted on the pod."""

    num_bytes: int
    at: datetime
    message: str

    @classmethod
    def of(cls, pod: Object, now: datetime) -> Refusal | None:
        """That of a pod; None: there is none, or it may be tried again."""
        try:
            told = json.loads(names.annotations_of(pod)[names.RESIZE_REFUSED])
            found = cls(int(told["bytes"]), datetime.fromisoformat(told["at"]), plain(told["message"]))
            return found if abs(now - found.at) < _PAUSE else None
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            return None


class Resizing(NamedTuple):
    """What becomes of the pods' memory tiers."""

    wanted: int = 0
    """Bytes of each."""
    steps: tuple[Resize, ...] = ()
    """For pods that have begun, in no order; then for those that may begin."""
    num_starts: int = 0
    """How many of these may."""
    waits: tuple[str, ...] = ()
    """Sentences on pods that are on their way, and wait for somebody."""
    refused: tuple[tuple[str, Refusal], ...] = ()
    """Pods that keep another size, by name."""
    followed: tuple[str, ...] = ()
    """Names of pods that were given another size since they run."""
    fixed: tuple[str, ...] = ()
    """Names of pods whose size is another one, and changes only when they are replaced."""


class _Memory(NamedTuple):
    """A pod's memory tier, in bytes."""

    made: int
    """Its size when the pod was made."""
    told: int
    """Its size, as the sidecar reads it."""
    most: int
    """What it may grow to; 0: this pod's sidecar follows no size."""
    limit: int = 0
    """Of the sidecar's container, as it is asked for."""
    granted: int = 0
    """As the kubelet says; 0: it does not (yet)."""
    request: int = 0
    num_gpus: int = 0


def resizing(pods: Iterable[Object], wanted: int, num_gpus: int, now: datetime) -> Resizing:
    """What is due for running pods until the memory tier of each has ``wanted`` bytes.

    ``num_gpus``: of an engine; a sidecar that sees them has a process for each.
    """
    begun, starts, waits, refused = list[Resize](), list[Resize](), list[str](), list[tuple[str, Refusal]]()
    fixed, followed, num_pods, num_growing = list[str](), list[str](), 0, 0
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
        num_pods += 1
        memory, name = _memory_of(pod, num_gpus), str(pod["metadata"]["name"])
        if memory.told != wanted and memory.most < wanted:
            fixed.append(name)
        if not (memory.most and _is_running(pod)):
            continue
        if _resized_at(pod):
            followed.append(name)
        target, refusal = min(wanted, memory.most), Refusal.of(pod, now)
        if refusal and refusal.num_bytes == target:
            refused.append((name, refusal))
            if memory.told >= target:
                continue  # it has shrunk, and keeps memory that it can't give back
            target = memory.told
        step = _next_step(pod, memory, target, now)
        if isinstance(step, str):
            waits += [f"pod {name}: {step}"] if step else []
            num_growing += bool(step) and memory.told < target
        elif step.is_start:
            starts.append(step)
        else:
            begun.append(step)
            num_growing += memory.told < target
    budget = max(0, ceil_div(num_pods, _PARTS_AT_ONCE) - num_growing)
    return Resizing(
        wanted, (*begun, *starts), budget, tuple(waits), tuple(refused), tuple(followed), tuple(fixed)
    )


def made_with(pod_or_template: Object) -> int:
    """Bytes of the memory tier that a pod was made with; 0: that can't be read."""
    return _memory_of(pod_or_template, 0).made


def reach(pod: Object) -> int:
    """Bytes that a pod's memory tier can have before it is replaced; 0: that can't be read."""
    memory = _memory_of(pod, 0)
    return max(memory.most, memory.told)


def refuse(pod: Object, num_bytes: int, message: str, now: datetime) -> Resize:
    """The step that notes that a pod can't have a size: the rest is taken back then."""
    said = {"bytes": num_bytes, "at": now.isoformat(timespec="seconds"), "message": plain(message)}
    kept = names.annotations_of(pod).get(names.MEMORY_SIZE)
    size = {} if kept is None else {names.MEMORY_SIZE: kept}
    return Resize(pod, num_bytes, {names.RESIZE_REFUSED: json.dumps(said)} | size)


def _next_step(pod: Object, memory: _Memory, target: int, now: datetime) -> Resize | str:
    """A step, what is waited for, or nothing."""
    told = Resize(pod, target, {names.MEMORY_SIZE: f"{target}"})
    if target < memory.told:
        return told
    limit, former = (_limit(size, memory.num_gpus) for size in (target, memory.told))
    # The rule for what a sidecar needs may have been another one when the pod was made.
    is_begun = (resized_at := _resized_at(pod)) is not None or memory.told != memory.made
    if memory.limit != limit and (is_begun or target != memory.told):
        # Who declares a request of his own keeps it, as far as it may be.
        request = limit if memory.request in (0, memory.limit) else min(memory.request, limit)
        amounts = {"limits": _quantity(limit), "requests": _quantity(request)}
        # What its node never granted is taken back without asking anybody.
        is_safe = target == memory.told and limit == memory.granted
        is_start = target > memory.told and memory.limit == former
        return Resize(pod, target, None, amounts, None if is_safe else target, is_start)
    if target > memory.told:
        if memory.granted >= limit:
            return told
        message = _refused(pod, now - resized_at if resized_at else timedelta())
        return refuse(pod, target, message, now) if message else "waits for its node"
    is_granted = memory.granted in (0, memory.limit) or not is_begun
    return "" if is_granted else f"its node has not taken back the memory yet{_said(pod)}"


def _limit(memory_bytes: int, num_gpus: int) -> int:
    return _bytes(format_mebibytes(sidecar_memory(memory_bytes, num_gpus)))


def _quantity(num_bytes: int) -> Object:
    return {"memory": format_mebibytes(num_bytes)}


def _refused(pod: Object, waited: timedelta) -> str:
    """Why memory that was asked for is not waited for; empty: it is."""
    for condition in _conditions(pod):
        if condition.get("reason") == "Infeasible":
            return f"its node has no room: {condition.get('message', '')}"
    if waited < _PATIENCE:
        return ""
    minutes = _PATIENCE // timedelta(minutes=1)
    return f"its node has not given the memory in {minutes} minutes{_said(pod)}"


def _said(pod: Object) -> str:
    return "".join(f": {condition['message']}" for condition in _conditions(pod) if condition.get("message"))


def _conditions(pod: Object) -> list[Object]:
    """What the kubelet says of the resize that was asked for last."""
    generation = pod["metadata"].get("generation", 0)
    return [
        condition
        for condition in pod.get("status", {}).get("conditions") or ()
        if condition["type"] in _WAITING
        and condition["status"] == "True"
        and condition.get("observedGeneration", generation) >= generation
    ]


def _resized_at(pod: Object) -> datetime | None:
    """When an operator changed the sidecar's memory last, by the API server's records."""
    for entry in pod["metadata"].get("managedFields") or ():
        if entry.get("manager") == names.FIELD_MANAGER and entry.get("subresource") == "resize":
            return datetime.fromisoformat(entry["time"])
    return None


def _is_running(pod: Object) -> bool:
    is_running = pod.get("status", {}).get("phase") == "Running" and pod["status"].get("podIP")
    return bool(is_running) and "deletionTimestamp" not in pod["metadata"]


def _memory_of(pod: Object, num_gpus: int) -> _Memory:
    """With zeros where it has no sidecar that can be read."""
    sidecar = named_sidecar(pod["spec"].get("initContainers"))
    status = named_sidecar(pod.get("status", {}).get("initContainerStatuses"))
    env = {item["name"]: item.get("value", "") for item in sidecar.get("env") or ()}
    given = [text for text in sidecar.get("args") or () if text.startswith(SIZE_ARGUMENT)]
    made = most = 0
    with contextlib.suppress(ValueError, LookupError):
        made = int(given[-1].removeprefix(SIZE_ARGUMENT))
        most = int(env.get(MAX_SIZE, 0))
    sees_gpus = at(sidecar, "resources", "claims") or env.get("NVIDIA_VISIBLE_DEVICES") == "all"
    num_gpus = num_gpus if sees_gpus else 0
    if volume := _volume_bytes(pod, made, num_gpus):
        most = min(most, volume)
    annotation = names.annotations_of(pod).get(names.MEMORY_SIZE, "")
    is_told = re.fullmatch("[0-9]{1,18}", annotation) and 0 < int(annotation) <= most
    return _Memory(
        made,
        int(annotation) if is_told else made,
        most,
        _bytes(at(sidecar, "resources", "limits", "memory")),
        _bytes(at(status, "resources", "limits", "memory")),
        _bytes(at(sidecar, "resources", "requests", "memory")),
        num_gpus,
    )


def _volume_bytes(pod: Object, made: int, num_gpus: int) -> int:
    """Where all containers have a memory limit, the kubelet makes a volume in memory no larger than what they
    had together, once and for all; 0: it has the size that is declared."""
    spec = pod["spec"]
    both = [*spec.get("containers", ()), *(spec.get("initContainers") or ())]
    limits = {own["name"]: _bytes(at(own, "resources", "limits", "memory")) for own in both}
    if not all(limits.values()):
        return 0
    return sum(limits[own["name"]] for own in spec["containers"]) + _limit(made, num_gpus)


def _bytes(quantity: Any) -> int:
    return 0 if quantity is None else int(parse_quantity(quantity))


def named_sidecar(containers: Any) -> Mapping[str, Any]:
    """Ours among containers, or what is told of it; empty: it is not there."""
    return next((found for found in containers or () if found["name"] == names.SIDECAR), {})
