"""`spec.clients` and `spec.images.pullSecrets` on a real API server."""

from __future__ import annotations

from typing import Any

import pytest

from testing.kube.cluster import Cluster
from tests.harness.clusters import ENGINE, condition, pods, wait_quiet, wait_ready
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
        ([{"podSelector": {}}], [[{"podSelector": {}}], routers], [[{"podSelector": {}}]]),
        (None, [None], [None]),
    ):
        plane.api.patch(CLUSTERS, NAME, {"spec": {"clients": clients}}, namespace)
        plane.wait(lambda e=engine, r=of_router: open_to(e, r))
    wait_quiet(plane, operator, namespace)
    assert before <= pods(plane, namespace).keys()


@pytest.mark.parametrize(
    "bad",
    [
        {"podSelector": {"matchLabels": {"app": "no blanks"}}},
        {"podSelector": {"matchExpressions": [{"key": "a", "operator": "Like", "values": ["b"]}]}},
        {"ipBlock": {"cidr": "10.0.0.1/8"}},
        {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["11.0.0.0/8"]}},
    ],
)
def test_value_that_only_the_operator_checks_keeps_the_former_policy(plane, operator, namespace, bad):
    plane.api.create(CLUSTERS, example(clients=[GATEWAY]), namespace)
    plane.wait(lambda: plane.api.find(POLICIES, ENGINE, namespace))
    plane.api.patch(CLUSTERS, NAME, {"spec": {"clients": [bad]}}, namespace)
    plane.wait(lambda: condition(plane, namespace, "Ready").get("reason") == "InvalidSpec")
    assert "spec.clients: selectors need" in condition(plane, namespace, "Ready")["message"]
    assert sources(plane, namespace, ENGINE, 8000) == [[GATEWAY]]


def test_pods_carry_the_secrets_that_pull_their_images(plane, operator, namespace):
    resource = example(images={"pullSecrets": ["registry"]}, router={"policy": "RoundRobin"})
    resource["spec"]["tiers"]["remote"] = {"managed": {"memoryPerShard": "1Gi"}}
    template = {"spec": {"imagePullSecrets": [{"name": "mine"}, {"name": "registry"}]}}
    resource["spec"].setdefault("engine", {})["podTemplate"] = template
    plane.api.create(CLUSTERS, resource, namespace)
    deployment = plane.wait(lambda: plane.api.find("apps/v1/deployments", f"{NAME}-router", namespace))
    assert deployment["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    wait_ready(plane, namespace)
    secrets = {
        (
            pod["metadata"]["labels"]["lmcache.io/component"],
            *sorted(s["name"] for s in pod["spec"]["imagePullSecrets"]),
        )
        for pod in plane.api.objects("v1/pods", namespace, f"lmcache.io/cluster={NAME}")
    }
    assert {("engine", "mine", "registry"), ("remote", "registry")} <= secrets
    assert {each[-1] for each in secrets} == {"registry"}
    before = pods(plane, namespace)
    plane.api.patch(CLUSTERS, NAME, {"spec": {"images": {"pullSecrets": ["other"]}}}, namespace)
    engines = {
        uid for uid, pod in before.items() if pod["metadata"]["labels"]["lmcache.io/component"] == "engine"
    }
    plane.wait(lambda: not engines & pods(plane, namespace).keys())
