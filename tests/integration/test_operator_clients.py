"""`spec.clients` on a real API server: NetworkPolicies follow the list."""

from typing import Any

import pytest

from testing.kube.cluster import Cluster
from tests.harness.clusters import ENGINE, condition, pods, wait_quiet
from tests.harness.kube import CLUSTERS, NAME, example

pytestmark = pytest.mark.kube

POLICIES = "networking.k8s.io/v1/networkpolicies"
GATEWAY = {"podSelector": {"matchLabels": {"app": "gateway"}}}
BLOCK = {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}


def sources(plane: Cluster, namespace: str, name: str, port: int) -> list[Any]:
    """The sources of each rule of a live NetworkPolicy that opens a port."""
    return [
        rule.get("from")
        for rule in plane.api.get(POLICIES, name, namespace)["spec"].get("ingress", [])
        for each in rule["ports"]
        if each["protocol"] == "TCP" and each["port"] <= port <= each.get("endPort", each["port"])
    ]


def test_policies_follow_the_list_and_replace_no_pod(plane, operator, namespace):
    resource = example(clients=[GATEWAY, BLOCK], router={"policy": "RoundRobin"})
    plane.api.create(CLUSTERS, resource, namespace)
    plane.wait(lambda: plane.api.find(POLICIES, f"{NAME}-router", namespace))
    before = plane.wait(lambda: pods(plane, namespace)).keys()
    router = {"lmcache.io/cluster": NAME, "lmcache.io/component": "router"}
    routers = [{"podSelector": {"matchLabels": router}}]

    def open_to(engine: list[Any], of_router: list[Any]) -> bool:
        wanted = {ENGINE: engine, f"{NAME}-router": of_router}
        return all(sources(plane, namespace, name, 8000) == wanted[name] for name in wanted)

    assert open_to([[GATEWAY, BLOCK], routers], [[GATEWAY, BLOCK]])
    for clients, engine, of_router in (
        ([], [routers], []),
        (None, [None], [None]),
        ([{"podSelector": {}}], [[{"podSelector": {}}], routers], [[{"podSelector": {}}]]),
    ):
        plane.api.patch(CLUSTERS, NAME, {"spec": {"clients": clients}}, namespace)
        plane.wait(lambda e=engine, r=of_router: open_to(e, r))
    # The operator refuses values that the API server accepts here, and not in a NetworkPolicy.
    bad = {"clients": [{"ipBlock": {"cidr": "10.0.0.1/8"}}]}
    plane.api.patch(CLUSTERS, NAME, {"spec": bad}, namespace)
    plane.wait(lambda: condition(plane, namespace, "Ready").get("reason") == "InvalidSpec")
    assert "spec.clients: selectors need" in condition(plane, namespace, "Ready")["message"]
    wait_quiet(plane, operator, namespace)
    assert open_to(engine, of_router), "the former policies"
    assert before <= pods(plane, namespace).keys()
