"""Whole reconciliations of a cluster, against an API server's behaviour in memory."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import kopf
import pytest
from aiohttp import ClientSession
from lmcache_operator.app import Health, build_registry, owner_key
from lmcache_operator.components import COMPONENTS, kinds_of
from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.components.injection.injection import Injection
from lmcache_operator.errors import RefusedError
from lmcache_operator.queue import KeyedQueue
from lmcache_operator.reconcile.contest import ContestLog
from lmcache_operator.specs.kinds import ClusterKey, Ref

from testing.child_process import free_port
from tests.harness.operator_bench import KEY, STATEFUL_SET, Bench
from tests.harness.operator_model import NAME, NAMESPACE, UID, cluster


def test_a_new_cluster_becomes_ready_and_then_nothing_is_written() -> None:
    bench = Bench()
    bench.reconcile()
    assert bench.writes[-3:] == [
        "apply StatefulSet demo-engine",
        "apply LMCacheProfile demo-injection",
        "status",
    ]
    bench.settle()
    assert bench.ready() == ("True", "1 of 1 engine pods are ready")
    seconds = bench.reconcile()
    assert seconds is not None
    assert 800 < seconds < 1000


def stumble(*_: object) -> None:
    raise KeyError("name")


def test_a_fault_of_one_component_keeps_no_other_from_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, progress = Bench(), []
    monkeypatch.setattr(Injection, "plan", stumble)
    for _ in range(2):
        with pytest.raises(KeyError):
            bench.reconcile()
        conditions = {one["type"]: one for one in bench.world.resource["status"]["conditions"]}
        progress.append(conditions["Progressing"]["reason"])
        bench.world.run_stateful_sets()
    assert STATEFUL_SET in bench.world.objects
    assert progress == ["Scaling", "InternalError"]  # the engines go on, and then not all is complete
    assert conditions["Degraded"]["reason"] == "InternalError"
    assert conditions["Degraded"]["message"].count("a fault of the operator") == 1


def test_what_a_fault_kept_from_being_done_is_not_called_done(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.settle()
    bench.world.change(engine={"args": ["--new"]})
    monkeypatch.setattr(Engine, "plan", stumble)
    with pytest.raises(KeyError):
        bench.reconcile()
    told = {one["type"]: one["reason"] for one in bench.world.resource["status"]["conditions"]}
    assert (told["Ready"], told["Progressing"], told["Degraded"]) == ("InternalError",) * 3
    assert not any(write.startswith("apply") for write in bench.writes)  # nor for pods of others


def test_an_invalid_spec_that_never_had_pods_is_at_rest() -> None:
    bench = Bench()
    bench.world.resource["spec"]["engine"] = {"args": ["--port=1"]}
    bench.reconcile()
    assert (bench.reconcile() or 0) > 800


def test_no_pod_of_others_gets_what_the_api_server_refused_for_our_own() -> None:
    """It would refuse that pod, too."""
    bench = Bench()
    bench.world.failures["apply StatefulSet"] = RefusedError("PATCH x", "spec.template: Invalid value")
    bench.reconcile()
    assert Ref("LMCacheProfile", "demo-injection") not in bench.world.objects
    bench.world.failures.clear()
    bench.reconcile()
    assert Ref("LMCacheProfile", "demo-injection") in bench.world.objects


def test_a_restart_writes_nothing() -> None:
    bench = Bench(engine={"replicas": 2})
    bench.settle()
    bench.restart()
    bench.reconcile()
    assert bench.writes == []


def test_a_cluster_that_is_gone_replaced_or_going_is_not_touched() -> None:
    for resource in (None, cluster() | {"metadata": {"uid": "other", "name": NAME}}):
        bench = Bench()
        bench.world.resource = cast(Any, resource)
        assert bench.reconcile() is None
        assert bench.writes == []
    bench = Bench()
    bench.world.resource["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert bench.reconcile() is None
    assert bench.writes == []


def test_an_object_of_somebody_else_is_never_taken_over() -> None:
    bench = Bench()
    foreign = {"metadata": {"name": NAME, "uid": "1", "labels": {}}}
    bench.world.objects[Ref("Service", NAME)] = foreign
    bench.settle()
    assert bench.world.objects[Ref("Service", NAME)] is foreign
    assert bench.ready()[1].startswith("Service demo exists and belongs to somebody else")
    del bench.world.objects[Ref("Service", NAME)]
    bench.settle()
    assert bench.ready()[0] == "True"


def test_a_child_whose_labels_were_removed_is_found_by_its_name() -> None:
    bench = Bench()
    bench.settle()
    bench.world.edit(Ref("Service", NAME), "metadata", "labels", value={})
    bench.reconcile()
    assert bench.writes == ["apply Service demo"]


def test_nothing_is_made_in_a_namespace_that_is_ending() -> None:
    bench = Bench()
    bench.settle()
    bench.world.is_namespace_ending = True
    assert bench.reconcile() is not None  # as long as nothing is missing nobody asks
    del bench.world.objects[Ref("Service", NAME)]
    assert bench.reconcile() is None
    assert bench.writes == []


def test_a_field_that_is_taken_back_again_and_again_is_left_alone_and_no_other() -> None:
    bench = Bench()
    bench.settle()
    healed = 0
    for _ in range(10):
        bench.clock.now += 1
        bench.world.edit(STATEFUL_SET, "spec", "replicas", value=9)
        bench.reconcile()
        healed += "apply StatefulSet demo-engine" in bench.writes
    assert healed == 5  # four times the field, and then the rest without it
    assert "spec.replicas of StatefulSet demo-engine" in bench.ready()[1]
    bench.world.change(engine={"image": "e:2"})
    bench.reconcile()
    live = bench.world.objects[STATEFUL_SET]["spec"]
    assert (live["replicas"], live["template"]["spec"]["containers"][0]["image"]) == (9, "e:2")
    bench.clock.now += 31
    bench.reconcile()
    assert bench.world.objects[STATEFUL_SET]["spec"]["replicas"] == 1


def test_a_child_that_is_deleted_again_and_again_is_left_alone_for_a_while() -> None:
    bench = Bench()
    bench.settle()
    made = 0
    for _ in range(70):
        bench.clock.now += 0.2
        bench.world.objects.pop(Ref("PodDisruptionBudget", "demo-engine"), None)
        bench.reconcile()
        made += "apply PodDisruptionBudget demo-engine" in bench.writes
    assert made == 3  # and once when the cluster was new
    assert "deleting or taking over PodDisruptionBudget demo-engine" in bench.ready()[1]
    bench.clock.now += 31
    bench.settle()
    assert bench.ready()[0] == "True"


def test_a_child_that_is_taken_over_again_and_again_is_left_alone_for_a_while() -> None:
    """Whoever replaces all annotations takes the hash, by which we know what we applied."""
    bench = Bench()
    bench.settle()
    written = 0
    for _ in range(20):
        bench.clock.now += 1
        bench.world.edit(Ref("Service", NAME), "metadata", "annotations", value={})
        bench.reconcile()
        written += "apply Service demo" in bench.writes
    assert written == 3  # and once when the cluster was new
    assert "deleting or taking over Service demo" in bench.ready()[1]


def test_two_operators_that_render_otherwise_slow_each_other_down() -> None:
    """Each finds all fields its own, since both have one manager, and another rendering than its own."""
    bench = Bench()
    bench.settle()
    num_written, other = 0, "of another version"
    for _ in range(20):
        bench.clock.now += 0.1
        bench.world.objects[STATEFUL_SET]["metadata"]["annotations"]["lmcache.io/rendered-hash"] = other
        bench.reconcile()
        num_written += "apply StatefulSet demo-engine" in bench.writes
    assert num_written == 4
    assert "writing StatefulSet demo-engine otherwise, as another operator would" in bench.ready()[1]
    bench.world.change(engine={"replicas": 2})
    bench.reconcile()
    assert "apply StatefulSet demo-engine" in bench.writes, "what the user declares anew is no contest"
    bench.clock.now += 700
    bench.settle()
    assert bench.ready()[0] == "True"


def test_what_is_declared_to_and_fro_is_no_contest() -> None:
    bench = Bench()
    bench.settle()
    for number in range(20):
        bench.clock.now += 1
        bench.world.change(engine={"replicas": 1 + number % 2})
        bench.reconcile()
        assert "apply StatefulSet demo-engine" in bench.writes or not number


def test_slow_drift_is_no_contest_and_a_lasting_one_is_left_alone_for_longer_and_longer() -> None:
    log, ref = ContestLog(), Ref("Service", "x")
    for minute in range(20):
        log.note_repair(ref, ("f:spec",), minute * 61.0)
        assert log.contested(minute * 61.0) == {}
    now, pauses = 1e4, []
    for _ in range(10):
        log.note_repair(ref, ("f:spec",), now)
        start = now
        while log.contested(now):
            now += 1
        pauses.append(now - start)
    assert pauses == [0, 0, 0, 30, 60, 120, 240, 480, 600, 600]


def test_pods_are_replaced_as_far_as_disruption_budgets_allow() -> None:
    bench = Bench(engine={"replicas": 2})
    bench.settle()
    bench.world.change(engine={"args": ["--new"]})
    bench.world.evictions_allowed = False
    bench.reconcile()
    bench.world.run_stateful_sets()
    assert bench.reconcile() == 10  # a budget frees up without a word
    assert not any(write.startswith("evict") for write in bench.writes)
    bench.world.evictions_allowed = True
    bench.reconcile()
    assert "evict demo-engine-0" in bench.writes
    bench.world.run_stateful_sets()
    bench.settle()
    assert all("--new" in pod["spec"]["containers"][0]["args"] for pod in bench.world.pods.values())


def test_pods_of_another_owner_are_not_counted() -> None:
    bench = Bench()
    bench.settle()
    stranger = bench.world.pods["demo-engine-0"] | {"metadata": {"name": "x", "labels": {
        "lmcache.io/cluster": NAME, "lmcache.io/component": "engine"}}}  # fmt: skip
    bench.world.pods["x"] = stranger
    bench.reconcile()
    assert bench.writes == []


# -- what wakes a cluster


def test_children_wake_the_cluster_that_owns_them() -> None:
    owner = {"apiVersion": "lmcache.io/v1alpha1", "kind": "LMCacheCluster", "name": NAME, "uid": UID}
    assert owner_key(NAMESPACE, {"ownerReferences": [owner | {"controller": True}]}) == KEY
    assert owner_key(NAMESPACE, {"ownerReferences": [owner]}) is None
    assert owner_key(NAMESPACE, {}) is None
    other = owner | {"controller": True, "apiVersion": "apps/v1", "kind": "Deployment"}
    assert owner_key(NAMESPACE, {"ownerReferences": [other]}) is None


def test_kopf_gets_handlers_that_write_nothing() -> None:
    """Change handlers, timers and daemons put annotations or finalizers on objects."""

    async def work(_: ClusterKey) -> None:
        return None

    registry = build_registry(KeyedQueue(work, num_workers=1), asyncio.Event().wait)
    assert isinstance(registry, kopf.OperatorRegistry)
    assert len(registry._watching.get_all_handlers()) == len(
        kinds_of(COMPONENTS)
    )  # and clusters, but Certificates
    assert not registry._changing.get_all_handlers()
    assert not registry._spawning.get_all_handlers()
    assert not registry._indexing.get_all_handlers()


@pytest.mark.parametrize(("hung_seconds", "status"), [(0.0, 200), (299.0, 200), (301.0, 500)])
def test_healthz_answers_and_fails_when_work_hangs(hung_seconds: float, status: int) -> None:
    """Asked the way the kubelet asks."""

    async def ask() -> int:
        health = Health()
        health.longest_run_seconds = lambda: hung_seconds
        port = free_port()
        url = f"http://127.0.0.1:{port}/healthz"
        async with health.serve(port), ClientSession() as session, session.get(url) as answer:
            return answer.status

    assert asyncio.run(ask()) == status


def test_sidecars_are_asked_at_looks_that_come_again_while_one_can_not_run() -> None:
    bench = Bench()
    bench.settle()
    bench.world.pods["demo-engine-0"]["status"] |= {"phase": "Running", "podIP": "10.0.0.1"}
    bench.world.stats["10.0.0.1"] = {"is_ready": False, "not_ready_reason": "bad URL"}
    assert bench.reconcile() == 5.0
    assert bench.writes == ["status"]
    assert "SidecarNotReady" in str(bench.world.told)
    assert bench.ready()[0] == "True"
    waits = []
    for number in range(6):  # other words are written, and are no reason to look sooner
        bench.world.stats["10.0.0.1"]["not_ready_reason"] = f"bad URL {'x' * number}"
        waits.append(bench.reconcile())
    assert waits == [10.0, 20.0, 40.0, 60.0, 60.0, 60.0]
    bench.world.stats["10.0.0.1"] = {"is_ready": True, "num_clients": {"attached": 1}}
    num_asked = bench.world.num_asked
    assert (bench.reconcile() or 0) > 500
    assert bench.world.num_asked == num_asked + 1
    bench.reconcile()
    bench.restart()
    bench.reconcile()
    assert bench.writes == []


def test_a_sidecar_that_does_not_answer_keeps_nothing_from_resting() -> None:
    bench = Bench()
    bench.settle()
    bench.world.pods["demo-engine-0"]["status"] |= {"phase": "Running", "podIP": "10.0.0.1"}
    for expected in (["status"], [], []):
        assert (bench.reconcile() or 0) > 500
        assert bench.writes == expected
