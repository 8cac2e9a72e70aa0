"""Engines over several nodes on a real API server, with its controllers, scheduler and disruption budgets."""

from typing import Any

import pytest

from testing.kube.api import ApiError, Object
from testing.kube.cluster import Cluster
from tests.harness.kube import CLUSTERS, NAME, example, is_since, since
from tests.harness.operator.clusters import (
    ENGINE,
    HELD,
    condition,
    lose,
    pods,
    set_running,
    wait_quiet,
    wait_ready,
    written,
)

pytestmark = pytest.mark.kube

SETS, POLICIES = "apps/v1/statefulsets", "networking.k8s.io/v1/networkpolicies"
POD_GROUPS = "scheduling.k8s.io/v1alpha2/podgroups"
FIRST, SECOND = ([f"{ENGINE}-{number}-{rank}" for rank in range(2)] for number in range(2))


def over_two_nodes(**engine: Any) -> Object:
    """The example with two engines of two pods each."""
    resource = example()
    resource["spec"]["engine"] |= {"nodes": 2, "parallelism": {"data": 2}, **engine}
    return resource


def change(plane: Cluster, namespace: str, **engine: Any) -> None:
    plane.api.patch(CLUSTERS, NAME, {"spec": {"engine": engine}}, namespace)
    wait_ready(plane, namespace)


def sizes(plane: Cluster, namespace: str) -> dict[str, int]:
    return {each["metadata"]["name"]: each["spec"]["replicas"] for each in plane.api.objects(SETS, namespace)}


def named(plane: Cluster, namespace: str) -> dict[str, Object]:
    """Pods by name."""
    return {pod["metadata"]["name"]: pod for pod in pods(plane, namespace).values()}


def is_there(pod: Object | None) -> bool:
    return pod is not None and "deletionTimestamp" not in pod["metadata"]


def evict(plane: Cluster, namespace: str, pod: str) -> int:
    """Evict a pod, as a drain of its node does. Returns the status of the answer."""
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": namespace},
    }
    try:
        plane.api.request("POST", f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction", eviction)
    except ApiError as error:
        return error.code
    return 201


def test_engines_are_scaled_replaced_and_deleted_as_groups(plane, operator, namespace):
    plane.api.create(CLUSTERS, over_two_nodes(topologyKey="kubernetes.io/hostname"), namespace)
    wait_ready(plane, namespace)
    assert sizes(plane, namespace) == {f"{ENGINE}-0": 2, f"{ENGINE}-1": 2}
    nodes = {name: pod["spec"]["nodeName"] for name, pod in named(plane, namespace).items()}
    assert sorted(nodes) == [*FIRST, *SECOND]
    assert [nodes[FIRST[0]], nodes[SECOND[0]]] == [nodes[FIRST[1]], nodes[SECOND[1]]]
    assert condition(plane, namespace, "Ready")["message"] == "2 of 2 engines (of 2 pods each) are ready"
    wait_quiet(plane, operator, namespace)
    plane.kubectl("scale", "--namespace", namespace, f"lmcluster/{NAME}", "--replicas=3")
    wait_ready(plane, namespace)
    scale = plane.api.request("GET", plane.api.path(CLUSTERS, namespace, f"{NAME}/scale"))
    assert scale["spec"]["replicas"] == scale["status"]["replicas"] == 3
    counted = plane.api.objects("v1/pods", namespace, scale["status"]["selector"])
    assert sorted(pod["metadata"]["name"] for pod in counted) == [
        f"{ENGINE}-{number}-0" for number in range(3)
    ]
    change(plane, namespace, replicas=2)
    plane.wait(lambda: not any(plane.api.find(kind, f"{ENGINE}-2", namespace) for kind in (SETS, POLICIES)))

    mark = plane.mark()
    change(plane, namespace, args=["--max-model-len=16384"])
    writes = written(plane, operator, mark, namespace)
    ended = [
        (each.resource, each.name)
        for each in writes
        if each.resource == "pods/eviction" or (each.resource, each.verb) == ("pods", "delete")
        if each.code < 300
    ]
    assert [name for _, name in ended] == [*FIRST, *SECOND]
    assert [resource for resource, _ in ended] == ["pods/eviction", "pods"] * 2
    plane.kubectl("delete", "--namespace", namespace, f"lmcluster/{NAME}", "--timeout=300s")
    plane.wait(lambda: not any(plane.api.objects(kind, namespace) for kind in (SETS, POLICIES, "v1/pods")))


def test_number_of_nodes_changes_and_leaves_no_former_object(plane, operator, namespace):
    plane.api.create(CLUSTERS, over_two_nodes(replicas=1), namespace)
    wait_ready(plane, namespace)
    for nodes in (3, 1, 2):
        change(plane, namespace, nodes=nodes, parallelism={"data": nodes})
        wait_quiet(plane, operator, namespace)
        expected = {ENGINE: 1} if nodes == 1 else {f"{ENGINE}-0": nodes}
        assert sizes(plane, namespace) == expected
        assert len(named(plane, namespace)) == nodes
        policies = {each["metadata"]["name"] for each in plane.api.objects(POLICIES, namespace)}
        assert policies == {ENGINE, *(name for name in expected if name != ENGINE)}
        if is_since("1.36"):
            pod_groups = {f"{name}-{nodes}-pods" for name in expected if name != ENGINE}

            def is_left(pod_groups: set[str] = pod_groups) -> bool:
                """Kubernetes removes a PodGroup after its last pod."""
                live = plane.api.objects(POD_GROUPS, namespace)
                return {each["metadata"]["name"] for each in live} == pod_groups

            plane.wait(is_left)


def test_clients_reach_only_the_pod_with_a_server(plane, operator, namespace):
    """The ranks of the engine span both pods. A controller of Kubernetes labels the first one."""
    plane.api.create(CLUSTERS, over_two_nodes(replicas=1, parallelism={"tensor": 2}), namespace)
    wait_ready(plane, namespace)
    selector = plane.api.get("v1/services", NAME, namespace)["spec"]["selector"]
    selected = plane.api.objects("v1/pods", namespace, ",".join(map("=".join, selector.items())))
    assert [pod["metadata"]["name"] for pod in selected] == [f"{ENGINE}-0-0"]


def test_budget_lets_a_drain_end_one_engine_at_a_time(plane, operator, namespace):
    """The test plays the launcher: it makes all pods of an engine unready once one has ended."""
    plane.api.create(CLUSTERS, over_two_nodes(podTemplate=HELD), namespace)
    plane.wait(lambda: len(named(plane, namespace)) == 4)
    for number, name in enumerate([*FIRST, *SECOND]):
        set_running(plane, namespace, name, f"10.9.0.{number}")
    wait_ready(plane, namespace)
    plane.wait(lambda: evict(plane, namespace, FIRST[0]) == 201)  # once the controller has counted the pods
    assert evict(plane, namespace, SECOND[0]) == 429
    set_running(plane, namespace, FIRST[1], "10.9.0.1", is_ready=False)
    plane.wait(lambda: evict(plane, namespace, FIRST[1]) == 201)
    assert [evict(plane, namespace, name) for name in SECOND] == [429, 429]
    plane.wait(lambda: condition(plane, namespace, "Ready").get("message", "").startswith("1 of 2 engines"))

    # A crashing sidecar makes its pod unready, and the other pod of its engine stays ready.
    set_running(plane, namespace, SECOND[1], "10.9.0.3", is_ready=False)
    for number, name in enumerate(FIRST):
        plane.wait(lambda name=name: is_there(named(plane, namespace).get(name)))
        set_running(plane, namespace, name, f"10.9.0.{number}")
    before = named(plane, namespace)
    plane.api.patch(CLUSTERS, NAME, {"spec": {"engine": {"args": ["--max-model-len=16384"]}}}, namespace)

    def replaced() -> set[str]:
        present = named(plane, namespace)
        return {
            name for name in present if present[name]["metadata"]["uid"] != before[name]["metadata"]["uid"]
        }

    plane.wait(lambda: replaced() == {*SECOND})


@since("1.36")
def test_engine_that_does_not_fit_holds_no_gpu(plane, operator, namespace):
    """Three nodes have GPUs for one pod each, so one of the pods of a second engine would fit."""
    nodes = [f"{namespace}-{number}" for number in range(3)]
    for name in nodes:
        plane.add_node(name)
    try:
        of_test = {"key": "kubernetes.io/hostname", "operator": "In", "values": nodes}
        required = {"nodeSelectorTerms": [{"matchExpressions": [of_test]}]}
        affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
        engine = {"gpu": {"count": 8}, "parallelism": {"data": 16}}
        resource = over_two_nodes(**engine, podTemplate={"spec": {"affinity": affinity}})
        plane.api.create(CLUSTERS, resource, namespace)
        plane.wait(
            lambda: condition(plane, namespace, "Ready").get("message", "").startswith("1 of 2 engines")
        )

        def bound() -> set[str] | None:
            """Pods with a node, once the scheduler has refused the others."""
            placed, all_pods = set(), named(plane, namespace)
            for name, pod in all_pods.items():
                if pod["spec"].get("nodeName"):
                    placed.add(name)
                elif not any(
                    each["type"] == "PodScheduled" for each in pod["status"].get("conditions") or ()
                ):
                    return None
            return placed if len(all_pods) == 4 else None

        assert plane.wait(bound) in ({*FIRST}, {*SECOND})
    finally:
        for name in nodes:
            plane.api.delete("v1/nodes", name)


def test_lost_node_costs_an_engine_one_pod(plane, operator, namespace):
    node = f"doomed-{namespace}"
    plane.add_node(node)
    try:
        spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
        slow = {"metadata": {"annotations": {"test/stop-after": "600s"}}}
        engine = {"replicas": 1, "nodes": 3, "parallelism": {"data": 3}, "podTemplate": slow}
        resource = over_two_nodes(**engine, topologySpreadConstraints=[spread])
        plane.api.create(CLUSTERS, resource, namespace)
        wait_ready(plane, namespace)
        before = named(plane, namespace)
        (lost,) = (name for name, pod in before.items() if pod["spec"]["nodeName"] == node)

        def is_reported() -> bool:
            lose(plane, node, namespace, lost, minutes=10)  # the fake kubelet may have restored the node
            return bool(condition(plane, namespace, "Degraded")["reason"] == "NodeLost")

        plane.wait(is_reported)
        plane.api.delete("v1/pods", lost, namespace)  # as Kubernetes does after five minutes

        def is_replaced() -> bool:
            present = named(plane, namespace).get(lost)
            if present is None or present["metadata"]["uid"] != before[lost]["metadata"]["uid"]:
                return True
            lose(plane, node, namespace, lost, minutes=10)
            return False

        plane.wait(is_replaced)
        plane.wait(
            lambda: "0 of 1 engines (of 3 pods each)" in condition(plane, namespace, "Ready")["message"]
        )
        after = named(plane, namespace)
        unchanged = {
            name for name in after if after[name]["metadata"]["uid"] == before[name]["metadata"]["uid"]
        }
        assert unchanged == before.keys() - {lost}
    finally:
        plane.api.delete("v1/nodes", node)
