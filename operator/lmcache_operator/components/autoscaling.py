"""The component: the sizes that were chosen for a cluster, and what they were chosen from.

They are in a ConfigMap, for an operator that starts again, and never in the spec, which is the user's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lmcache_operator.api.autoscaling import AUTO, OFF
from lmcache_operator.api.parse import Cluster, Sizes
from lmcache_operator.autoscaling.report import Choice, Report, Saved, restore, save, steady
from lmcache_operator.components.base import (
    Component,
    Condition,
    Context,
    Event,
    Observed,
    Plan,
    Status,
    former_conditions,
)
from lmcache_operator.components.differences import differences
from lmcache_operator.specs import Object, names
from lmcache_operator.specs.kinds import Ref

_SAVED_IN = "savedIn"
_ACTIVE = "AutoscalingActive"
_TIERS = ("memory", "remote")


class Autoscaling(Component):
    """Sizes, and the state that they come from."""

    name = names.AUTOSCALING

    def refs(self, cluster_name: str) -> tuple[Ref, ...]:
        """One ConfigMap."""
        return (Ref("ConfigMap", names.autoscaling_name(cluster_name)),)

    def sized(self, cluster: Cluster, observed: Observed) -> Cluster:
        """With what was chosen, within the bounds of now; who declares another size means that one.

        As it is written down first: what is done about it is then the same for whoever does it.
        """
        scaling, tiers = cluster.spec.autoscaling, cluster.spec.tiers
        known: Report | Saved | None = saved(observed) or observed.autoscaling
        if scaling.mode != AUTO or known is None:
            return cluster
        memory = shards = None
        if scaling.memory and tiers.memory:
            declared = tiers.memory.num_bytes
            memory = _within(known.memory, declared, scaling.memory_bounds(declared))
        if scaling.remote and tiers.managed:
            declared = tiers.managed.shards
            shards = _within(known.shards, declared, scaling.shard_bounds(declared))
        return replace(cluster, chosen=Sizes(memory, shards))

    def render(self, cluster: Cluster, context: Context) -> list[Object]:
        """Nothing: of a cluster that nobody has watched nothing is known."""
        return []

    def plan(self, cluster: Cluster, observed: Observed, context: Context) -> Plan:
        """Written when a size was chosen, and else in each hour once; deleted when it is of no use."""
        data = {} if cluster.spec.autoscaling.mode == OFF else _data(observed)
        name = names.autoscaling_name(cluster.name)
        wanted = [names.child(cluster, self.name, "ConfigMap", name, data=dict(data))] if data else []
        return replace(differences(wanted, observed), fields={"mode": cluster.spec.autoscaling.mode})

    def status(self, observed: Observed, plan: Plan) -> Status:
        """As it was while nothing is known, and while what is known is nearly the same."""
        before, mode = observed.resource.get("status") or {}, plan.fields.get("mode")
        former, report = before.get("autoscaling") or {}, observed.autoscaling
        if mode == OFF or not (former or report):
            return Status()
        if mode is None or report is None:
            conditions = former_conditions(observed.resource)
            kept = {kind: conditions[kind] for kind in (_ACTIVE,) if kind in conditions}
            return Status(conditions=kept, fields={"autoscaling": former} if former else {})
        found = dict(steady(former, _told(report.status, mode)))
        return Status(
            conditions={_ACTIVE: _active(found, mode)},
            fields={"autoscaling": found},
            events=tuple(_events(former, found)),
        )


def saved(observed: Observed) -> Saved | None:
    """What the ConfigMap says; None if there is none, or one that is not as it was written."""
    try:
        return restore(_live(observed))
    except ValueError:
        return None


def _told(status: Mapping[str, Any], mode: str) -> Object:
    """Who only recommends goes nowhere next."""
    tiers = {tier: dict(status[tier]) for tier in _TIERS if tier in status}
    for told in tiers.values() if mode != AUTO else ():
        told.pop("next", None)
    return {**status, **tiers}


def _active(found: Object, mode: str) -> Condition:
    tiers = {tier: found[tier] for tier in _TIERS if tier in found}
    limits = {told.get("limitedBy") for told in tiers.values()}
    message = "; ".join(f"{tier}: {told.get('reason')}" for tier, told in tiers.items())
    if "Frozen" in limits:
        return Condition("False", "AutoscalingFrozen", message)
    if limits <= {"Samples", "Young"}:
        return Condition("Unknown", "Counting", message or "nothing is known yet")
    return Condition("True", "Sizing" if mode == AUTO else "Recommending", message)


def _events(former: Object, found: Object) -> Iterator[Event]:
    """What has changed since it was told the last time; an older definition has no place for that."""
    for tier in _TIERS:
        before, after = former.get(tier) or {}, found.get(tier) or {}
        for name, reason in (("recommended", "SizeRecommended"), ("next", "SizeChosen")):
            is_news = name in after and after[name] != before.get(name, after.get("current"))
            if before and is_news and after[name] != after.get("current"):
                yield Event("Normal", reason, f"{tier}: {after.get('reason')}")


def _live(observed: Observed) -> Mapping[str, str]:
    return next((child.get("data") or {} for child in observed.children.values()), {})


def _data(observed: Observed) -> Mapping[str, str]:
    live, former, report = _live(observed), saved(observed), observed.autoscaling
    # No more of the time: two operators that undo each other's would never be seen to write the same again.
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
