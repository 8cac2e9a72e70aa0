"""A node that stops responding under an engine's pod."""

import pytest

from tests.harness.kube import CLUSTERS, NAME, example
from tests.harness.operator.clusters import condition, lose, pods, wait_ready, written

pytestmark = pytest.mark.kube


def has_event(plane, namespace: str, reason: str, words: str) -> bool:
    """Whether an Event about the cluster has this reason and these words."""
    events = plane.api.objects("v1/events", namespace)
    about = [event for event in events if event["involvedObject"]["name"] == NAME]
    return any(event["reason"] == reason and words in event["message"] for event in about)


def test_terminating_pod_on_a_lost_node_is_reported_and_deleted(plane, operator, namespace):
    node = f"doomed-{namespace}"
    plane.add_node(node)
    try:
        # The fake kubelet takes ten minutes to end a pod.
        slow = {"annotations": {"test/stop-after": "600s"}}
        on_node = {"metadata": slow, "spec": {"nodeSelector": {"kubernetes.io/hostname": node}}}
        resource = example()
        resource["spec"]["engine"] |= {"replicas": 1, "podTemplate": on_node}
        plane.api.create(CLUSTERS, resource, namespace)
        wait_ready(plane, namespace)
        ((uid, pod),) = pods(plane, namespace).items()
        name, mark = pod["metadata"]["name"], plane.mark()

        def node_lost_message() -> str:
            lose(plane, node, namespace, name, minutes=10)
            degraded = condition(plane, namespace, "Degraded")
            return str(degraded["message"]) if degraded["reason"] == "NodeLost" else ""

        assert f"its node {node} has not been ready" in plane.wait(node_lost_message)
        # The pod is not terminating: its kubelet may return, with the pod still running.
        assert uid in pods(plane, namespace)
        plane.api.delete("v1/pods", name, namespace)

        def is_deleted() -> bool:
            if uid not in pods(plane, namespace):
                return True
            lose(plane, node, namespace, name, minutes=10)  # the fake kubelet may have restored the node
            return False

        plane.wait(is_deleted)
        # The operator reports the deletion afterwards.
        plane.wait(lambda: has_event(plane, namespace, "NodeLost", f"deleted pod {name} by force"))
        writes = written(plane, operator, mark, namespace)
        assert [w.code for w in writes if (w.verb, w.name) == ("delete", name)] == [200]
    finally:
        plane.api.delete("v1/nodes", node)
