"""Reconciliations do not read children that do not exist and that the spec does not ask for."""

from typing import Any

import pytest

from lmcache_operator.errors import UnavailableError
from lmcache_operator.pods import pods
from lmcache_operator.specs.kinds import Ref
from tests.harness.operator.components import ReconciledCluster
from tests.harness.operator.plans import STATEFUL_SET

REMOTE = {Ref(kind, "demo-remote") for kind in ("ConfigMap", "Service", "StatefulSet", "Certificate")}
CLAIM = Ref("ResourceClaimTemplate", "demo-engine")
SAVED_SIZES = Ref("ConfigMap", "demo-autoscaling")
MANAGED = {"remote": {"managed": {"shards": 2, "memoryPerShard": "1Gi"}}}


class ReadBench(ReconciledCluster):
    """Records what a reconciliation reads. Lists of objects have no name."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.reads: list[Ref] = []
        self.world.get = self._recorded(self.world.get)
        self.world.find = self._recorded(self.world.find)

    def _recorded(self, read: Any) -> Any:
        async def record_and_read(kind: Any, namespace: str, *more: Any, **selectors: Any) -> Any:
            self.reads.append(Ref(kind.kind, "".join(name for name in more if isinstance(name, str))))
            return await read(kind, namespace, *more, **selectors)

        return record_and_read

    def reconciled_reads(self) -> set[Ref]:
        """Reconcile once, and return the objects that were read."""
        self.reads.clear()
        self.reconcile()
        return set(self.reads)


@pytest.fixture
def bench() -> ReadBench:
    return ReadBench.settled()


def test_reconciliation_of_an_idle_cluster_reads_only_existing_children(bench: ReadBench) -> None:
    reads = bench.reconciled_reads()
    assert not reads & {CLAIM, *REMOTE}
    assert reads > {STATEFUL_SET, SAVED_SIZES}
    assert len(bench.reads) == 12, "as docs/reference/benchmarks.md says"


def test_groups_of_pods_are_listed_and_not_read_one_by_one() -> None:
    engine = {"replicas": 5, "nodes": 2, "parallelism": {"data": 2}}
    bench = ReadBench.settled(engine=engine)
    reads = bench.reconciled_reads()
    assert {Ref("StatefulSet", ""), Ref("NetworkPolicy", "")} < reads
    assert len(bench.reads) == 13, "12 without the StatefulSet of single pods, and two lists"
    bench.change(engine={"nodes": 1, "parallelism": {"data": 1}})
    assert Ref("StatefulSet", "") not in bench.reconciled_reads()
    assert len(bench.reads) == 12


def test_new_cluster_needs_no_list_of_groups() -> None:
    bench = ReadBench()
    bench.world.failures["serves"] = AssertionError("a request more")
    assert not {Ref("StatefulSet", ""), Ref("NetworkPolicy", "")} & bench.reconciled_reads()


def test_reads_do_not_grow_with_the_number_of_engines(monkeypatch) -> None:
    bench = ReconciledCluster.settled(engine={"replicas": 2, "nodes": 2, "parallelism": {"data": 2}})
    calls: list[str] = []

    def count(target: Any, name: str) -> None:
        call = getattr(target, name)

        def counted(*args: Any, **more: Any) -> Any:
            calls.append(name)
            return call(*args, **more)

        monkeypatch.setattr(target, name, counted)

    for target, name in ((bench.world, "get"), (bench.world, "find"), (pods, "controller_uid")):
        count(target, name)

    def used() -> dict[str, int]:
        calls.clear()
        bench.run()
        return {name: calls.count(name) for name in ("get", "find")}

    bench.world.change(engine={"replicas": 12})
    few = used()
    assert used()["find"] > few["find"], "the first run has created the sets, so the second one reads Events"
    bench.settle()
    bench.world.change(engine={"replicas": 40})
    assert used() == few
    assert used()["find"] <= few["find"] + 1, "Events of one set say why pods are missing"
    bench.settle()
    bench.run()
    calls.clear()
    bench.run()
    assert calls.count("controller_uid") <= 10 * len(bench.world.pods)


def test_changed_spec_makes_the_operator_read_all_children(bench: ReadBench) -> None:
    bench.world.change(tiers=MANAGED)
    assert bench.reconciled_reads() > {CLAIM, *REMOTE}
    bench.settle()
    assert Ref("StatefulSet", "demo-remote") in bench.world.objects
    bench.change(tiers={"remote": None})
    assert Ref("StatefulSet", "demo-remote") not in bench.world.objects
    assert not bench.reconciled_reads() & REMOTE


def test_unwanted_child_of_another_program_is_deleted_within_75_minutes(bench):
    bench.change(tiers=MANAGED)
    config = Ref("ConfigMap", "demo-remote")
    restored = bench.world.objects[config]
    bench.change(tiers={"remote": None})
    bench.world.objects[config] = restored
    bench.reconcile()
    bench.seconds += 3600
    bench.reconcile()
    assert config not in bench.world.objects


def test_failed_reconciliation_makes_the_operator_read_all_children(bench: ReadBench) -> None:
    del bench.world.objects[STATEFUL_SET]
    bench.world.failures["apply StatefulSet"] = UnavailableError("PATCH x", "no answer")
    with pytest.raises(UnavailableError):
        bench.reconcile()
    bench.world.failures.clear()
    assert bench.reconciled_reads() > {CLAIM, *REMOTE}


@pytest.mark.parametrize("taken", [Ref("Service", "demo-engine"), Ref("ConfigMap", "demo-peers")])
def test_children_that_wait_for_a_taken_name_are_read_each_time(taken: Ref) -> None:
    """Another owner may create one of them meanwhile."""
    bench = ReadBench(tiers={"peers": {}})
    bench.world.objects[taken] = {"metadata": {"name": taken.name, "uid": "1"}}
    bench.reconcile()
    assert bench.reconciled_reads() > {STATEFUL_SET, Ref("ServiceAccount", "demo-engine")}
