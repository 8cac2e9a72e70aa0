"""Prefill pods on a real API server: the operator runs them as an LMCacheCluster of their own."""

import pytest
import yaml

from testing.kube.cluster import Cluster
from tests.harness.kube import CLUSTERS, NAME, example
from tests.harness.operator.clusters import ENGINE, condition, wait_quiet, written

pytestmark = pytest.mark.kube

CHILD = f"{NAME}-prefill"
CHILD_ENGINE = f"{CHILD}-engine"
STATEFUL_SETS = "apps/v1/statefulsets"


def num_listed(plane: Cluster, namespace: str) -> dict[str, int]:
    """Number of listed peers, by the name of their StatefulSet."""
    data = plane.api.get("v1/configmaps", f"{NAME}-peers", namespace)["data"]["peers.yaml"]
    names = [peer.partition(".")[0].rpartition("-")[0] for peer in yaml.safe_load(data)["peers"]]
    return {name: names.count(name) for name in names}


def wait_available(plane: Cluster, namespace: str, num_pods: int) -> None:
    def is_reported() -> bool:
        status = plane.api.get(CLUSTERS, NAME, namespace).get("status", {})
        return bool(status.get("prefill") == {"replicas": num_pods, "readyReplicas": num_pods})

    plane.wait(is_reported)


def uses_prefill_pods(plane: Cluster, namespace: str) -> bool:
    """Whether the Deployment of the router has two pools."""
    router = plane.api.get("apps/v1/deployments", f"{NAME}-router", namespace)
    (container,) = router["spec"]["template"]["spec"]["containers"]
    return "--prefill-selector" in container["args"]


def engine_pods(plane: Cluster, namespace: str, cluster_name: str) -> set[str]:
    """Uids of the engine pods of a cluster."""
    labels = f"lmcache.io/cluster={cluster_name},lmcache.io/component=engine"
    return {pod["metadata"]["uid"] for pod in plane.api.objects("v1/pods", namespace, labels)}


def test_prefill_pods_are_created_scaled_replaced_reported_and_removed(plane, operator, namespace):
    resource = example(router={"policy": "RoundRobin"}, engine={"replicas": 2, "prefill": {}})
    resource["spec"]["tiers"]["peers"] = {}
    plane.api.create(CLUSTERS, resource, namespace)
    wait_available(plane, namespace, 1)
    assert condition(plane, namespace, "PrefillAvailable")["status"] == "True"
    plane.wait(lambda: num_listed(plane, namespace) == {ENGINE: 2, CHILD_ENGINE: 1})
    plane.wait(lambda: uses_prefill_pods(plane, namespace))
    wait_quiet(plane, operator, namespace)

    # The replicas are not declared, so an autoscaler may change them through the subresource.
    before = engine_pods(plane, namespace, NAME)
    plane.kubectl("scale", f"lmcluster/{CHILD}", "--replicas=3", "--namespace", namespace)
    wait_available(plane, namespace, 3)
    plane.wait(lambda: num_listed(plane, namespace) == {ENGINE: 2, CHILD_ENGINE: 3})
    mark = plane.mark()
    wait_quiet(plane, operator, namespace)
    assert plane.api.get(CLUSTERS, CHILD, namespace)["spec"]["engine"]["replicas"] == 3
    changed = {write.resource for write in written(plane, operator, mark, namespace)}
    assert "lmcacheclusters" not in {each for each in changed if "/" not in each}

    # Other arguments replace the prefill pods alone.
    former = engine_pods(plane, namespace, CHILD)
    args = {"spec": {"engine": {"prefill": {"args": ["--max-num-batched-tokens=4096"]}}}}
    plane.api.patch(CLUSTERS, NAME, args, namespace)
    plane.wait(lambda: len(now := engine_pods(plane, namespace, CHILD)) == 3 and not former & now)
    assert engine_pods(plane, namespace, NAME) == before

    # Wrong arguments are reported, and all pods keep their configuration.
    kinds = ("EngineAvailable", "PrefillAvailable", "RouterAvailable")
    plane.wait(lambda: all(condition(plane, namespace, kind).get("status") == "True" for kind in kinds))
    args = {"spec": {"engine": {"prefill": {"args": ["--port=1"]}}}}
    plane.api.patch(CLUSTERS, NAME, args, namespace)
    plane.wait(lambda: condition(plane, namespace, "Degraded").get("reason") == "InvalidSpec")
    message = condition(plane, namespace, "Degraded")["message"]
    assert "spec.engine.prefill.args[0]: --port can't be set" in message
    assert [condition(plane, namespace, kind)["status"] for kind in kinds] == ["True"] * 3

    plane.api.patch(CLUSTERS, NAME, {"spec": {"engine": {"prefill": None}}}, namespace)
    plane.wait(lambda: plane.api.find(CLUSTERS, CHILD, namespace) is None)
    assert not uses_prefill_pods(plane, namespace)
    plane.wait(lambda: plane.api.find(STATEFUL_SETS, CHILD_ENGINE, namespace) is None)
    plane.wait(lambda: num_listed(plane, namespace) == {ENGINE: 2})
    plane.wait(lambda: not condition(plane, namespace, "PrefillAvailable"))
    assert engine_pods(plane, namespace, NAME) == before
