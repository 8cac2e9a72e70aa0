"""Peers on a real API server: the list follows the number of replicas, and pods are not replaced for it."""

import base64
from typing import Any

import pytest
import yaml

from testing.kube.api import Object
from testing.kube.cluster import Cluster
from tests.harness.clusters import ENGINE, pods, wait_quiet, wait_ready
from tests.harness.kube import CLUSTERS, NAME, example

pytestmark = pytest.mark.kube

PEERS = f"{NAME}-peers"


def with_peers(replicas: int, **limits: Any) -> Object:
    resource = example()
    resource["spec"]["engine"]["replicas"] = replicas
    resource["spec"]["tiers"]["peers"] = limits
    return resource


def listed(plane: Cluster, namespace: str) -> list[str]:
    live = plane.api.find("v1/configmaps", PEERS, namespace) or {"data": {"peers.yaml": "peers: []"}}
    peers: list[str] = yaml.safe_load(live["data"]["peers.yaml"])["peers"]
    return peers


def test_list_follows_the_scale_without_restarts_until_peers_are_removed(plane, operator, namespace):
    plane.api.create(CLUSTERS, with_peers(2), namespace)
    wait_ready(plane, namespace)
    wait_quiet(plane, operator, namespace)
    before = pods(plane, namespace)
    names = [f"{ENGINE}-{n}.{ENGINE}.{namespace}.svc:9465" for n in range(3)]
    assert listed(plane, namespace) == names[:2]
    secret = plane.api.get("v1/secrets", PEERS, namespace)
    assert len(base64.b64decode(secret["data"]["password"])) >= 43

    for replicas in (3, 1):
        plane.kubectl("scale", f"lmcluster/{NAME}", f"--replicas={replicas}", "--namespace", namespace)
        plane.wait(lambda number=replicas: listed(plane, namespace) == names[:number])
        plane.wait(lambda number=replicas: len(pods(plane, namespace)) == number)
    wait_quiet(plane, operator, namespace)
    assert pods(plane, namespace).keys() < before.keys()
    assert plane.api.get("v1/secrets", PEERS, namespace)["data"] == secret["data"]

    # An apply patch is YAML. YAML has no surrogate pairs and breaks lines where JSON does not.
    text = "--chat-template=a\U0001f999b\u2028c\x85d\x7f\ufeffe"
    plane.api.patch(
        CLUSTERS, NAME, {"spec": {"tiers": {"peers": None}, "engine": {"args": [text]}}}, namespace
    )
    plane.wait(lambda: not plane.api.find("v1/configmaps", PEERS, namespace))
    plane.wait(lambda: not before.keys() & pods(plane, namespace).keys())
    (pod,) = plane.wait(lambda: pods(plane, namespace).values())
    assert "PEER" not in str(pod["spec"])
    assert pod["spec"]["containers"][0]["args"][-1] == text


def engine_names(plane: Cluster, namespace: str) -> dict[str, int]:
    """Number of listed pods, by the name of their StatefulSet."""
    names = [peer.partition(".")[0].rpartition("-")[0] for peer in listed(plane, namespace)]
    return {name: names.count(name) for name in names}


def test_clusters_that_refer_to_a_list_are_in_it(plane, operator, namespace):
    """The referring cluster comes first, so the operator has to notice the other one."""
    referring = with_peers(2, clusterRef={"name": NAME})
    referring["metadata"]["name"] = "other"
    plane.api.create(CLUSTERS, referring, namespace)
    why = f"there is no LMCacheCluster {NAME}"
    plane.wait(lambda: why in reason(plane, namespace, "other"))
    plane.api.create(CLUSTERS, with_peers(1), namespace)
    plane.wait(lambda: engine_names(plane, namespace) == {ENGINE: 1, "other-engine": 2})
    plane.wait(lambda: not reason(plane, namespace, "other"))
    wait_ready(plane, namespace)
    assert not plane.api.find("v1/configmaps", "other-peers", namespace)
    assert not plane.api.find("v1/secrets", "other-peers", namespace)

    policies = [
        plane.api.get("networking.k8s.io/v1/networkpolicies", name, namespace)["spec"]["ingress"]
        for name in (ENGINE, "other-engine")
    ]
    (allowed, same) = (
        [rule["from"] for rule in rules if rule["ports"][0]["port"] == 9465] for rules in policies
    )
    assert allowed == same
    labels = allowed[0][0]["podSelector"]["matchLabels"]
    selector = ",".join(f"{key}={value}" for key, value in labels.items())
    plane.wait(lambda: len(plane.api.objects("v1/pods", namespace, selector)) == 3)

    plane.kubectl("scale", "lmcluster/other", "--replicas=3", "--namespace", namespace)
    plane.wait(lambda: engine_names(plane, namespace) == {ENGINE: 1, "other-engine": 3})
    wait_ready(plane, namespace)
    wait_quiet(plane, operator, namespace)
    plane.api.delete(CLUSTERS, "other", namespace)
    plane.wait(lambda: engine_names(plane, namespace) == {ENGINE: 1})


def reason(plane: Cluster, namespace: str, name: str) -> str:
    """Message of the condition Degraded; empty: the cluster is not degraded."""
    status = plane.api.get(CLUSTERS, name, namespace).get("status", {})
    conditions = {c["type"]: c for c in status.get("conditions", [])}
    degraded = conditions.get("Degraded", {"status": "False"})
    return str(degraded["message"]) if degraded["status"] == "True" else ""
