"""Sizes that were chosen: what is rendered with them, and what a restart finds."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from lmcache_operator.api.parse import parse
from lmcache_operator.autoscaling.report import Choice, Report
from lmcache_operator.components import COMPONENTS
from lmcache_operator.components.base import Context, Observed, Plan
from lmcache_operator.components.engine.engine import spec_hash
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.reconcile.plan import plan
from lmcache_operator.specs.kinds import Ref
from lmcache_operator.specs.names import STOCK_IMAGES

from tests.harness.autoscaling import ACCEPTED, GIB, REFUSED
from tests.harness.operator_model import World, cluster
from tests.harness.operator_plans import carry_out

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CONFIG = Ref("ConfigMap", "demo-autoscaling")
BOUNDS = {"minSize": "32Gi", "maxSize": "256Gi"}
TIERS = {"memory": {"size": "64Gi"}, "remote": {"managed": {"memoryPerShard": "1Gi", "shards": 2}}}
CHOSEN = Report({}, memory=Choice(108 * GIB, 64 * GIB), shards=Choice(3, 2), state="counted")


class Rig:
    """One cluster, and of its objects the ConfigMap."""

    def __init__(self, **autoscaling: Any) -> None:
        self.time, self.world = NOW, World(cluster())
        self.declare(**autoscaling)

    def declare(self, tiers: Any = TIERS, **autoscaling: Any) -> None:
        self.resource = cluster(tiers=tiers)
        self.resource["spec"]["autoscaling"] = autoscaling

    def plan(self, report: Report | None = None) -> dict[str, Plan]:
        """What is due; the ConfigMap is written."""
        blank = Observed(resource=self.resource, now=self.time, autoscaling=report)
        observed = {own.name: blank for own in COMPONENTS}
        observed["autoscaling"] = replace(blank, children=dict(self.world.objects))
        plans, fault = plan(COMPONENTS, self.resource, observed, Context(STOCK_IMAGES))
        assert fault is None
        carry_out(self.world, plans["autoscaling"])
        return plans

    def sizes(self, report: Report | None = None) -> tuple[int, int]:
        """Of pods and of the number of shards, as they are rendered."""
        plans = self.plan(report)
        (engine,) = [one for one in plans["engine"].apply if one["kind"] == "StatefulSet"]
        sidecar = engine["spec"]["template"]["spec"]["initContainers"][0]
        (size,) = [arg for arg in sidecar["args"] if arg.startswith("--memory-size=")]
        return int(size.partition("=")[2]) // GIB, plans["remote"].fields["wanted"]


AUTO = {"mode": "Auto", "memory": BOUNDS, "remote": {"maxShards": 4}}


@pytest.mark.parametrize(("autoscaling", "tiers"), ACCEPTED)
def test_what_can_be_declared(autoscaling: Any, tiers: Any) -> None:
    resource = cluster(tiers={"memory": {"size": "64Gi"}} | tiers)
    resource["spec"]["autoscaling"] = autoscaling
    scaling = parse(resource).spec.autoscaling
    assert scaling.mode == autoscaling.get("mode", "Recommend")
    least, most = scaling.memory_bounds(64 * GIB)
    assert least <= 64 * GIB <= most
    assert scaling.shard_bounds(2)[0] <= 2 <= scaling.shard_bounds(2)[1]


@pytest.mark.parametrize(("autoscaling", "tiers", "sentence"), REFUSED)
def test_what_can_not_is_refused_by_its_field(autoscaling: Any, tiers: Any, sentence: str) -> None:
    resource = cluster(tiers={"memory": {"size": "64Gi"}} | tiers)
    resource["spec"]["autoscaling"] = autoscaling
    with pytest.raises(InvalidSpecError, match=sentence):
        parse(resource)


def test_a_tier_without_engines_has_no_sizes_to_choose() -> None:
    tiers = {"remote": {"managed": {"memoryPerShard": "1Gi"}}}
    resource = cluster() | {"spec": {"tiers": tiers, "autoscaling": {"remote": {"maxShards": 2}}}}
    with pytest.raises(InvalidSpecError, match="set autoscaling at a cluster with one"):
        parse(resource)


def test_auto_renders_what_was_chosen_and_a_restart_changes_nothing() -> None:
    rig = Rig(**AUTO)
    assert rig.sizes() == (64, 2)
    assert rig.sizes(CHOSEN) == (108, 3)
    assert rig.sizes() == (108, 3)  # by the ConfigMap alone


def test_only_auto_changes_sizes_and_only_those_that_have_bounds() -> None:
    rig = Rig(**AUTO)
    rig.plan(CHOSEN)
    rig.declare(mode="Auto", memory=BOUNDS)
    assert rig.sizes() == (108, 2)
    rig.declare(mode="Auto", remote={"maxShards": 4})
    assert rig.sizes(CHOSEN) == (64, 3)
    rig.declare(mode="Recommend", memory=BOUNDS)
    assert rig.sizes() == rig.sizes(CHOSEN) == (64, 2)


def test_who_declares_another_size_means_that_one() -> None:
    rig = Rig(**AUTO)
    rig.plan(CHOSEN)
    rig.declare(tiers=TIERS | {"memory": {"size": "96Gi"}}, **AUTO)
    assert rig.sizes() == rig.sizes(CHOSEN) == (96, 3)


def test_bounds_hold_for_what_was_chosen_before_them() -> None:
    rig = Rig(**AUTO)
    rig.plan(CHOSEN)
    rig.declare(mode="Auto", memory={"maxSize": "80Gi"}, remote={"maxShards": 2})
    assert rig.sizes() == rig.sizes(CHOSEN) == (80, 2)
    rig.declare(mode="Auto", memory={"minSize": "1Gi", "maxSize": "1Ti"})
    assert rig.sizes() == (108, 2)


def test_a_state_that_was_edited_is_not_believed() -> None:
    rig = Rig(**AUTO)
    rig.plan(CHOSEN)
    rig.world.objects[CONFIG]["data"]["sizes"] = "{}"
    assert rig.sizes() == (64, 2)
    assert not rig.world.objects  # begun anew


def test_it_is_written_for_another_size_at_once_and_else_once_in_an_hour() -> None:
    rig = Rig(**AUTO)
    counted = [replace(CHOSEN, state=f"{n}") for n in range(5)]

    def writes(report: Report | None) -> bool:
        return bool(rig.plan(report)["autoscaling"].apply)

    assert not writes(None)
    assert not writes(Report({}))  # nothing to be kept
    assert writes(counted[0])
    rig.time += timedelta(minutes=59)
    assert not writes(None)
    assert not writes(counted[1])
    assert writes(replace(counted[2], memory=Choice(128 * GIB, 64 * GIB)))
    rig.time += timedelta(seconds=59)
    grown = replace(counted[3], memory=Choice(128 * GIB, 64 * GIB))
    assert not writes(grown)
    rig.time += timedelta(seconds=1)
    assert writes(grown)
    rig.time += timedelta(days=1)
    assert not writes(grown)  # nothing was counted
    rig.time -= timedelta(days=2)
    assert writes(replace(grown, state="of a clock that was set back"))


def test_off_keeps_nothing() -> None:
    rig = Rig(**AUTO)
    rig.plan(CHOSEN)
    rig.declare(mode="Off")
    assert rig.sizes(CHOSEN) == (64, 2)
    assert not rig.world.objects


def test_no_pod_is_replaced_for_how_sizes_are_chosen() -> None:
    bare, auto = cluster(tiers=TIERS), cluster(tiers=TIERS)
    auto["spec"]["autoscaling"] = AUTO
    assert spec_hash(parse(bare), STOCK_IMAGES) == spec_hash(parse(auto), STOCK_IMAGES)


def test_pods_of_others_get_what_is_declared() -> None:
    rig = Rig(**AUTO)
    before, after = rig.plan()["injection"].apply, rig.plan(CHOSEN)["injection"].apply
    assert before == after
