"""Pods on lost nodes: when the operator force-deletes them, and what it reports until then."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_operator.contract.base import Observed
from lmcache_operator.errors import RefusedError
from lmcache_operator.pods.nodes import abandoned, doubtful_nodes, node_problems
from tests.harness.operator.components import ReconciledCluster

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def before_now(minutes: float) -> str:
    return (NOW - timedelta(minutes=minutes)).strftime("%Y-%m-%dT%H:%M:%SZ")


def ready(status: str, minutes: float = 0) -> dict[str, Any]:
    return {"type": "Ready", "status": status, "lastTransitionTime": before_now(minutes)}


def pod(status: str = "False", minutes: float = 60, *, ends: float | None = None) -> dict[str, Any]:
    """A pod on node ``a`` whose readiness is this old. ``ends``: minutes since its grace period ended."""
    metadata = {"name": "p", "uid": "u"} | ({} if ends is None else {"deletionTimestamp": before_now(ends)})
    conditions = [{"type": "Initialized", "status": "True"}, ready(status, minutes)]
    return {"metadata": metadata, "spec": {"nodeName": "a"}, "status": {"conditions": conditions}}


def node(status: str, minutes: float) -> dict[str, Any]:
    pressure = {"type": "MemoryPressure", "status": "Unknown"}
    return {"status": {"conditions": [pressure, ready(status, minutes)]}}


def observation(pods: list[dict[str, Any]], nodes: dict[str, Any], refusal: str = "") -> Observed:
    return Observed(resource={}, pods=tuple(pods), nodes=nodes, node_refusal=refusal, now=NOW)


CASES = [
    # pod, its node, whether the pod is abandoned, whether the node is reported as lost
    (pod(ends=1), node("Unknown", 6), True, True),
    (pod(ends=-1), node("Unknown", 6), True, True),
    (pod(ends=1), node("Unknown", 4), False, True),
    (pod(), node("Unknown", 60), False, True),
    (pod(ends=1), node("False", 6), True, True),
    (pod(ends=-1), node("False", 6), False, True),
    (pod(ends=60), node("True", 60), False, False),
    (pod(), node("True", 60), False, False),
    (pod(minutes=60), None, False, True),
    (pod(minutes=4, ends=1), None, False, True),
    (pod(minutes=6, ends=1), None, True, True),
    (pod("True", 6), None, False, False),
    (pod("True", 6, ends=1), node("Unknown", 6), True, True),
]


@pytest.mark.parametrize(("candidate", "its_node", "is_abandoned", "is_reported"), CASES)
def test_pod_is_abandoned_five_minutes_after_its_node(candidate, its_node, is_abandoned, is_reported):
    observed = observation([candidate], {"a": its_node})
    assert list(abandoned(observed)) == ([candidate] if is_abandoned else [])
    problems = [(problem.reason, "node a" in problem.message) for problem in node_problems(observed)]
    assert problems == ([("NodeLost", True)] if is_reported else [])


def test_only_nodes_of_unready_or_terminating_pods_are_read() -> None:
    waiting = pod()
    del waiting["spec"]["nodeName"]
    assert doubtful_nodes((pod("True"), waiting)) == set()
    assert doubtful_nodes((pod("False"), pod("True", ends=1))) == {"a"}
    assert list(abandoned(observation([waiting], {}))) == []


def test_lost_node_is_reported_once_with_a_stable_message() -> None:
    first, second = pod(), pod(ends=1)
    (problem,) = node_problems(observation([first, second], {"a": node("Unknown", 6)}))
    assert "has not been ready since 11:54:00 UTC" in problem.message
    (problem,) = node_problems(observation([first], {"a": None}))
    assert "no longer exists" in problem.message


def test_overdue_pods_are_reported_without_the_right_to_read_nodes() -> None:
    assert list(node_problems(observation([pod(), pod(ends=4)], {}, "nodes is forbidden"))) == []
    overdue = observation([pod(ends=6)], {}, "nodes is forbidden")
    assert list(abandoned(overdue)) == []
    (problem,) = node_problems(overdue)
    assert problem.reason == "Refused"
    assert problem.message.endswith("not allowed to check whether its node is lost: nodes is forbidden")


@given(
    st.sampled_from(["True", "False"]),
    st.one_of(st.none(), st.floats(-10, 100)),
    st.one_of(st.none(), st.tuples(st.sampled_from(["True", "False", "Unknown"]), st.floats(0, 100))),
    st.floats(0, 100),
)
def test_ready_pods_and_pods_on_healthy_nodes_are_never_abandoned(status, ends, its_node, minutes):
    candidate = pod(status, minutes, ends=ends)
    abandoned_pods = list(abandoned(observation([candidate], {"a": its_node and node(*its_node)})))
    if abandoned_pods:
        assert ends is not None
        assert its_node is None or (its_node[0] != "True" and its_node[1] >= 4.9)
        assert status != "True" or ends is not None


def test_largest_node_is_compared_with_a_size_that_needs_new_pods() -> None:
    bench = ReconciledCluster.settled()
    bench.world.nodes["a"] = {"status": {"allocatable": {"memory": "23Gi"}}}
    bench.world.change(tiers={"memory": {"size": "900Gi"}})
    bench.reconcile()
    while bench.condition("Progressing") != ("False", "ResizePending"):
        assert (bench.reconcile() or 0) < 500, "the first message that stays compares the size with the nodes"
    assert "The largest node has 23Gi, so a new pod would not start" in bench.message("Progressing")


@pytest.mark.parametrize("is_allowed", [True, False])
def test_largest_node_is_read_once_while_a_pod_lacks_memory(is_allowed: bool) -> None:
    bench = ReconciledCluster()
    bench.settle()
    world = bench.world
    for name, memory in (("a", "32Gi"), ("b", "31Gi")):
        world.nodes[name] = {"status": {"allocatable": {"memory": memory}}}
    if not is_allowed:
        world.failures["find Node"] = RefusedError("list nodes", "forbidden")
    placed = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    (pod,) = world.pods.values()
    pod["status"] = {"conditions": [placed | {"message": "0/2 nodes are available: 2 Insufficient memory."}]}
    for _ in range(2):
        bench.reconcile()
        message = bench.message("Degraded")
        assert "requests " in message
        assert ("The largest node has 32Gi" in message) is is_allowed
        world.nodes["a"]["status"]["allocatable"]["memory"] = "64Gi"
