"""Failures and foreign changes on a real API server: the operator reports them and recovers."""

import pytest

from lmcache_store.common.units import format_size, parse_quantity
from testing.kube.cluster import Cluster
from tests.harness.kube import CLUSTERS, NAME, example
from tests.harness.operator.clusters import ENGINE, condition, wait_ready

pytestmark = pytest.mark.kube


def test_change_of_a_zero_value_is_reverted(plane, operator, namespace):
    """The API server stores no such value of the spec."""
    resource = example()
    resource["spec"]["engine"]["podTemplate"] = {"spec": {"hostNetwork": False}}
    plane.api.create(CLUSTERS, resource, namespace)
    wait_ready(plane, namespace)
    edit = {"spec": {"template": {"spec": {"hostNetwork": True, "automountServiceAccountToken": None}}}}
    plane.api.patch("apps/v1/statefulsets", ENGINE, edit, namespace)

    def is_restored() -> bool:
        pod = plane.api.get("apps/v1/statefulsets", ENGINE, namespace)["spec"]["template"]["spec"]
        return not pod.get("hostNetwork") and pod.get("automountServiceAccountToken") is False

    plane.wait(is_restored)


def cluster_events(plane: Cluster, namespace: str) -> set[tuple[str, str]]:
    events = plane.api.objects("v1/events", namespace)
    return {(e["type"], e["reason"]) for e in events if e["involvedObject"]["kind"] == "LMCacheCluster"}


def test_status_quotes_the_refusal_of_the_api_server(plane, operator, namespace):
    resource = example()
    resource["spec"]["engine"]["podTemplate"] = {"metadata": {"labels": {"a": "not a label"}}}
    plane.api.create(CLUSTERS, resource, namespace)
    plane.wait(lambda: condition(plane, namespace, "Degraded").get("reason") == "Refused")
    assert "spec.template.labels" in condition(plane, namespace, "Degraded")["message"]
    plane.wait(lambda: ("Warning", "Refused") in cluster_events(plane, namespace))


def test_second_disruption_budget_is_reported(plane, operator, namespace):
    plane.api.create(CLUSTERS, example(), namespace)
    wait_ready(plane, namespace)
    selector = plane.api.get("policy/v1/poddisruptionbudgets", ENGINE, namespace)["spec"]["selector"]
    budget = {"metadata": {"name": "second"}, "spec": {"maxUnavailable": 1, "selector": selector}}
    plane.api.create("policy/v1/poddisruptionbudgets", budget, namespace)
    plane.api.patch(CLUSTERS, NAME, {"spec": {"engine": {"image": "e:2"}}}, namespace)
    plane.wait(
        lambda: "more than one PodDisruptionBudget" in condition(plane, namespace, "Degraded")["message"]
    )


def test_exceeded_quota_is_reported(plane, operator, namespace):
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    plane.api.create("v1/resourcequotas", quota, namespace)
    plane.wait(lambda: "hard" in plane.api.get("v1/resourcequotas", "none", namespace).get("status", {}))
    plane.api.create(CLUSTERS, example(), namespace)
    plane.wait(lambda: condition(plane, namespace, "Degraded").get("reason") == "FailedCreate")
    assert "exceeded quota: none" in condition(plane, namespace, "Degraded")["message"]


def test_pod_without_a_node_is_reported_with_its_amounts_and_the_largest_node(plane, operator, namespace):
    resource = example()
    resource["spec"]["engine"] |= {"gpu": {"resourceName": "example.com/gpu"}, "replicas": 1}
    resource["spec"]["tiers"]["memory"] = {"size": "16Ti"}
    plane.api.create(CLUSTERS, resource, namespace)
    plane.wait(lambda: condition(plane, namespace, "Degraded").get("reason") == "Unschedulable")
    allocatable = [node["status"]["allocatable"]["memory"] for node in plane.api.objects("v1/nodes")]
    largest = format_size(max(int(parse_quantity(amount)) for amount in allocatable))
    message = condition(plane, namespace, "Degraded")["message"]
    assert (
        "requests 1 of example.com/gpu for spec.engine.gpu.count. No node has any. Without GPUs, set"
        in message
    )
    assert "a memory tier of 16Ti (spec.tiers.memory.size), 4Gi for spec.engine.resources" in message
    assert f"The largest node has {largest}. Scheduler: 0/{len(allocatable)} nodes are available: " in message
    assert "preemption" not in message
