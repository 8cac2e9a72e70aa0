"""What the status says of the engine pods and of the sidecars in them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, cast

from lmcache.units import format_size
from lmcache_operator.components.base import (
    Condition,
    Observed,
    Plan,
    Problem,
    Sidecar,
    Status,
    former_conditions,
)
from lmcache_operator.components.engine.gpus import transfer_in_use, transfer_problems
from lmcache_operator.components.figures import hit_percent
from lmcache_operator.components.pods import is_ready, kill_problems
from lmcache_operator.components.reasons import Trouble
from lmcache_operator.components.resize import Resizing
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import Ref
from lmcache_operator.specs.names import ENGINE, engine_name, selector_text

_DEADLINE: Final = "ProgressDeadlineExceeded"
_ATTACHED, _REACHABLE, _DISK = "SidecarAttached", "RemoteTierReachable", "DiskTierAvailable"
_PINNED = "MemoryTierPinned"
_PIN_REMEDY: Final = (
    "Copies between GPU and memory tier are slow there. Raise the limit of locked memory for containers on "
    "the node, or give the pod's sidecar and engine more memory"
)


def engine_status(observed: Observed, plan: Plan) -> Status:
    """Engines serve without their cache: what sidecars say makes nothing unready."""
    num_pods, num_ready = len(observed.pods), sum(map(is_ready, observed.pods))
    desired = _num_desired(observed, plan)
    count = f"{num_ready} of {desired} engine pods are ready"
    summary = f"{count}; {plan.note}" if plan.note else count
    of_sidecars, transfer = _of_sidecars(observed), _transfer(observed, plan)
    known = {
        "images": plan.fields.get("images") or _former(observed, "images"),
        "transfer": transfer,
        "hitPercent": hit_percent(observed),
    }
    resized = plan.fields.get("resizing") or Resizing()
    troubles = [condition for condition in of_sidecars.values() if condition.status == "False"]
    return Status(
        summary=summary,
        progressing=_progressing(observed, plan, desired, num_ready, count),
        conditions={"EngineAvailable": _engine_available(desired, num_ready, summary), **of_sidecars},
        degraded=(
            *(Problem(cast(Trouble, trouble.reason), trouble.message) for trouble in troubles),
            *transfer_problems(transfer),
            *kill_problems(observed),
            *_refused(observed, resized),
        ),
        fields={
            "readyReplicas": num_ready,
            "replicas": num_pods,
            "selector": selector_text(observed.name, ENGINE),
            **{field: value for field, value in known.items() if value},
        },
    )


def _num_desired(observed: Observed, plan: Plan) -> int:
    """As declared; while that is invalid, as before."""
    if any(problem.reason == "InvalidSpec" for problem in plan.problems):
        live = observed.children.get(Ref("StatefulSet", engine_name(observed.name)))
        return int(live["spec"].get("replicas", 1)) if live else len(observed.pods)
    replicas = (observed.resource["spec"].get("engine") or {}).get("replicas")
    return 1 if replicas is None else int(replicas)


def _former(observed: Observed, field: str) -> Object:
    """What the status says at present."""
    return dict((observed.resource.get("status") or {}).get(field) or {})


def _transfer(observed: Observed, plan: Plan) -> Object:
    """As it was while nothing is known of it: the spec is invalid, or no sidecar was asked."""
    former = _former(observed, "transfer")
    planned = plan.fields.get("transfer")
    if planned is None or (observed.probed is None and former):
        return former
    return transfer_in_use(planned, observed.probed.sidecars if observed.probed else ())


def _progressing(observed: Observed, plan: Plan, desired: int, num_ready: int, count: str) -> Condition:
    num_pods = len(observed.pods)
    if any(problem.reason == _DEADLINE for problem in plan.problems):
        return Condition("False", _DEADLINE, f"{count}, and no more get ready")
    if plan.num_outdated:
        message = f"{plan.num_outdated} of {num_pods} engine pods are to be replaced"
        return Condition("True", "Replacing", message)
    if num_pods != desired:
        return Condition("True", "Scaling", f"{num_pods} of {desired} engine pods exist")
    if num_ready != desired:
        return Condition("True", "Starting", count)
    if waits := _resize_waits(observed, plan.fields.get("resizing") or Resizing()):
        more = f"; {len(waits) - 1} more" if len(waits) > 1 else ""
        return Condition("True", "Resizing", f"memory tiers get another size: {waits[0]}{more}")
    if plan.note:
        return Condition("False", "ResizePending", plan.note)
    return Condition("False", "Complete", f"all {desired} engine pods are as declared")


def _resize_waits(observed: Observed, resized: Resizing) -> list[str]:
    """A sentence for each pod that is on its way to its size."""
    due = {step.pod["metadata"]["name"]: format_size(step.num_bytes) for step in resized.steps}
    found = [*resized.waits, *(f"pod {name} is to have {size}" for name, size in due.items())]
    for sidecar in observed.probed.sidecars if observed.probed else ():
        is_there = sidecar.memory_bytes in (None, sidecar.memory_target)
        if not is_there and sidecar.pod in resized.followed:
            why = sidecar.resize_problem or f"its sidecar has {format_size(sidecar.memory_bytes or 0)} by now"
            found.append(f"pod {sidecar.pod}: {why}")
    return found


def _refused(observed: Observed, resized: Resizing) -> Iterator[Problem]:
    """The first pod that can't have its size stands for all."""
    if resized.refused:
        name, refusal = resized.refused[0]
        number, size = f"{len(resized.refused)} of {len(observed.pods)}", format_size(refusal.num_bytes)
        what = f"{number} memory tiers can't have {size}"
        yield Problem("ResizeInfeasible", f"{what}: pod {name}: {refusal.message}")


def _engine_available(desired: int, num_ready: int, count: str) -> Condition:
    if num_ready:
        return Condition("True", "EnginesReady", count)
    if desired == 0:
        return Condition("False", "ScaledToZero", "no engine pods are asked for")
    return Condition("False", "NoEngineReady", f"none of {desired} engine pods is ready")


def _of_sidecars(observed: Observed) -> dict[str, Condition]:
    before = former_conditions(observed.resource)
    former = {kind: before[kind] for kind in (_ATTACHED, _REACHABLE, _DISK, _PINNED) if kind in before}
    if observed.probed is None:
        return former
    sidecars, is_certain = observed.probed
    found = {_ATTACHED: _attached(sidecars)}
    was_known = _ATTACHED in former and former[_ATTACHED].status != "Unknown"
    if found[_ATTACHED].status == "Unknown" and was_known and not is_certain:
        return former
    with_remote = [sidecar for sidecar in sidecars if sidecar.is_remote_reachable is not None]
    if lost := [sidecar for sidecar in with_remote if not sidecar.is_remote_reachable]:
        where = f"pod {lost[0].pod}: {lost[0].remote_reason}"
        message = f"{len(lost)} of {len(sidecars)} sidecars get no answer from it: {where}"
        found[_REACHABLE] = Condition("False", "RemoteTierUnreachable", message)
    elif with_remote:
        found[_REACHABLE] = Condition("True", "Reachable", "no sidecar misses an answer from it")
    with_disk = [sidecar for sidecar in sidecars if sidecar.is_disk_available is not None]
    if bare := [sidecar for sidecar in with_disk if not sidecar.is_disk_available]:
        message = (
            f"{len(bare)} of {len(with_disk)} disk tiers are off: pod {bare[0].pod}: {bare[0].disk_reason}"
        )
        found[_DISK] = Condition("False", "DiskTierOff", message)
    elif with_disk:
        found[_DISK] = Condition("True", "Available", f"all {len(with_disk)} disk tiers are in use")
    if pinned := _pinned(sidecars):
        found[_PINNED] = pinned
    return found


def _pinned(sidecars: Sequence[Sidecar]) -> Condition | None:
    """Whether CUDA has pinned the memory tiers; None: no engine on a GPU says anything about it."""
    with_gpu = [sidecar for sidecar in sidecars if sidecar.is_memory_pinned is not None]
    if failed := [sidecar for sidecar in with_gpu if not sidecar.is_memory_pinned]:
        count = f"{len(failed)} of {len(with_gpu)} memory tiers are not fully pinned"
        why = f"pod {failed[0].pod}: {failed[0].pin_problem}"
        return Condition("False", "MemoryNotPinned", f"{count}. {_PIN_REMEDY}. First: {why}")
    if with_gpu:
        return Condition("True", "Pinned", f"the memory tiers of all {len(with_gpu)} GPU pods are pinned")
    return None


def _attached(sidecars: Sequence[Sidecar]) -> Condition:
    """The first sidecar with something to report stands for all of these."""

    def count(some: Sequence[Sidecar]) -> str:
        return f"{len(some)} of {len(sidecars)}"

    if failed := [sidecar for sidecar in sidecars if sidecar.reason]:
        why = f"pod {failed[0].pod}: {failed[0].reason}"
        return Condition("False", "SidecarNotReady", f"{count(failed)} sidecars are not ready: {why}")
    if silent := [sidecar for sidecar in sidecars if not sidecar.answers]:
        why = f"pod {silent[0].pod}; the operator must reach the pods' metrics port"
        return Condition("Unknown", "NoAnswer", f"{count(silent)} sidecars don't answer: {why}")
    attached = [sidecar for sidecar in sidecars if sidecar.is_attached]
    if bare := [s for s in sidecars if s.is_engine_ready and not s.is_attached]:
        why = f"the log of the engine in pod {bare[0].pod} says why"
        return Condition(
            "False", "EngineNotAttached", f"{count(bare)} engines serve without their cache: {why}"
        )
    if not attached:
        return Condition("Unknown", "NoEngine", "no engine runs yet")
    return Condition("True", "Attached", f"{count(attached)} engines use their sidecars")
