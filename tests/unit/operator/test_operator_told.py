"""What goes wrong in a reconciliation is told, and the rest of it is done."""

from __future__ import annotations

from datetime import UTC, datetime
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
    if engine == {"replicas": None}:
        assert "InvalidSpec" not in str(bench.world.resource["status"])
        return
    assert ("Warning", "InvalidSpec") in bench.world.told
    assert bench.ready()[1].startswith("spec.engine" if engine else "spec: model and engine belong together")
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


@pytest.mark.parametrize("other", ["ends", "loads"])
def test_a_mount_that_fails_is_told_whatever_the_pods_before_it_do(other: str) -> None:
    bench = Bench(engine={"replicas": 2})
    bench.settle()
    first, second = (bench.world.pods[f"demo-engine-{n}"] for n in range(2))
    second["status"] = {"phase": "Pending"}
    first["status"] = {"containerStatuses": [{"name": "engine", "state": {"running": {}}}]}
    if other == "ends":
        first["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    now = datetime.now(UTC).isoformat()
    event = {"reason": "FailedMount", "message": 'secret "kv" not found', "lastTimestamp": now}
    bench.world.warnings = [event | {"involvedObject": {"uid": second["metadata"]["uid"]}}]
    bench.reconcile()
    assert bench.ready() == ("False", 'pod demo-engine-1: secret "kv" not found')


def test_while_a_spec_is_invalid_its_pods_are_watched_and_those_of_lost_nodes_given_up() -> None:
    bench = Bench(engine={"replicas": 2})
    bench.settle()
    bench.world.change(engine={"args": ["--headless"]})
    assert (bench.reconcile() or 0) > 500
    assert bench.ready()[1].startswith("spec.engine.args")
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    bench.world.pods["demo-engine-0"]["status"] = {
        "containerStatuses": [{"name": "engine", "state": waiting}]
    }
    lost = bench.world.pods["demo-engine-1"]
    lost["spec"]["nodeName"] = "gone"
    lost["metadata"]["deletionTimestamp"] = long_ago = "2026-01-01T00:00:00Z"
    lost["status"] = {"conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": long_ago}]}
    assert (bench.reconcile() or 900) < 60
    assert "delete by force demo-engine-1" in bench.writes
    assert "no such image" in str(bench.world.resource["status"])
    assert bench.ready()[1].startswith("spec.engine.args")
    bench.world.run_stateful_sets(is_ready=False)
    bench.world.set_ready("demo-engine-0", True)
    assert (bench.reconcile() or 900) < 60  # until the new pod serves
    bench.world.set_ready("demo-engine-1", True)
    assert (bench.reconcile() or 0) > 500
