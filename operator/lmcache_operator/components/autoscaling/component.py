"""The autoscaling component: chosen sizes and the state behind them, in a ConfigMap.

The ConfigMap survives restarts of the operator. The operator never writes sizes to the user's spec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lmcache_operator.api.autoscaling import AUTO, OFF
from lmcache_operator.api.parse import Cluster, Sizes
from lmcache_operator.contract.base import Component, ComponentStatus, Context, Observed, Plan
from lmcache_operator.contract.conditions import Condition, Event, former_conditions
from lmcache_operator.pods.differences import differences
from lmcache_operator.policy.report import Choice, Report, Saved, restore, save, steady
from lmcache_operator.specs import Object, names

_SAVED_IN = "savedIn"
_ACTIVE = "AutoscalingActive"
_TIERS = ("memory", "remote")


class Autoscaling(Component):
    """ConfigMap, status, condition and Events of autoscaling."""

    name = names.AUTOSCALING
    kinds = ("ConfigMap",)
    renders_from_spec_only = False

    def with_records(self, cluster: Cluster, observed: Observed) -> Cluster:
        """Return the cluster with the chosen sizes, limited to the present bounds.

        If the declared size changed since the choice, it replaces the choice. The ConfigMap has precedence
        over this process's latest report, so that several operators apply the same sizes.
        """
        scaling, tiers = cluster.spec.autoscaling, cluster.spec.tiers
        choices: Report | Saved | None = saved(observed) or observed.autoscaling
        if scaling.mode != AUTO or choices is None:
            return cluster
        memory = shards = None
        if scaling.memory and tiers.memory:
            declared = tiers.memory.num_bytes
            memory = _within(choices.memory, declared, scaling.memory_bounds(declared))
        if scaling.remote and tiers.managed:
            declared = tiers.managed.shards
            shards = _within(choices.shards, declared, scaling.shard_bounds(declared))
        return replace(cluster, chosen=Sizes(memory, shards))

    def render(self, cluster: Cluster, context: Context) -> list[Object]:
        """Render nothing: there is no state before the first lookups."""
        return []

    def plan(self, cluster: Cluster, observed: Observed, context: Context) -> Plan:
        """Write the ConfigMap for a new choice, and else at most once an hour; delete it if mode is Off."""
        data = {} if cluster.spec.autoscaling.mode == OFF else _data(observed)
        wanted = [names.child(cluster, self.name, "ConfigMap", data=dict(data))] if data else []
        return replace(differences(wanted, observed), fields={"mode": cluster.spec.autoscaling.mode})

    def status(self, observed: Observed, plan: Plan) -> ComponentStatus:
        """Report the latest decision. The status stays without a report, and for small changes of figures."""
        status, mode = observed.resource.get("status") or {}, plan.fields.get("mode")
        former, report = status.get("autoscaling") or {}, observed.autoscaling
        if mode == OFF or not (former or report):
            return ComponentStatus()
        if mode is None or report is None:
            conditions = former_conditions(observed.resource, _ACTIVE)
            return ComponentStatus(conditions=conditions, fields={"autoscaling": former} if former else {})
        current = dict(steady(former, _in_mode(report.status, mode)))
        return ComponentStatus(
            conditions={_ACTIVE: _active(current, mode)},
            fields={"autoscaling": current},
            events=tuple(_events(former, current)),
        )


def saved(observed: Observed) -> Saved | None:
    """Read the ConfigMap. Returns None if it is missing, edited or damaged."""
    try:
        return restore(_live(observed))
    except ValueError:
        return None


def _in_mode(status: Mapping[str, Any], mode: str) -> Object:
    """Remove the next size unless mode is Auto: other modes change no size."""
    tiers = {tier: dict(status[tier]) for tier in _TIERS if tier in status}
    for tier_status in tiers.values() if mode != AUTO else ():
        tier_status.pop("next", None)
    return {**status, **tiers}


def _active(scaling: Object, mode: str) -> Condition:
    tiers = {tier: scaling[tier] for tier in _TIERS if tier in scaling}
    limits = {status.get("limitedBy") for status in tiers.values()}
    message = "; ".join(f"{tier}: {status.get('reason')}" for tier, status in tiers.items())
    if "Frozen" in limits:
        return Condition("False", "AutoscalingFrozen", message)
    if limits <= {"Samples", "Young"}:
        return Condition("Unknown", "Counting", message or "no lookups were counted yet")
    return Condition("True", "Sizing" if mode == AUTO else "Recommending", message)


def _events(former: Object, current: Object) -> Iterator[Event]:
    """Report new recommendations and choices; none without a former status, as with an older CRD."""
    for tier in _TIERS:
        before, after = former.get(tier) or {}, current.get(tier) or {}
        for name, reason in (("recommended", "SizeRecommended"), ("next", "SizeChosen")):
            is_changed = name in after and after[name] != before.get(name, after.get("current"))
            if before and is_changed and after[name] != after.get("current"):
                yield Event("Normal", reason, f"{tier}: {after.get('reason')}")


def _live(observed: Observed) -> Mapping[str, str]:
    return next((child.get("data") or {} for child in observed.children.values()), {})


def _data(observed: Observed) -> Mapping[str, str]:
    live, former, report = _live(observed), saved(observed), observed.autoscaling
    # Only the hour: with minutes, two operators that undo each other's writes would never repeat a write.
    hour = observed.now.strftime("%Y-%m-%dT%H")
    if report is None:
        return live if former else {}
    is_chosen = former is not None and former[:2] == (report.memory, report.shards)
    if former and is_chosen and (former.state == report.state or live.get(_SAVED_IN) == hour):
        return live
    if not (report.memory or report.shards or report.state):
        return {}
    return save(report) | {_SAVED_IN: hour}


def _within(choice: Choice | None, declared: int, bounds: tuple[int, int]) -> int | None:
    if choice is None or choice.instead_of != declared:
        return None
    return min(max(choice.size, bounds[0]), bounds[1])
