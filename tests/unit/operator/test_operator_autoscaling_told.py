"""What is told of decisions: the status, a condition, Events, metrics; and nothing at rest."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from typing import Any, Self, cast

import pytest
from lmcache_operator import metrics
from lmcache_operator.autoscaling.report import Choice, Report, tier_status
from lmcache_operator.autoscaling.state import Decision
from lmcache_operator.components.base import Observed
from lmcache_operator.reconcile import reconciler
from lmcache_operator.specs.kinds import ClusterKey
from prometheus_client import Gauge

from tests.harness.operator_bench import KEY, Bench
from tests.harness.operator_model import NAME
from tests.harness.operator_resizes import Node

GIB = 1 << 30
BOUNDS = {"minSize": "32Gi", "maxSize": "256Gi"}
STAY = Decision(64 * GIB, 64 * GIB, 64 * GIB, 64 * GIB, "counted for 5 min so far", "Young")
GROW = Decision(64 * GIB, 108 * GIB, 108 * GIB, 108 * GIB, "108Gi instead of 64Gi", "None", 0.16, 0.04)
GROWN = replace(STAY, size=108 * GIB, target=108 * GIB, recommended=108 * GIB, next=108 * GIB)


class Watcher:
    """Stands in for who polls sidecars; what it says is the test's."""

    def __init__(self) -> None:
        self.now: Report | None = None
        self.forgotten: list[ClusterKey] = []

    def report(self, key: ClusterKey, observed: Mapping[str, Observed]) -> Report | None:
        assert key == KEY
        assert observed["engine"].name == NAME
        return self.now

    def forget(self, key: ClusterKey) -> None:
        self.forgotten.append(key)

    def say(self, decision: Decision, **more: Any) -> None:
        told = tier_status(decision, []) | {"keysInSize": 2048}
        self.now = Report({"observedAt": "2026-01-01T00:00:00Z", "memory": told}, **more)


class Rig(Bench):
    """A cluster, and what is told of it."""

    def __init__(self, size: str = "64Gi", **autoscaling: Any) -> None:
        self.autoscaler = self.watcher = Watcher()
        super().__init__(tiers={"memory": {"size": size}}, autoscaling=autoscaling)
        self.settle()

    def say(self, decision: Decision, **more: Any) -> list[str]:
        """Until all is told; the reasons of Events about it."""
        self.watcher.say(decision, **more)
        self.world.told.clear()
        self.settle()
        return [reason for _, reason in self.world.told if reason.startswith(("Autoscaling", "Size"))]

    def told(self) -> Any:
        return self.world.resource["status"].get("autoscaling")

    def active(self) -> tuple[str, str] | None:
        found = [c for c in self.world.resource["status"]["conditions"] if c["type"] == "AutoscalingActive"]
        return (found[0]["status"], found[0]["reason"]) if found else None


def uid_of(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["uid"])


def samples(gauge: Gauge) -> dict[str, float]:
    """By the labels that are not the cluster's name."""
    found = [sample for sample in gauge.collect()[0].samples if sample.labels["name"] == NAME]
    return {" ".join(list(sample.labels.values())[2:]): sample.value for sample in found}


def test_a_recommendation_is_told_once_and_nothing_is_written_at_rest() -> None:
    rig = Rig()
    assert (rig.told(), rig.active()) == (None, None)
    assert rig.say(STAY) == []
    assert rig.active() == ("Unknown", "Counting")
    assert rig.say(GROW) == ["SizeRecommended"]
    assert rig.active() == ("True", "Recommending")
    first = rig.told()
    assert first["memory"]["recommended"] == "108Gi"
    assert "next" not in first["memory"]  # who only recommends goes nowhere
    for usd in (0.161, 0.158, 0.163):
        rig.watcher.say(replace(GROW, saving=usd))
        rig.reconcile()
        assert rig.writes == []
    assert rig.told() == first
    assert rig.say(replace(GROW, saving=0.5)) == []
    assert rig.told()["memory"]["saving"]["usdPerHour"] == "0.500"


def test_auto_tells_each_step_and_that_it_was_frozen() -> None:
    rig = Rig(mode="Auto", memory=BOUNDS)
    rig.say(STAY)
    chosen = Choice(108 * GIB, 64 * GIB)
    assert rig.say(GROW, memory=chosen) == ["SizeRecommended", "SizeChosen"]
    assert rig.active() == ("True", "Sizing")
    assert rig.say(replace(GROWN, limited_by="Verifying"), memory=chosen) == []
    frozen = replace(GROWN, limited_by="Frozen", reason="what was predicted did not come, twice")
    assert rig.say(frozen, memory=chosen) == ["AutoscalingFrozen"]
    assert rig.active() == ("False", "AutoscalingFrozen")
    assert rig.ready()[0] == "True"  # engines serve, and so does the cache


def test_a_restart_tells_what_was_told_until_something_is_known() -> None:
    rig = Rig(mode="Auto", memory=BOUNDS)
    rig.say(STAY)
    rig.say(GROW, memory=Choice(108 * GIB, 64 * GIB))
    before = rig.told(), rig.active()
    rig.watcher.now = None
    rig.restart()
    rig.reconcile()
    assert rig.writes == []
    assert (rig.told(), rig.active()) == before


def test_what_is_off_is_not_told() -> None:
    rig = Rig()
    rig.say(GROW)
    rig.world.resource["spec"]["autoscaling"] = {"mode": "Off"}
    rig.settle()
    assert (rig.told(), rig.active()) == (None, None)
    assert samples(metrics.MEMORY_BYTES) == {}


def test_a_spec_that_turned_invalid_hides_nothing() -> None:
    rig = Rig()
    rig.say(GROW)
    before = rig.told(), rig.active()
    rig.world.change(engine={"args": ["--port=1"]})
    rig.settle()
    assert rig.ready()[0] == "False"
    assert (rig.told(), rig.active()) == before


def test_sizes_are_metrics_until_the_cluster_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.say(GROW)
    assert samples(metrics.MEMORY_BYTES) == {"current": 64 * GIB, "recommended": 108 * GIB}
    with monkeypatch.context() as patch:  # whoever looks meanwhile sees them, too
        patch.setattr(metrics.MEMORY_BYTES, "remove", None)
        rig.world.resource["metadata"]["labels"] = {"some": "change"}
        rig.reconcile()
    assert samples(metrics.SAVING) == {"memory": 0.16}
    rig.say(replace(GROWN, limited_by="Max"))
    assert samples(metrics.LIMITED) == {"memory Max": 1}
    rig.world.resource = cast(Any, None)
    rig.reconcile()
    assert rig.watcher.forgotten == [KEY]
    for gauge in (metrics.MEMORY_BYTES, metrics.SHARDS, metrics.SAVING, metrics.LIMITED):
        assert samples(gauge) == {}


def test_shards_are_told_by_their_number() -> None:
    rig = Rig()
    told = tier_status(GROW, [], shard_bytes=4 * GIB)
    rig.watcher.now = Report({"remote": told})
    rig.settle()
    assert rig.told()["remote"]["recommended"] == 27
    assert samples(metrics.SHARDS) == {"current": 16, "recommended": 27}


class AdvancingTime(datetime):
    """That of the wall: a second for each look, within one hour."""

    seconds = itertools.count()

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return cls(2026, 1, 1, tzinfo=tz) + timedelta(seconds=next(cls.seconds))


def test_two_operators_that_choose_different_sizes_do_not_write_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By mistake: without a Lease. Each leaves alone what the other keeps changing, and says so."""
    monkeypatch.setattr(reconciler, "datetime", AdvancingTime)
    rig = Rig("1Gi", mode="Auto", memory={"maxSize": "4Gi"})
    before = {uid_of(pod) for pod in rig.world.pods.values()}
    node = Node(world=rig.world)
    rig.world.ask = node.ask  # type: ignore[method-assign]
    operators = []
    for size in (2, 3):
        rig.autoscaler = watcher = Watcher()
        rig.restart()
        operators.append(rig.reconciler)
        watcher.say(GROW, memory=Choice(size * GIB, GIB), state=f"{size}")
    written = []
    for _ in range(14):
        for rig.reconciler in operators:
            rig.clock.now += 1
            rig.reconcile()
            written.append(list(rig.writes))
            for name in node.sidecars:
                node.settle(name)
    last = [write for writes in written[-4:] for write in writes]
    assert not any(write.startswith(("apply", "resize", "annotate")) for write in last)
    assert ("Warning", "FieldContested") in rig.world.told
    assert {uid_of(pod) for pod in rig.world.pods.values()} == before
    sizes = {sidecar.size for sidecar in node.sidecars.values()}
    assert len(sizes) == 1
    assert sizes < {2 * GIB, 3 * GIB}, "one of both, and pods have it"
