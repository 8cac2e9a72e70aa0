"""Full reconciliations of a cluster against a simulated API server."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import kopf
import pytest
from aiohttp import ClientSession

from lmcache_operator import metrics
from lmcache_operator.app import Health, build_registry
from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.components.injection.injection import Injection
from lmcache_operator.components.registry import COMPONENTS, kinds_of
from lmcache_operator.errors import RefusedError
from lmcache_operator.queue import KeyedQueue
from lmcache_operator.reconcile.contest import ContestLog
from lmcache_operator.specs.kinds import ClusterKey, Ref, owner_key
from testing.child_process import free_port
from tests.harness.operator.components import GOOD, KEY, ReconciledCluster
from tests.harness.operator.model import NAME, NAMESPACE, UID, cluster
from tests.harness.operator.plans import STATEFUL_SET


def raise_key_error(*_: object) -> None:
    raise KeyError("name")


def reasons(bench: ReconciledCluster) -> dict[str, str]:
    return {each["type"]: each["reason"] for each in bench.world.resource["status"]["conditions"]}


def test_fault_of_a_component_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, progress = ReconciledCluster(), []
    monkeypatch.setattr(Injection, "plan", raise_key_error)
    for _ in range(2):
        with pytest.raises(KeyError):
            bench.reconcile()
        progress.append(reasons(bench)["Progressing"])
        bench.world.run_stateful_sets()
    assert STATEFUL_SET in bench.world.objects
    assert progress == ["Scaling", "InternalError"]  # engines continue, but the reconciliation is incomplete
    assert reasons(bench)["Degraded"] == "InternalError"
    assert bench.message("Degraded").count("internal error of the operator") == 1


def test_fault_before_a_change_is_reported_as_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ReconciledCluster.settled()
    bench.world.change(engine={"args": ["--new"]})
    monkeypatch.setattr(Engine, "plan", raise_key_error)
    with pytest.raises(KeyError):
        bench.reconcile()
    by_kind = reasons(bench)
    assert {by_kind[kind] for kind in ("Progressing", "Degraded")} == {"InternalError"}
    assert by_kind["Ready"] == "Serving"
    assert not any(write.startswith("apply") for write in bench.writes)  # also not for injected pods


def test_invalid_spec_without_pods_waits_for_a_long_pause() -> None:
    bench = ReconciledCluster()
    bench.world.resource["spec"]["engine"] = {"args": ["--port=1"]}
    bench.reconcile()
    assert (bench.reconcile() or 0) > 800


def test_refused_engine_template_is_not_injected() -> None:
    """The API server would refuse the injected pod, too."""
    bench = ReconciledCluster()
    bench.world.failures["apply StatefulSet"] = RefusedError("PATCH x", "spec.template: Invalid value")
    bench.reconcile()
    assert Ref("LMCacheProfile", "demo-injection") not in bench.world.objects
    bench.world.failures.clear()
    bench.reconcile()
    assert Ref("LMCacheProfile", "demo-injection") in bench.world.objects


def test_deleted_or_recreated_cluster_is_not_touched() -> None:
    ending = cluster()["metadata"] | {"deletionTimestamp": "2026-01-01T00:00:00Z"}
    for metadata in (None, {"uid": "other", "name": NAME}, ending):
        bench = ReconciledCluster()
        bench.world.resource = cast(Any, metadata and cluster() | {"metadata": metadata})
        assert (bench.reconcile(), bench.writes) == (None, [])


def test_object_of_another_owner_is_never_taken_over() -> None:
    bench = ReconciledCluster()
    foreign_service = {"metadata": {"name": NAME, "uid": "1", "labels": {}}}
    bench.world.objects[Ref("Service", NAME)] = foreign_service
    bench.settle()
    assert bench.world.objects[Ref("Service", NAME)] is foreign_service
    assert bench.message("Degraded").startswith(
        "Service demo exists and does not belong to this LMCacheCluster"
    )
    assert bench.conditions()["EngineAvailable"] == "True", "other children are applied"
    del bench.world.objects[Ref("Service", NAME)]
    bench.settle()
    assert bench.condition("Ready") == ("True", "Ready")


def test_child_without_labels_is_found_by_its_name() -> None:
    bench = ReconciledCluster.settled()
    bench.world.edit(Ref("Service", NAME), "metadata", "labels", value={})
    bench.reconcile()
    assert bench.writes == ["apply Service demo"]


def num_applied(
    bench: ReconciledCluster, ref: Ref, change: Callable[[int], object], *, times: int, every: float
) -> int:
    """How many of these reconciliations apply the object. A change precedes each."""
    number = 0
    for time in range(times):
        bench.seconds += every
        change(time)
        number += f"apply {ref}" in bench.run()
    return number


def test_repeatedly_reverted_field_is_contested_and_others_are_applied() -> None:
    bench = ReconciledCluster.settled()

    def scale(_: int) -> None:
        bench.world.edit(STATEFUL_SET, "spec", "replicas", value=9)

    # four times with the field, once without it
    assert num_applied(bench, STATEFUL_SET, scale, times=10, every=1) == 5
    assert "spec.replicas of StatefulSet demo-engine" in bench.message("Degraded")
    bench.world.change(engine={"image": "e:2"})
    bench.reconcile()
    live = bench.world.objects[STATEFUL_SET]["spec"]
    assert (live["replicas"], live["template"]["spec"]["containers"][0]["image"]) == (9, "e:2")
    bench.seconds += 31
    bench.reconcile()
    assert bench.world.objects[STATEFUL_SET]["spec"]["replicas"] == 1


@pytest.mark.parametrize(("kind", "name"), [("PodDisruptionBudget", "demo-engine"), ("Service", NAME)])
def test_child_that_another_program_deletes_or_takes_over_is_not_applied_for_a_while(kind, name):
    """A program that replaces all annotations removes the hash of the applied object."""
    bench, ref = ReconciledCluster.settled(), Ref(kind, name)

    def take(_: int) -> None:
        if kind == "Service":
            bench.world.edit(ref, "metadata", "annotations", value={})
        else:
            bench.world.objects.pop(ref, None)

    assert num_applied(bench, ref, take, times=70, every=0.2) == 3  # the first apply was at creation
    assert f"deleting or taking over {ref}" in bench.message("Degraded")
    bench.seconds += 31
    bench.settle()
    assert bench.condition("Ready") == ("True", "Ready")


def test_two_operators_with_different_renderings_slow_down() -> None:
    """Both operators have the same field manager, so each owns all fields but finds a different rendering."""
    bench = ReconciledCluster.settled()

    def render(_: int) -> None:
        annotations = bench.world.objects[STATEFUL_SET]["metadata"]["annotations"]
        annotations["lmcache.io/rendered-hash"] = "of another version"

    assert num_applied(bench, STATEFUL_SET, render, times=20, every=0.1) == 4
    assert "writing a different StatefulSet demo-engine, as a second operator would" in bench.message(
        "Degraded"
    )
    bench.world.change(engine={"replicas": 2})
    assert "apply StatefulSet demo-engine" in bench.run(), "a change of the spec is no contest"
    bench.seconds += 700
    bench.settle()
    assert bench.condition("Ready") == ("True", "Ready")


def test_repeated_spec_changes_are_no_contest() -> None:
    bench = ReconciledCluster.settled()

    def scale(time: int) -> None:
        bench.world.change(engine={"replicas": 2 - time % 2})

    assert num_applied(bench, STATEFUL_SET, scale, times=20, every=1) == 20


def test_contest_pauses_grow_and_slow_drift_is_no_contest() -> None:
    log, ref = ContestLog(), Ref("Service", "x")
    for minute in range(20):
        log.note_repair(ref, ("f:spec",), minute * 61.0)
        assert log.contested(minute * 61.0) == {}
    time, pauses = 1e4, []
    for _ in range(10):
        log.note_repair(ref, ("f:spec",), time)
        start = time
        while log.contested(time):
            time += 1
        pauses.append(time - start)
    assert pauses == [0, 0, 0, 30, 60, 120, 240, 480, 600, 600]


def test_refused_read_of_a_cluster_is_repeated_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ReconciledCluster.settled()
    refused, failures = metrics.REFUSED_READS.labels(NAMESPACE)._value, metrics.RECONCILE_FAILURES._value
    before = failures.get()

    async def refuse(*_: object) -> None:
        raise RefusedError("GET", "lmcacheclusters is forbidden")

    with monkeypatch.context() as lost:
        lost.setattr(bench.world, "get", refuse)
        assert [bench.reconcile(), bench.reconcile()] == [60.0, 60.0]
        assert (refused.get(), failures.get()) == (1, before)
    bench.reconcile()
    assert refused.get() == 0


def test_nothing_is_created_in_a_terminating_namespace() -> None:
    bench = ReconciledCluster.settled()
    bench.world.is_namespace_ending = True
    assert bench.reconcile() is not None  # the operator checks this only when a child is missing
    del bench.world.objects[Ref("Service", NAME)]
    assert bench.reconcile() is None
    assert bench.writes == []


def test_pod_replacement_respects_disruption_budgets() -> None:
    bench = ReconciledCluster.settled(engine={"replicas": 2})
    bench.world.change(engine={"args": ["--new"]})
    bench.world.evictions_allowed = False
    bench.reconcile()
    bench.world.run_stateful_sets()
    assert bench.reconcile() == 10  # no event reports a freed budget
    assert not any(write.startswith("evict") for write in bench.writes)
    bench.world.evictions_allowed = True
    bench.reconcile()
    assert "evict demo-engine-0" in bench.writes
    bench.world.run_stateful_sets()
    bench.settle()
    assert all("--new" in pod["spec"]["containers"][0]["args"] for pod in bench.world.pods.values())


def test_pods_of_another_owner_are_not_counted() -> None:
    bench = ReconciledCluster.settled()
    unowned_pod = bench.world.pods["demo-engine-0"] | {"metadata": {"name": "x", "labels": {
        "lmcache.io/cluster": NAME, "lmcache.io/component": "engine"}}}  # fmt: skip
    bench.world.pods["x"] = unowned_pod
    bench.reconcile()
    assert bench.writes == []


# -- events that wake a cluster


def test_children_wake_the_cluster_that_owns_them() -> None:
    user = {"apiVersion": "lmcache.io/v1alpha1", "kind": "LMCacheCluster", "name": NAME, "uid": UID}
    owner = user | {"controller": True}
    assert owner_key(NAMESPACE, {"ownerReferences": [owner]}) == KEY
    for references in ([user], [owner | {"apiVersion": "apps/v1", "kind": "Deployment"}], []):
        assert owner_key(NAMESPACE, {"ownerReferences": references}) is None
    assert owner_key(NAMESPACE, {}) is None


def test_forged_owner_of_an_object_makes_the_operator_forget_no_cluster() -> None:
    """Any user can create an object whose owner has the uid of another cluster, in any namespace."""
    bench = ReconciledCluster.settled()
    memory = bench.reconciler._memories[KEY]
    forged = ClusterKey("theirs", "no-such", UID)
    assert asyncio.run(bench.reconciler.reconcile(forged)) is None
    assert bench.reconciler._memories[KEY] is memory


def test_kopf_gets_handlers_that_write_nothing() -> None:
    """Change handlers, timers and daemons put annotations or finalizers on objects."""

    async def work(_: ClusterKey) -> None:
        return None

    registry = build_registry(KeyedQueue(work, num_workers=1), asyncio.Event().wait)
    assert isinstance(registry, kopf.OperatorRegistry)
    kinds = {kind.kind for kind in kinds_of(COMPONENTS)} - {"Certificate", "PodGroup"}
    assert "LMCacheCluster" in kinds, "that of prefill pods; all of them have one handler"
    assert len(registry._watching.get_all_handlers()) == len(kinds)
    assert not registry._changing.get_all_handlers()
    assert not registry._spawning.get_all_handlers()
    assert not registry._indexing.get_all_handlers()


@pytest.mark.parametrize(("hung_seconds", "status"), [(0.0, 200), (299.0, 200), (301.0, 500)])
def test_healthz_fails_when_work_hangs(hung_seconds: float, status: int) -> None:
    """The request is that of the kubelet."""

    async def get_status() -> int:
        health = Health()
        health.longest_run_seconds = lambda: hung_seconds
        port = free_port()
        url = f"http://127.0.0.1:{port}/healthz"
        async with health.serve(port), ClientSession() as session, session.get(url) as answer:
            return answer.status

    assert asyncio.run(get_status()) == status


def test_sidecars_are_polled_with_growing_pauses_while_one_is_not_ready() -> None:
    bench = ReconciledCluster.settled()
    bench.answer({"is_ready": False, "not_ready_reason": "bad URL"})
    assert (bench.reconcile(), bench.writes) == (5.0, ["status"])
    assert "SidecarNotReady" in str(bench.world.events)
    assert bench.condition("Ready") == ("True", "Ready")
    pauses = []
    for number in range(6):  # a changed message is written, but causes no earlier poll
        bench.world.stats["10.0.0.0"]["not_ready_reason"] = f"bad URL {'x' * number}"
        pauses.append(bench.reconcile())
    assert pauses == [10.0, 20.0, 40.0, 60.0, 60.0, 60.0]
    bench.answer(GOOD)
    num_asked = bench.world.num_stats_reads
    assert (bench.reconcile() or 0) > 500
    assert bench.world.num_stats_reads == num_asked + 1
    bench.reconcile()
    bench.restart_operator()
    bench.reconcile()
    assert bench.writes == []


def test_silent_sidecar_does_not_shorten_the_pause() -> None:
    bench = ReconciledCluster.settled()
    bench.answer(None)
    for expected in (["status"], [], []):
        assert (bench.reconcile() or 0) > 500
        assert bench.writes == expected
