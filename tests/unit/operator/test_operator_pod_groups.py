"""PodGroups of engines over several nodes, on an in-memory API server."""

from typing import Any

import pytest

from lmcache_operator.errors import UnavailableError
from lmcache_operator.specs.kinds import Ref
from tests.harness.operator.components import ReconciledCluster

OVER_TWO = {"nodes": 2, "parallelism": {"data": 2}, "replicas": 2}
OVER_THREE = {"nodes": 3, "parallelism": {"data": 3}}


def settled(*, is_served: bool, **engine: Any) -> ReconciledCluster:
    """Two engines of two pods each."""
    bench = ReconciledCluster(engine=OVER_TWO | engine)
    bench.world.serves_pod_groups = is_served
    bench.settle()
    return bench


def pod_groups(bench: ReconciledCluster) -> dict[str, Any]:
    """Policies of the PodGroups."""
    return {
        ref.name: each["spec"]["schedulingPolicy"]
        for ref, each in bench.world.objects.items()
        if ref.kind == "PodGroup"
    }


def group_of(bench: ReconciledCluster, pod: str) -> str | None:
    """The PodGroup of a pod."""
    group: dict[str, str] = bench.world.pods[pod]["spec"].get("schedulingGroup", {})
    return group.get("podGroupName")


def writes(bench: ReconciledCluster) -> list[str]:
    """Writes of the next reconciliation, without the status."""
    return [write for write in bench.run() if write != "status"]


def test_each_engine_has_a_pod_group_before_its_stateful_set() -> None:
    bench = ReconciledCluster(engine=OVER_TWO)
    bench.world.serves_pod_groups = True
    order = [f"apply {kind} demo-engine-{n}{end}" for n in range(2) for kind, end in (
        ("NetworkPolicy", ""), ("PodGroup", "-2-pods"), ("StatefulSet", ""),
    )]  # fmt: skip
    assert [write for write in writes(bench) if write in order] == order
    bench.settle()
    assert pod_groups(bench) == {f"demo-engine-{n}-2-pods": {"gang": {"minCount": 2}} for n in range(2)}
    assert [group_of(bench, f"demo-engine-1-{rank}") for rank in range(2)] == ["demo-engine-1-2-pods"] * 2
    assert writes(bench) == []
    bench.change(engine={"replicas": 1})
    assert pod_groups(bench).keys() == {"demo-engine-0-2-pods"}


def test_engine_on_one_node_asks_for_no_pod_groups() -> None:
    bench = ReconciledCluster.settled(engine={"replicas": 2})
    bench.world.failures["serves"] = AssertionError("a request more")
    bench.restart_operator()
    bench.change(engine={"args": ["--new"]})


def test_older_kubernetes_gets_no_pod_groups() -> None:
    bench = ReconciledCluster(engine=OVER_TWO)
    bench.world.failures["find PodGroup"] = AssertionError("404")
    bench.world.failures["get PodGroup"] = AssertionError("404")
    bench.settle()
    assert pod_groups(bench) == {}
    assert group_of(bench, "demo-engine-0-0") is None


def test_running_engines_join_pod_groups_with_their_next_spec() -> None:
    """A pod that joined alone would wait forever for the other pods, which cannot join."""
    bench = settled(is_served=False)
    bench.world.serves_pod_groups = True
    assert writes(bench) == []
    del bench.world.pods["demo-engine-0-1"]
    bench.world.run_stateful_sets()
    assert (writes(bench), group_of(bench, "demo-engine-0-1")) == ([], None)
    former = {pod["metadata"]["uid"] for pod in bench.world.pods.values()}
    bench.change(engine={"args": ["--new"]})
    assert {group_of(bench, name) for name in bench.world.pods} == pod_groups(bench).keys()
    assert not former & {pod["metadata"]["uid"] for pod in bench.world.pods.values()}


def test_api_that_is_switched_off_restarts_no_pod() -> None:
    bench = settled(is_served=True)
    pods = {name: pod["metadata"]["uid"] for name, pod in bench.world.pods.items()}
    bench.world.serves_pod_groups = False
    bench.settle()
    sets = [each for ref, each in bench.world.objects.items() if ref.kind == "StatefulSet"]
    assert not any("schedulingGroup" in each["spec"]["template"]["spec"] for each in sets)
    bench.world.serves_pod_groups = True
    bench.settle()
    assert {name: pod["metadata"]["uid"] for name, pod in bench.world.pods.items()} == pods
    assert pod_groups(bench) == {}, "a pod that is created now has none"


def test_nothing_changes_while_the_operator_cannot_find_out() -> None:
    bench = settled(is_served=True)
    bench.world.failures["serves"] = UnavailableError("GET /apis", "503")
    with pytest.raises(UnavailableError):
        bench.run()
    assert [write for write in bench.writes if write != "status"] == []


@pytest.mark.parametrize(
    ("spec", "has_groups"),
    [
        ({"schedulerName": "volcano"}, False),
        ({"schedulingGroup": {"podGroupName": "mine"}}, False),
        ({"schedulerName": "default-scheduler"}, True),
    ],
)
def test_user_can_choose_another_scheduler_or_group(spec: dict[str, Any], has_groups: bool) -> None:
    bench = settled(is_served=True, podTemplate={"spec": spec})
    assert bool(pod_groups(bench)) == has_groups
    assert spec.items() <= bench.world.pods["demo-engine-0-0"]["spec"].items()


def test_other_number_of_nodes_is_another_pod_group() -> None:
    bench = settled(is_served=True)
    bench.change(engine=OVER_THREE)
    assert pod_groups(bench) == {f"demo-engine-{n}-3-pods": {"gang": {"minCount": 3}} for n in range(2)}
    assert {group_of(bench, name) for name in bench.world.pods} == pod_groups(bench).keys()
    bench.change(engine={"nodes": 1, "parallelism": {"data": 1}})
    assert pod_groups(bench) == {}
    assert group_of(bench, "demo-engine-0") is None


@pytest.mark.parametrize("is_foreign", [True, False])
def test_pod_group_without_labels_is_found_by_its_name(is_foreign: bool) -> None:
    bench = settled(is_served=True)
    ref = Ref("PodGroup", "demo-engine-1-2-pods")
    bench.world.edit(ref, "metadata", "labels", value={})
    if is_foreign:
        bench.world.objects[ref]["metadata"]["ownerReferences"] = []
    assert writes(bench) == ([] if is_foreign else [f"apply {ref}"])
    assert (f"{ref} exists and does not belong" in bench.degraded()[1]) == is_foreign


@pytest.mark.parametrize("waiting", range(2))
def test_message_quotes_the_pod_that_fits_no_node(waiting: int) -> None:
    """The scheduler refuses the other pods only because they are in the same PodGroup."""
    bench = settled(is_served=True)
    for rank in range(2):
        refusal = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
        if rank == waiting:
            refusal = "pod group is unschedulable, waiting for minCount pods from a gang to be scheduled"
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": refusal}
        bench.world.pods[f"demo-engine-1-{rank}"]["status"] = {"phase": "Pending", "conditions": [condition]}
    bench.run()
    assert "3 Insufficient nvidia.com/gpu" in bench.degraded()[1]
