"""Status of the engine pods and of their sidecars. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, cast, get_args

from lmcache_operator.components.autoscaling.tier_status import hit_percent, tenant_usage
from lmcache_operator.components.engine.authentication import (
    TOKENS_REQUIRED,
    silence_remedy,
    tokens_required,
)
from lmcache_operator.components.engine.encryption import rows_encrypted
from lmcache_operator.components.engine.gpus import transfer_in_use, transfer_problems
from lmcache_operator.components.engine.tenants import (
    AWAITED_REASONS,
    DIGEST_FIELD,
    NAMES_FIELD,
    TENANTS_KNOWN,
    tenants_known,
)
from lmcache_operator.contract.base import ComponentStatus, Observed, Plan, Sidecar
from lmcache_operator.contract.conditions import Condition, Problem, Trouble, former_conditions
from lmcache_operator.pods.pods import is_ready, kill_problems
from lmcache_operator.pods.resize import Resizing
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import Ref
from lmcache_operator.specs.names import ENGINE, engine_name, selector_text
from lmcache_store.common.units import format_size

_DEADLINE: Final = "ProgressDeadlineExceeded"
_ATTACHED, _REACHABLE, _DISK = "SidecarAttached", "RemoteTierReachable", "DiskTierAvailable"
_PINNED, _ENCRYPTED = "MemoryTierPinned", "RowsEncrypted"


def engine_status(observed: Observed, plan: Plan) -> ComponentStatus:
    """Status of the engine component.

    A sidecar's problems degrade the cluster, but never make it unready: engines serve without their cache.
    """
    num_pods, num_ready = len(observed.pods), sum(map(is_ready, observed.pods))
    desired = _num_desired(observed, plan)
    count = f"{num_ready} of {desired} engine pods are ready"
    summary = f"{count}; {plan.note}" if plan.note else count
    conditions, transfer = _sidecar_conditions(observed), _transfer(observed, plan)
    tenants = tenants_known(observed, plan.fields.get(DIGEST_FIELD))
    if tenants is not None:
        conditions[TENANTS_KNOWN] = tenants
    known = {
        "images": plan.fields.get("images") or _former(observed, "images"),
        "transfer": transfer,
    }
    if desired or num_pods:  # without pods, no cache has these figures
        known["hitPercent"] = hit_percent(observed)
        known["tenants"] = tenant_usage(observed, plan.fields.get(NAMES_FIELD))
    resized = plan.fields.get("resizing") or Resizing()
    troubles = [condition for condition in conditions.values() if _is_trouble(condition)]
    return ComponentStatus(
        summary=summary,
        progressing=_progressing(observed, plan, desired, num_ready, count),
        conditions={"EngineAvailable": _engine_available(desired, num_ready, summary), **conditions},
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
        awaits_sidecars=tenants is not None and tenants.reason in AWAITED_REASONS,
    )


def _is_trouble(condition: Condition) -> bool:
    return condition.status == "False" and condition.reason in get_args(Trouble)


def _num_desired(observed: Observed, plan: Plan) -> int:
    """Number of engine pods that the spec asks for; of the StatefulSet while the spec is invalid."""
    if any(problem.reason == "InvalidSpec" for problem in plan.problems):
        live = observed.children.get(Ref("StatefulSet", engine_name(observed.name)))
        return int(live["spec"].get("replicas", 1)) if live else len(observed.pods)
    replicas = (observed.resource["spec"].get("engine") or {}).get("replicas")
    return 1 if replicas is None else int(replicas)


def _former(observed: Observed, field: str) -> Object:
    """One field of the present status; empty if it is absent."""
    return dict((observed.resource.get("status") or {}).get(field) or {})


def _transfer(observed: Observed, plan: Plan) -> Object:
    """``status.transfer``. Keeps the present value while the spec is invalid or no sidecar was probed."""
    former = _former(observed, "transfer")
    planned = plan.fields.get("transfer")
    if planned is None or (observed.probed is None and former):
        return former
    return transfer_in_use(planned, observed.probed.sidecars if observed.probed else ())


def _progressing(observed: Observed, plan: Plan, desired: int, num_ready: int, count: str) -> Condition:
    num_pods = len(observed.pods)
    if any(problem.reason == _DEADLINE for problem in plan.problems):
        return Condition("False", _DEADLINE, f"{count}; the others did not become ready in time")
    if plan.num_outdated:
        message = f"Replacing engine pods: {plan.num_outdated} of {num_pods} do not match the spec yet"
        return Condition("True", "Replacing", message)
    if num_pods != desired:
        return Condition("True", "Scaling", f"{num_pods} of {desired} engine pods exist")
    if num_ready != desired:
        return Condition("True", "Starting", count)
    if waits := _resize_waits(observed, plan.fields.get("resizing") or Resizing()):
        more = f"; {len(waits) - 1} more" if len(waits) > 1 else ""
        return Condition("True", "Resizing", f"Resizing memory tiers: {waits[0]}{more}")
    if plan.note:
        return Condition("False", "ResizePending", plan.note)
    return Condition("False", "Complete", f"All {desired} engine pods match the spec.")


def _resize_waits(observed: Observed, resized: Resizing) -> list[str]:
    """A sentence for each pod whose memory tier does not have its final size yet."""
    due = {step.pod["metadata"]["name"]: format_size(step.num_bytes) for step in resized.steps}
    waits = [*resized.waits, *(f"pod {name} will be resized to {size}" for name, size in due.items())]
    for sidecar in observed.probed.sidecars if observed.probed else ():
        is_resized = sidecar.memory_bytes in (None, sidecar.memory_target)
        if not is_resized and sidecar.pod in resized.followed:
            why = sidecar.resize_problem or f"its tier has {format_size(sidecar.memory_bytes or 0)} so far"
            waits.append(f"pod {sidecar.pod}: {why}")
    return waits


def _refused(observed: Observed, resized: Resizing) -> Iterator[Problem]:
    """One problem for all pods that could not be resized; it quotes the first pod."""
    if resized.refused:
        name, refusal = resized.refused[0]
        number, size = f"{len(resized.refused)} of {len(observed.pods)}", format_size(refusal.num_bytes)
        what = f"{number} memory tiers cannot be resized to {size}"
        yield Problem("ResizeInfeasible", f"{what}. First: pod {name}: {refusal.message}")


def _engine_available(desired: int, num_ready: int, count: str) -> Condition:
    if num_ready:
        return Condition("True", "EnginesReady", count)
    if desired == 0:
        return Condition("False", "ScaledToZero", "spec.engine.replicas is 0")
    return Condition("False", "NoEngineReady", f"0 of {desired} engine pods are ready")


def _sidecar_conditions(observed: Observed) -> dict[str, Condition]:
    kinds = _ATTACHED, _REACHABLE, _DISK, _PINNED, _ENCRYPTED, TOKENS_REQUIRED
    former = former_conditions(observed.resource, *kinds)
    if observed.probed is None:
        return former
    sidecars, is_certain = observed.probed
    conditions = {_ATTACHED: _attached(sidecars, silence_remedy(observed.resource))}
    was_known = _ATTACHED in former and former[_ATTACHED].status != "Unknown"
    if conditions[_ATTACHED].status == "Unknown" and was_known and not is_certain:
        return former
    with_remote = [sidecar for sidecar in sidecars if sidecar.is_remote_reachable is not None]
    if lost := [sidecar for sidecar in with_remote if not sidecar.is_remote_reachable]:
        where = f"pod {lost[0].pod}: {lost[0].remote_reason}"
        message = f"{len(lost)} of {len(sidecars)} sidecars cannot reach the remote tier. First: {where}"
        conditions[_REACHABLE] = Condition("False", "RemoteTierUnreachable", message)
    elif with_remote:
        count = f"{len(with_remote)} of" if len(with_remote) < len(sidecars) else "All"
        message = f"{count} {len(sidecars)} sidecars can reach the remote tier."
        conditions[_REACHABLE] = Condition("True", "Reachable", message)
    with_disk = [sidecar for sidecar in sidecars if sidecar.is_disk_available is not None]
    if bare := [sidecar for sidecar in with_disk if not sidecar.is_disk_available]:
        where = f"pod {bare[0].pod}: {bare[0].disk_reason}"
        message = f"{len(bare)} of {len(with_disk)} disk tiers are off. First: {where}"
        conditions[_DISK] = Condition("False", "DiskTierOff", message)
    elif with_disk:
        conditions[_DISK] = Condition("True", "Available", f"All {len(with_disk)} disk tiers are in use.")
    if pinned := _pinned(sidecars):
        conditions[_PINNED] = pinned
    declared = {
        _ENCRYPTED: rows_encrypted(observed, sidecars),
        TOKENS_REQUIRED: tokens_required(observed, sidecars),
    }
    for kind, condition in declared.items():
        if condition:
            is_early = condition.status == "Unknown" and not is_certain
            conditions[kind] = former.get(kind, condition) if is_early else condition
    return conditions


def _pinned(sidecars: Sequence[Sidecar]) -> Condition | None:
    """Whether CUDA has pinned the memory tiers; None: no sidecar reports it, such as without GPUs."""
    with_gpu = [sidecar for sidecar in sidecars if sidecar.is_memory_pinned is not None]
    if failed := [sidecar for sidecar in with_gpu if not sidecar.is_memory_pinned]:
        count = f"{len(failed)} of {len(with_gpu)} memory tiers are not fully pinned"
        why = f"pod {failed[0].pod}: {failed[0].pin_problem}"
        slow = "Copies between GPU and memory tier are slow there"
        return Condition("False", "MemoryNotPinned", f"{count}. {slow}. First: {why}")
    if with_gpu:
        return Condition("True", "Pinned", f"The memory tiers of all {len(with_gpu)} GPU pods are pinned")
    return None


def _attached(sidecars: Sequence[Sidecar], remedy: str) -> Condition:
    """Whether engines use their sidecars. A message quotes the first sidecar that has the problem.

    ``remedy``: what to do if sidecars do not answer.
    """

    def count(part: Sequence[Sidecar]) -> str:
        return f"{len(part)} of {len(sidecars)}"

    if failed := [sidecar for sidecar in sidecars if sidecar.reason]:
        why = f"pod {failed[0].pod}: {failed[0].reason}"
        return Condition("False", "SidecarNotReady", f"{count(failed)} sidecars are not ready. First: {why}")
    if silent := [sidecar for sidecar in sidecars if not sidecar.answers]:
        why = f"pod {silent[0].pod}. {remedy}"
        return Condition("Unknown", "NoAnswer", f"{count(silent)} sidecars do not answer. First: {why}")
    attached = [sidecar for sidecar in sidecars if sidecar.is_attached]
    if bare := [s for s in sidecars if s.is_engine_ready and not s.is_attached]:
        message = f"{count(bare)} engines serve without their cache. See the log of pod {bare[0].pod}"
        return Condition("False", "EngineNotAttached", message)
    if not attached:
        return Condition("Unknown", "NoEngine", "No engine is running yet.")
    return Condition("True", "Attached", f"{count(attached)} engines use their sidecars")
