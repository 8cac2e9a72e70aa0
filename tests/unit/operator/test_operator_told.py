"""What goes wrong in a reconciliation is told, and the rest of it is done."""

from __future__ import annotations

from typing import Any, cast

import pytest
from lmcache_operator import metrics
from lmcache_operator.errors import ApiError, RefusedError, UnavailableError

from tests.harness.operator_bench import STATEFUL_SET, Bench
from tests.harness.operator_model import NAME


def test_conditions_are_metrics_until_the_cluster_is_gone() -> None:
    def measured() -> dict[str, float]:
        samples = metrics.CONDITION.collect()[0].samples
        return {s.labels["condition"]: s.value for s in samples if s.labels["name"] == NAME}

    bench = Bench()
    bench.reconcile()
    assert measured() == {"Ready": 0, "Degraded": 0}
    bench.settle()
    assert measured() == {"Ready": 1, "Degraded": 0}
    bench.world.resource = cast(Any, None)
    bench.reconcile()
    assert measured() == {}


def test_what_the_api_server_refuses_becomes_a_condition_and_the_rest_goes_on() -> None:
    bench = Bench()
    bench.world.failures["apply NetworkPolicy"] = RefusedError("apply", "quota exceeded")
    waits = [bench.reconcile() for _ in range(7)]
    assert waits == [5, 10, 20, 40, 60, 60, 60]
    assert STATEFUL_SET in bench.world.objects
    assert bench.ready() == ("False", "NetworkPolicy demo-engine: quota exceeded")
    assert bench.world.told == [("Warning", "Refused"), ("Normal", "Scaling")]


@pytest.mark.parametrize("call", ["get Service", "find Pod", "apply Service", "apply StatefulSet", "evict"])
def test_a_failure_that_does_not_go_away_is_told_wherever_it_comes_from(call: str) -> None:
    bench = Bench()
    is_made = call in ("evict", "find Pod")
    if is_made:
        bench.settle()
        bench.world.change(engine={"args": ["--new"]})
        bench.reconcile()
        bench.world.run_stateful_sets()
    bench.world.failures[call] = UnavailableError(call, "failed calling webhook")
    for _ in range(2):
        with pytest.raises(ApiError):
            bench.reconcile()
    assert "failed calling webhook" in bench.ready()[1]
    assert ("Warning", "ApiError") in bench.world.told
    if call != "apply StatefulSet":  # what comes after it, where it can be done
        assert (STATEFUL_SET in bench.world.objects) is (is_made or call.startswith("apply"))
    bench.world.failures.clear()
    bench.settle()
    assert bench.ready()[0] == "True"


def test_conditions_are_told_under_an_older_definition_too(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    apply_status = bench.world.apply_status

    async def refuse_what_is_new(wanted: dict[str, Any]) -> None:
        if unknown := wanted["status"].keys() - {
            "conditions",
            "observedGeneration",
            "replicas",
            "readyReplicas",
            "selector",
        }:
            raise RefusedError("apply", f".status.{min(unknown)}: field not declared in schema")
        await apply_status(wanted)

    monkeypatch.setattr(bench.world, "apply_status", refuse_what_is_new)
    bench.reconcile()
    bench.world.run_stateful_sets()
    bench.reconcile()
    assert bench.ready()[0] == "True"


@pytest.mark.parametrize("engine", ["text", 7, ["x"], {"replicas": "many"}, {"replicas": None}, None])
@pytest.mark.parametrize("has_pods", [False, True])
def test_a_spec_of_wrong_types_is_told_and_leaves_pods_alone(engine: Any, has_pods: bool) -> None:
    """As an older definition may have let them through."""
    bench = Bench()
    if has_pods:
        bench.settle()
    bench.world.resource["spec"]["engine"] = engine
    bench.reconcile()
    if engine in (None, {"replicas": None}):
        assert "InvalidSpec" not in str(bench.world.resource["status"])
        return
    assert ("Warning", "InvalidSpec") in bench.world.told
    assert bench.ready()[1].startswith("spec.engine")
    assert not any(write.startswith(("apply", "delete", "evict")) for write in bench.writes)


def test_a_failure_that_goes_away_is_not_told() -> None:
    bench = Bench()
    bench.settle()
    bench.world.failures["get Service"] = UnavailableError("get", "busy")
    with pytest.raises(ApiError):
        bench.reconcile()
    assert bench.writes == []


def test_a_fault_of_the_operator_is_told_too() -> None:
    bench = Bench()
    bench.settle()
    bench.world.failures["find Pod"] = RecursionError("too deep")
    for _ in range(2):
        with pytest.raises(RecursionError):
            bench.reconcile()
    assert "RecursionError('too deep')" in bench.ready()[1]


def test_a_refused_eviction_is_told() -> None:
    bench = Bench()
    bench.settle()
    bench.world.change(engine={"args": ["--new"]})
    bench.reconcile()
    bench.world.run_stateful_sets()
    bench.world.failures["evict"] = RefusedError("evict", "no right to it")
    bench.reconcile()
    assert bench.ready() == ("False", "eviction of pod demo-engine-0: no right to it")
