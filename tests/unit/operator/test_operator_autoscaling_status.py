"""Reports of autoscaling decisions: status, condition, Events and metrics; no writes without a change."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
from prometheus_client import Gauge

from lmcache_operator import metrics
from lmcache_operator.contract.base import Observed
from lmcache_operator.policy.report import Choice, Report, tier_status
from lmcache_operator.policy.state import Decision, Point
from lmcache_operator.specs.kinds import ClusterKey
from tests.harness.operator.components import KEY, ReconciledCluster
from tests.harness.operator.model import NAME

GIB = 1 << 30
BOUNDS = {"minSize": "32Gi", "maxSize": "256Gi"}
NO_CHANGE = Decision(
    64 * GIB, 64 * GIB, 64 * GIB, 64 * GIB, "lookups counted for 5m; a decision needs 30m", "Young"
)
GROW = Decision(64 * GIB, 108 * GIB, 108 * GIB, 108 * GIB, "108Gi instead of 64Gi", "None", 0.16, 0.04)
HITS = {32: 0.3, 64: 0.45, 108: 0.55}
CURVE = [Point(size * GIB, hits, hits, hits, 0.0) for size, hits in HITS.items()]
GROWN = replace(NO_CHANGE, size=108 * GIB, target=108 * GIB, recommended=108 * GIB, next=108 * GIB)


class Watcher:
    """Replaces the poller of the sidecars. The test sets its report."""

    def __init__(self) -> None:
        self.latest_report: Report | None = None
        self.forgotten_keys: list[ClusterKey] = []

    def report(self, key: ClusterKey, observed: Mapping[str, Observed]) -> Report | None:
        assert (key, observed["engine"].name) == (KEY, NAME)
        return self.latest_report

    def forget(self, key: ClusterKey) -> None:
        self.forgotten_keys.append(key)

    def decide(self, decision: Decision, **report_fields: Any) -> None:
        memory = tier_status(decision, CURVE) | {"keysInSize": 2048}
        self.latest_report = Report({"observedAt": "2026-01-01T00:00:00Z", "memory": memory}, **report_fields)


class Rig(ReconciledCluster):
    """A cluster with autoscaling, and access to its reports."""

    def __init__(self, size: str = "64Gi", **autoscaling: Any) -> None:
        self.autoscaler = self.watcher = Watcher()
        super().__init__(tiers={"memory": {"size": size}}, autoscaling=autoscaling)
        self.settle()

    def decide(self, decision: Decision, **report_fields: Any) -> list[str]:
        """Report the decision, settle, and return the reasons of Events about autoscaling."""
        self.watcher.decide(decision, **report_fields)
        self.world.events.clear()
        self.settle()
        return [reason for _, reason in self.world.events if reason.startswith(("Autoscaling", "Size"))]

    def status(self) -> Any:
        return self.world.resource["status"].get("autoscaling")

    def active(self) -> tuple[str, str]:
        return self.condition("AutoscalingActive")


def samples(gauge: Gauge) -> dict[str, float]:
    """Values of the cluster's samples by their other labels."""
    cluster_samples = [
        sample for sample in next(iter(gauge.collect())).samples if sample.labels["name"] == NAME
    ]
    return {" ".join(list(sample.labels.values())[2:]): sample.value for sample in cluster_samples}


def test_recommendation_is_reported_once_and_small_changes_are_not_written() -> None:
    rig = Rig()
    assert (rig.status(), rig.active()) == (None, ("", ""))
    assert (rig.decide(NO_CHANGE), rig.active()) == ([], ("Unknown", "Counting"))
    assert (rig.decide(GROW), rig.active()) == (["SizeRecommended"], ("True", "Recommending"))
    first = rig.status()
    assert first["memory"]["recommended"] == "108Gi"
    assert "next" not in first["memory"]  # mode Recommend makes no step
    for usd_per_hour in (0.161, 0.158, 0.163):
        rig.watcher.decide(replace(GROW, saving=usd_per_hour))
        rig.reconcile()
        assert rig.writes == []
    assert (rig.status(), rig.decide(replace(GROW, saving=0.5))) == (first, [])
    assert rig.status()["memory"]["saving"]["usdPerHour"] == "0.500"


def test_auto_reports_each_step_and_the_freeze() -> None:
    rig = Rig(mode="Auto", memory=BOUNDS)
    rig.decide(NO_CHANGE)
    chosen = Choice(108 * GIB, 64 * GIB)
    assert rig.decide(GROW, memory=chosen) == ["SizeRecommended", "SizeChosen"]
    assert rig.active() == ("True", "Sizing")
    assert rig.decide(replace(GROWN, limited_by="Verifying"), memory=chosen) == []
    frozen = replace(GROWN, limited_by="Frozen", reason="hits stayed below the prediction twice")
    assert rig.decide(frozen, memory=chosen) == ["AutoscalingFrozen"]
    assert rig.active() == ("False", "AutoscalingFrozen")
    assert rig.condition("Ready") == ("True", "Ready")  # engines and cache still serve


def test_restarted_operator_keeps_the_last_report_until_it_has_samples() -> None:
    rig = Rig(mode="Auto", memory=BOUNDS)
    rig.decide(NO_CHANGE)
    rig.decide(GROW, memory=Choice(108 * GIB, 64 * GIB))
    before = rig.status(), rig.active()
    rig.watcher.latest_report = None
    rig.restart_operator()
    rig.reconcile()
    assert rig.writes == []
    assert (rig.status(), rig.active()) == before


def test_mode_off_removes_status_and_metrics() -> None:
    rig = Rig()
    rig.decide(GROW)
    rig.world.resource["spec"]["autoscaling"] = {"mode": "Off"}
    rig.settle()
    assert (rig.status(), rig.active()) == (None, ("", ""))
    assert samples(metrics.MEMORY_BYTES) == {}


def test_invalid_spec_keeps_the_autoscaling_report() -> None:
    rig = Rig()
    rig.decide(GROW)
    before = rig.status(), rig.active()
    rig.change(engine={"args": ["--port=1"]})
    assert rig.condition("Ready") == ("True", "Serving")
    assert (rig.status(), rig.active()) == before


def test_texts_instead_of_sizes_in_the_status_stop_no_reconciliation() -> None:
    """Other users than the operator may be allowed to write the status."""
    rig = Rig()
    rig.world.resource["status"] = {"autoscaling": {"memory": {"current": "no size", "recommended": "1Gi"}}}
    rig.settle()
    assert rig.condition("Ready") == ("True", "Ready")
    assert samples(metrics.MEMORY_BYTES) == {}


def test_size_metrics_exist_until_the_cluster_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.decide(GROW)
    assert samples(metrics.MEMORY_BYTES) == {"current": 64 * GIB, "recommended": 108 * GIB}
    with monkeypatch.context() as patch:  # a scrape during a reconciliation sees them, too
        patch.setattr(metrics.MEMORY_BYTES, "remove", None)
        rig.world.resource["metadata"]["labels"] = {"some": "change"}
        rig.reconcile()
    assert samples(metrics.PREDICTED_HITS) == {"current": 0.45, "recommended": 0.55}
    assert samples(metrics.SAVING) == {"memory": 0.16}
    rig.decide(replace(GROWN, limited_by="Max"))
    assert samples(metrics.LIMITED) == {"memory Max": 1}
    rig.world.resource = cast(Any, None)
    rig.reconcile()
    assert rig.watcher.forgotten_keys == [KEY]
    for name in ("MEMORY_BYTES", "PREDICTED_HITS", "SHARDS", "SAVING", "LIMITED"):
        assert samples(getattr(metrics, name)) == {}
