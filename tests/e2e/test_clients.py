"""NetworkPolicies that hold, on a real kubelet: who reaches sidecar and engine, and that probes work."""

from testing.node.app import NAMESPACE, REDIS_NAMESPACE
from testing.node.pods import ENGINE_PORT, SIDECAR_PORT
from tests.harness.operator.client_pods import client_pod
from tests.harness.operator.pods import is_in_service, no_restart_between, prompt

CLIENT = {"podSelector": {"matchLabels": {"access": "api"}}}


def test_only_listed_pods_reach_the_engine(tiny, references):
    before, node = tiny.ready_pod(), tiny.node
    with client_pod(node, NAMESPACE, references["sidecar"]) as client:
        node.wait(lambda: client.reaches(before, ENGINE_PORT), 60)
        tiny.spec["spec"]["clients"] = [CLIENT]
        try:
            tiny.apply()
            node.wait(lambda: not client.reaches(before, ENGINE_PORT), 60)
            assert client.reaches(before, SIDECAR_PORT), "pods of the namespace read metrics"
            label = {"metadata": {"labels": CLIENT["podSelector"]["matchLabels"]}}
            node.api.patch("v1/pods", "client", label, NAMESPACE)
            node.wait(lambda: client.reaches(before, ENGINE_PORT), 60)
            tiny.spec["spec"]["clients"] = []
            tiny.apply()
            node.wait(lambda: not client.reaches(before, ENGINE_PORT), 60)
            # The kubelet and the operator are no clients.
            tiny.wait_condition("SidecarAttached")
            assert len(before.complete(prompt(61, 512)).tokens) == 8
            assert is_in_service(tiny)
        finally:
            del tiny.spec["spec"]["clients"]
            tiny.apply()
        node.wait(lambda: client.reaches(before, ENGINE_PORT), 60)
    assert no_restart_between(before, tiny.ready_pod())


def test_only_pods_of_the_namespace_reach_the_sidecar(tiny, references):
    pod, node, image = tiny.ready_pod(), tiny.node, references["sidecar"]
    with client_pod(node, NAMESPACE, image) as near, client_pod(node, REDIS_NAMESPACE, image) as far:
        node.wait(lambda: near.reaches(pod, SIDECAR_PORT), 60)
        node.wait(lambda: not far.reaches(pod, SIDECAR_PORT), 60)
        assert far.reaches(pod, ENGINE_PORT)
        assert near.reaches(pod, SIDECAR_PORT)
