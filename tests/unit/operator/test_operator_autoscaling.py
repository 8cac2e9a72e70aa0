"""Chosen sizes: how they are rendered, and how they survive a restart of the operator."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from lmcache_operator.api.parse import parse
from lmcache_operator.components.registry import COMPONENTS
from lmcache_operator.contract.base import Context, Observed, Plan
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.policy.report import Choice, Report
from lmcache_operator.reconcile.plan import plan
from lmcache_operator.specs.names import STOCK_IMAGES
from tests.harness.operator.autoscaling import ACCEPTED, GIB, REFUSED
from tests.harness.operator.model import World, cluster
from tests.harness.operator.plans import carry_out

NOW = datetime(2026, 1, 1, tzinfo=UTC)
BOUNDS = {"minSize": "32Gi", "maxSize": "256Gi"}
TIERS = {"memory": {"size": "64Gi"}, "remote": {"managed": {"memoryPerShard": "1Gi", "shards": 2}}}
CHOSEN = Report({}, memory=Choice(108 * GIB, 64 * GIB), shards=Choice(3, 2), state="counted")


class Rig:
    """A cluster with the ConfigMap that stores its chosen sizes."""

    def __init__(self, **autoscaling: Any) -> None:
        self.time, self.world = NOW, World(cluster())
        self.declare(**autoscaling)

    def declare(self, tiers: Any = TIERS, **autoscaling: Any) -> None:
        self.resource = cluster(tiers=tiers)
        self.resource["spec"]["autoscaling"] = autoscaling

    def plan(self, report: Report | None = None) -> dict[str, Plan]:
        """Return the plan of each component, and write the ConfigMap."""
        blank = Observed(resource=self.resource, now=self.time, autoscaling=report)
        observed = {component.name: blank for component in COMPONENTS}
        observed["autoscaling"] = replace(blank, children=dict(self.world.objects))
        plans, fault = plan(COMPONENTS, self.resource, observed, Context(STOCK_IMAGES))
        assert fault is None
        carry_out(self.world, plans["autoscaling"])
        return plans

    def sizes(self, report: Report | None = None) -> tuple[int, int]:
        """Rendered memory size of a pod in GiB, and rendered number of shards."""
        plans = self.plan(report)
        (engine,) = [child for child in plans["engine"].apply if child["kind"] == "StatefulSet"]
        sidecar = engine["spec"]["template"]["spec"]["initContainers"][0]
        args = dict(arg.partition("=")[::2] for arg in sidecar["args"])
        return int(args["--memory-size"]) // GIB, plans["remote"].fields["wanted"]


AUTO = {"mode": "Auto", "memory": BOUNDS, "remote": {"maxShards": 4}}


def scaled(autoscaling: Any, tiers: Any) -> dict[str, Any]:
    resource = cluster(tiers={"memory": {"size": "64Gi"}} | tiers)
    resource["spec"]["autoscaling"] = autoscaling
    return resource


@pytest.mark.parametrize(("autoscaling", "tiers"), ACCEPTED)
def test_parse_accepts_valid_autoscaling(autoscaling: Any, tiers: Any) -> None:
    scaling = parse(scaled(autoscaling, tiers)).spec.autoscaling
    assert scaling.mode == autoscaling.get("mode", "Recommend")
    min_bytes, max_bytes = scaling.memory_bounds(64 * GIB)
    assert min_bytes <= 64 * GIB <= max_bytes
    assert scaling.shard_bounds(2)[0] <= 2 <= scaling.shard_bounds(2)[1]


@pytest.mark.parametrize(("autoscaling", "tiers", "sentence"), REFUSED)
def test_parse_refuses_invalid_autoscaling_and_names_the_field(autoscaling, tiers, sentence):
    with pytest.raises(InvalidSpecError, match=sentence):
        parse(scaled(autoscaling, tiers))


def test_only_auto_changes_sizes_and_only_sizes_with_bounds() -> None:
    rig = Rig(**AUTO)
    rig.plan(CHOSEN)
    rig.declare(mode="Auto", memory=BOUNDS)
    assert rig.sizes() == (108, 2)
    rig.declare(mode="Auto", remote={"maxShards": 4})
    assert rig.sizes(CHOSEN) == (64, 3)
    rig.declare(mode="Recommend", memory=BOUNDS)
    assert rig.sizes() == rig.sizes(CHOSEN) == (64, 2)


def test_new_bounds_limit_earlier_choices() -> None:
    rig = Rig(**AUTO)
    rig.plan(CHOSEN)
    rig.declare(mode="Auto", memory={"maxSize": "80Gi"}, remote={"maxShards": 2})
    assert rig.sizes() == rig.sizes(CHOSEN) == (80, 2)
    rig.declare(mode="Auto", memory={"minSize": "1Gi", "maxSize": "1Ti"})
    assert rig.sizes() == (108, 2)


def test_state_is_written_at_once_for_a_new_size_and_otherwise_hourly() -> None:
    rig = Rig(**AUTO)
    counted = [replace(CHOSEN, state=f"{n}") for n in range(5)]

    def writes(report: Report | None) -> bool:
        return bool(rig.plan(report)["autoscaling"].apply)

    assert not writes(None)
    assert not writes(Report({}))  # nothing to store
    assert writes(counted[0])
    rig.time += timedelta(minutes=59)
    assert not writes(None)
    assert not writes(counted[1])
    assert writes(replace(counted[2], memory=Choice(128 * GIB, 64 * GIB)))
    rig.time += timedelta(seconds=59)
    resized = replace(counted[3], memory=Choice(128 * GIB, 64 * GIB))
    assert not writes(resized)
    rig.time += timedelta(seconds=1)
    assert writes(resized)
    rig.time += timedelta(days=1)
    assert not writes(resized)  # no lookups were counted
    rig.time -= timedelta(days=2)
    assert writes(replace(resized, state="clock was set back"))
