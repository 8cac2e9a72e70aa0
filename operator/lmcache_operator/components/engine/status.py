"""Status of the engine pods and of their sidecars. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, cast

from lmcache_operator.components.engine.features import FEATURES, TIERS
from lmcache_operator.components.engine.features.tokens import silence_remedy
from lmcache_operator.components.engine.gpus import transfer_in_use, transfer_problems
from lmcache_operator.components.figures import SHARE_POINTS, percent_of, steady_figures, summable
from lmcache_operator.contract.base import ComponentStatus, Observed, Plan, SidecarState
from lmcache_operator.contract.conditions import (
    TROUBLES,
    Condition,
    Problem,
    Trouble,
    failure_of,
    former_conditions,
    problem_message,
    silence_of,
)
from lmcache_operator.pods.groups import count_engines, groups_of, num_nodes, sets_of
from lmcache_operator.pods.pods import kill_problems
from lmcache_operator.pods.resize import Resizing
from lmcache_operator.specs import Object
from lmcache_operator.specs.merge import dig
from lmcache_operator.specs.names import ENGINE, POD_INDEX_LABEL, selector_text
from lmcache_store.common.units import format_size

_DEADLINE: Final = "ProgressDeadlineExceeded"
_ATTACHED: Final = "SidecarAttached"
_FIRST_PODS: Final = f",{POD_INDEX_LABEL}=0"
"""Selector of one pod of each engine over several nodes: autoscalers take the average over pods."""


def engine_status(observed: Observed, plan: Plan) -> ComponentStatus:
    """Status of the engine component.

    A sidecar's problems degrade the cluster, but never make it unready: engines serve without their cache.
    """
    num_engines, num_ready = count_engines(observed)
    desired = _num_desired(observed, plan)
    count = f"{num_ready} of {desired} {_noun(observed)} are ready"
    summary = f"{count}; {plan.note}" if plan.note else count
    conditions, transfer = _sidecar_conditions(observed, plan), _transfer(observed, plan)
    images = plan.fields.get("images") or dig(observed.resource, "status", "images")
    known = {"images": images, "transfer": transfer}
    if desired or num_engines:  # without pods, no cache has these figures
        known["hitPercent"] = _hit_percent(observed)
        for feature in FEATURES:
            known |= feature.status_fields(observed, plan)
    resized = plan.fields.get("resizing") or Resizing()
    failed = (condition for condition in conditions.values() if condition.status == "False")
    troubles = [condition for condition in failed if condition.reason in TROUBLES]
    return ComponentStatus(
        summary=summary,
        serves=num_ready > 0 if desired or num_ready else None,
        progressing=_progressing(observed, plan, desired, num_ready, count),
        conditions={"EngineAvailable": _engine_available(desired, num_ready, count, summary), **conditions},
        degraded=(
            *(Problem(cast(Trouble, trouble.reason), trouble.message) for trouble in troubles),
            *transfer_problems(transfer),
            *kill_problems(observed),
            *_refused(observed, resized),
        ),
        fields={
            "readyReplicas": num_ready,
            "replicas": num_engines,
            "selector": selector_text(observed.name, ENGINE)
            + _FIRST_PODS * (num_nodes(observed.resource) > 1),
            **{field: value for field, value in known.items() if value},
        },
        awaits_sidecars=any(
            feature.condition_type in conditions
            and conditions[feature.condition_type].reason in feature.awaited_reasons
            for feature in FEATURES
        ),
    )


def _num_desired(observed: Observed, plan: Plan) -> int:
    """Number of engine pods that the spec asks for; of the StatefulSet while the spec is invalid."""
    if any(problem.reason == "InvalidSpec" for problem in plan.problems):
        sizes = [(number, int(owner["spec"].get("replicas", 1))) for number, owner in sets_of(observed)]
        return sum(size if number is None else min(size, 1) for number, size in sizes)
    replicas = (observed.resource["spec"].get("engine") or {}).get("replicas")
    return 1 if replicas is None else int(replicas)


def _transfer(observed: Observed, plan: Plan) -> Object:
    """``status.transfer``. Keeps the present value while the spec is invalid or no sidecar was probed."""
    former: Object = dig(observed.resource, "status", "transfer") or {}
    planned = plan.fields.get("transfer")
    if planned is None or (observed.probed is None and former):
        return former
    return transfer_in_use(planned, observed.probed.sidecars if observed.probed else ())


def _progressing(observed: Observed, plan: Plan, desired: int, num_ready: int, count: str) -> Condition:
    num_pods, (num_engines, _) = len(observed.pods), count_engines(observed)
    if any(problem.reason == _DEADLINE for problem in plan.problems):
        return Condition("False", _DEADLINE, f"{count}; the others did not become ready in time")
    if plan.num_outdated:
        message = f"Replacing engine pods: {plan.num_outdated} of {num_pods} do not match the spec yet"
        if former := plan.fields.get("discarded"):
            message += f"; rows with the former {former} are not found any more"
        return Condition("True", "Replacing", message)
    if num_engines != desired:
        return Condition("True", "Scaling", f"{num_engines} of {desired} {_noun(observed)} exist")
    if num_ready != desired:
        return Condition("True", "Starting", count)
    if waits := _resize_waits(observed, plan.fields.get("resizing") or Resizing()):
        more = f"; {len(waits) - 1} more" if len(waits) > 1 else ""
        return Condition("True", "Resizing", f"Resizing memory tiers: {waits[0]}{more}")
    if plan.note:
        return Condition("False", "ResizePending", plan.note)
    return Condition("False", "Complete", f"All {desired} {_noun(observed)} match the spec.")


def _noun(observed: Observed) -> str:
    """The engines that are counted. Those of several nodes are ready together with all their pods."""
    nodes = num_nodes(observed.resource)
    return f"engines (of {nodes} pods each)" if nodes > 1 else "engine pods"


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
        problem = f"memory tiers cannot be resized to {format_size(resized.refused[0][1].num_bytes)}"
        refused = [(name, refusal.message) for name, refusal in resized.refused]
        yield Problem("ResizeInfeasible", problem_message(problem, refused, len(observed.pods)))


def _engine_available(desired: int, num_ready: int, count: str, summary: str) -> Condition:
    if num_ready:
        return Condition("True", "EnginesReady", summary)
    if desired == 0:
        return Condition("False", "ScaledToZero", "spec.engine.replicas is 0")
    return Condition("False", "NoEngineReady", count)


def _hit_percent(observed: Observed) -> Object:
    """``status.hitPercent``: the share of looked-up tokens that each tier hit."""
    sidecars = summable(observed)
    num_tokens = sum(sidecar.lookups.tokens for sidecar in sidecars)
    present = [tier.name for tier in TIERS if any(map(tier.is_present, sidecars))]
    percent: Object = {}
    for tier in ("engine", "memory", *present) if num_tokens else ():
        num_hits = sum(sidecar.lookups.hit_tokens.get(tier, 0) for sidecar in sidecars)
        percent[tier] = percent_of(num_hits, num_tokens)
    return steady_figures(dig(observed.resource, "status", "hitPercent"), percent, SHARE_POINTS)


def _sidecar_conditions(observed: Observed, plan: Plan) -> dict[str, Condition]:
    conditions, is_silence = former_conditions(observed.resource, _ATTACHED), False
    if observed.probed:
        # The launchers of a group of which a pod is not ready end all its engines.
        serving = {
            pod["metadata"]["name"] for group in groups_of(observed) if group.is_ready for pod in group.pods
        }
        probed = observed.probed.sidecars
        sidecars = [each._replace(is_engine_ready=each.pod in serving) for each in probed]
        attached = _attached(sidecars, silence_remedy(observed.resource))
        was_known = _ATTACHED in conditions and conditions[_ATTACHED].status != "Unknown"
        is_silence = attached.status == "Unknown" and was_known and not observed.probed.is_certain
        conditions = conditions if is_silence else {_ATTACHED: attached}
    for feature in FEATURES:
        if condition := feature.steady_condition(observed, plan, is_silence=is_silence):
            conditions[feature.condition_type] = condition
    return conditions


def _attached(sidecars: Sequence[SidecarState], remedy: str) -> Condition:
    """Whether engine pods use their sidecars. A message quotes the first sidecar that has the problem.

    ``remedy``: what to do if sidecars do not answer.
    """
    total = len(sidecars)
    failed = [(each.pod, each.reason) for each in sidecars if each.reason]
    silent = [each.pod for each in sidecars if not each.answers]
    unused = [
        (each.pod, each.attach_refusal)
        for each in sidecars
        if each.is_engine_ready and (each.attach_refusal or not each.is_attached)
    ]
    problem, see_log = "engine pods serve without their cache", "See the log of this pod"
    num_attached = sum(each.is_attached for each in sidecars)
    return (
        failure_of("SidecarNotReady", "sidecars are not ready", failed, total)
        or silence_of("NoAnswer", "sidecars do not answer", silent, total, remedy)
        or failure_of("EngineNotAttached", problem, unused, total, see_log)
        or (Condition("Unknown", "NoEngine", "No engine is running yet.") if not num_attached else None)
        or Condition("True", "Attached", f"{num_attached} of {total} engine pods use their sidecars.")
    )
