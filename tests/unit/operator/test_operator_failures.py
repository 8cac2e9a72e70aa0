"""Reports of failures during a reconciliation, and the work that continues despite them."""

from datetime import UTC, datetime
from typing import Any, cast

import pytest

from lmcache_operator import metrics
from lmcache_operator.errors import ApiError, RefusedError, UnavailableError
from tests.harness.operator.components import ReconciledCluster
from tests.harness.operator.model import NAME
from tests.harness.operator.plans import STATEFUL_SET


def test_condition_metrics_exist_until_the_cluster_is_deleted() -> None:
    def condition_metrics() -> dict[str, float]:
        samples = next(iter(metrics.CONDITION.collect())).samples
        return {s.labels["condition"]: s.value for s in samples if s.labels["name"] == NAME}

    bench = ReconciledCluster()
    bench.reconcile()
    assert condition_metrics() == {"Ready": 0, "Progressing": 1, "Degraded": 0}
    bench.settle()
    assert condition_metrics() == {"Ready": 1, "Progressing": 0, "Degraded": 0}
    bench.world.resource = cast(Any, None)
    bench.reconcile()
    assert condition_metrics() == {}


@pytest.mark.parametrize("kind", ["ServiceAccount", "NetworkPolicy", "PodDisruptionBudget"])
def test_refused_apply_becomes_a_condition_and_no_pods_follow_that_need_the_object(kind: str) -> None:
    bench = ReconciledCluster()
    bench.world.failures[f"apply {kind}"] = RefusedError("apply", "quota exceeded")
    pauses = [bench.reconcile() for _ in range(7)]
    assert pauses == [5, 10, 20, 40, 60, 60, 60]
    is_needed = kind != "PodDisruptionBudget"
    assert (STATEFUL_SET in bench.world.objects) is not is_needed
    assert bench.degraded() == ("True", f"{kind} demo-engine: quota exceeded")
    assert ("Warning", "Refused") in bench.world.events
    bench.world.failures.clear()
    bench.settle()
    assert bench.condition("Ready") == ("True", "Ready")


@pytest.mark.parametrize("call", ["get Service", "find Pod", "apply Service", "apply StatefulSet", "evict"])
def test_persistent_failure_of_any_call_is_reported(call: str) -> None:
    bench = ReconciledCluster()
    has_children = call in ("evict", "find Pod")
    if has_children:
        bench.settle()
        bench.world.change(engine={"args": ["--new"]})
        bench.reconcile()
        bench.world.run_stateful_sets()
    bench.world.failures[call] = UnavailableError(call, "failed calling webhook")
    for _ in range(2):
        assert ("Warning", "ApiError") not in bench.world.events, "a transient failure is not reported"
        with pytest.raises(ApiError):
            bench.reconcile()
    assert "failed calling webhook" in bench.message("Degraded")
    assert ("Warning", "ApiError") in bench.world.events
    assert (STATEFUL_SET in bench.world.objects) is has_children, "pods need the other children"
    bench.world.failures.clear()
    bench.settle()
    assert bench.condition("Ready") == ("True", "Ready")


FIRST_FIELDS = {"conditions", "observedGeneration", "replicas", "readyReplicas", "selector"}
"""Fields of the first definition. Later ones are added."""


def test_older_crd_gets_the_status_without_the_fields_that_it_lacks(monkeypatch) -> None:
    """The first definition refuses one field after the other."""
    bench = ReconciledCluster()
    apply_status = bench.world.apply_status

    async def refuse_new_fields(wanted: dict[str, Any]) -> None:
        if unknown := wanted["status"].keys() - FIRST_FIELDS:
            name = min(unknown)
            paths = f".status.{name}", f".status.{name}.engine", ".status.usage[0].share"
            lines = [f"{path}: field not declared in schema" for path in paths]
            raise RefusedError("apply", "failed to create typed patch object:\n" + "\n".join(lines))
        await apply_status(wanted)

    monkeypatch.setattr(bench.world, "apply_status", refuse_new_fields)
    for _ in range(2):
        bench.reconcile()
        bench.world.run_stateful_sets()
    assert bench.condition("Ready") == ("True", "Ready")
    assert bench.world.resource["status"].keys() <= FIRST_FIELDS


@pytest.mark.parametrize("engine", ["text", 7, ["x"], {"replicas": "many"}, {"replicas": None}, None])
@pytest.mark.parametrize("has_pods", [False, True])
def test_spec_of_wrong_types_is_reported_and_keeps_pods(engine: Any, has_pods: bool) -> None:
    """An older CRD may have accepted such specs."""
    bench = ReconciledCluster()
    if has_pods:
        bench.settle()
    bench.world.resource["spec"]["engine"] = engine
    bench.reconcile()
    if engine == {"replicas": None}:
        assert "InvalidSpec" not in str(bench.world.resource["status"])
        return
    assert ("Warning", "InvalidSpec") in bench.world.events
    assert bench.message("Degraded").startswith(
        "spec.engine" if engine else "spec: model and engine belong together"
    )
    assert not any(write.startswith(("apply", "delete", "evict")) for write in bench.writes)


def test_internal_error_of_the_operator_is_reported() -> None:
    bench = ReconciledCluster.settled()
    bench.world.failures["find Pod"] = RecursionError("too deep")
    for _ in range(2):
        with pytest.raises(RecursionError):
            bench.reconcile()
    assert "RecursionError('too deep')" in bench.message("Degraded")


def test_pods_of_an_invalid_spec_are_watched_and_abandoned_on_lost_nodes() -> None:
    bench = ReconciledCluster.settled(engine={"replicas": 2})
    bench.world.change(engine={"args": ["--headless"]})
    assert (bench.reconcile() or 0) > 500
    assert bench.message("Degraded").count("--headless") == 1, "also with several components"
    assert bench.message("Degraded").startswith("spec.engine.args")
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    statuses = [{"name": "engine", "state": waiting}]
    bench.world.pods["demo-engine-0"]["status"] = {"containerStatuses": statuses}
    lost = bench.world.pods["demo-engine-1"]
    lost["spec"]["nodeName"] = "gone"
    lost["metadata"]["deletionTimestamp"] = long_ago = "2026-01-01T00:00:00Z"
    lost["status"] = {"conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": long_ago}]}
    assert (bench.reconcile() or 900) < 60
    assert "delete by force demo-engine-1" in bench.writes
    assert "no such image" in str(bench.world.resource["status"])
    assert bench.message("Degraded").startswith("spec.engine.args")
    bench.world.run_stateful_sets(is_ready=False)
    bench.world.set_ready("demo-engine-0", True)
    assert (bench.reconcile() or 900) < 60  # short pauses until the new pod serves
    bench.world.set_ready("demo-engine-1", True)
    assert (bench.reconcile() or 0) > 500


@pytest.mark.parametrize("first_pod", ["terminating", "loading"])
def test_failed_mount_is_reported_regardless_of_other_pods(first_pod: str) -> None:
    bench = ReconciledCluster.settled(engine={"replicas": 2})
    first, second = (bench.world.pods[f"demo-engine-{n}"] for n in range(2))
    second["status"] = {"phase": "Pending"}
    first["status"] = {"containerStatuses": [{"name": "engine", "state": {"running": {}}}]}
    if first_pod == "terminating":
        first["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    now = datetime.now(UTC).isoformat()
    event = {"reason": "FailedMount", "message": 'secret "kv" not found', "lastTimestamp": now}
    bench.world.warnings = [event | {"involvedObject": {"uid": second["metadata"]["uid"]}}]
    bench.reconcile()
    assert bench.degraded() == ("True", 'pod demo-engine-1: secret "kv" not found')
