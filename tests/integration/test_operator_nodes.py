"""A node that stops to answer, under an engine's pod."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from testing.kube.cluster import FAKE_NODE
from tests.harness.clusters import condition, pods, wait_ready, written
from tests.harness.kube import CLUSTERS, NAME, example

pytestmark = pytest.mark.kube


def lose(plane, node: str, namespace: str, pod: str, minutes: float) -> None:
    """What controllers write of a node that was last heard of so long ago, and of a pod there."""
    plane.api.patch("v1/nodes", node, {"metadata": {"annotations": {FAKE_NODE: None}}})
    since = (datetime.now(UTC) - timedelta(minutes=minutes)).strftime("%Y-%m-%dT%H:%M:%SZ")
    times = {"lastTransitionTime": since, "lastHeartbeatTime": since}
    unknown = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}
    plane.api.patch("v1/nodes", f"{node}/status", {"status": {"conditions": [unknown | times]}})
    unready = {"type": "Ready", "status": "False", "reason": "NodeNotReady", "lastTransitionTime": since}
    plane.api.patch("v1/pods", f"{pod}/status", {"status": {"conditions": [unready]}}, namespace)


def is_said(plane, namespace: str, reason: str, words: str) -> bool:
    """Whether an Event about the cluster says it."""
    events = plane.api.objects("v1/events", namespace)
    about = [event for event in events if event["involvedObject"]["name"] == NAME]
    return any(event["reason"] == reason and words in event["message"] for event in about)


def test_a_pod_on_a_lost_node_is_told_and_replaced_once_it_is_to_go(plane, operator, namespace):
    node = f"doomed-{namespace}"
    plane.add_node(node)
    try:
        # Whoever plays the kubelet takes its time to end a pod.
        slow = {"annotations": {"test/stop-after": "600s"}}
        there = {"metadata": slow, "spec": {"nodeSelector": {"kubernetes.io/hostname": node}}}
        resource = example()
        resource["spec"]["engine"] |= {"replicas": 1, "podTemplate": there}
        plane.api.create(CLUSTERS, resource, namespace)
        wait_ready(plane, namespace)
        ((uid, pod),) = pods(plane, namespace).items()
        name, mark = pod["metadata"]["name"], plane.mark()

        def told() -> str:
            lose(plane, node, namespace, name, minutes=10)
            ready = condition(plane, namespace, "Ready")
            return str(ready["message"]) if ready["reason"] == "NodeLost" else ""

        assert f"its node {node} has not been ready" in plane.wait(told)
        # Nobody has said that it is to go: its kubelet may come back, and it with it.
        assert uid in pods(plane, namespace)
        plane.api.delete("v1/pods", name, namespace)

        def is_gone() -> bool:
            if uid not in pods(plane, namespace):
                return True
            lose(plane, node, namespace, name, minutes=10)  # whoever plays the kubelet may have come back
            return False

        plane.wait(is_gone)
        # The operator says so once that is done.
        plane.wait(lambda: is_said(plane, namespace, "NodeLost", f"deleted pod {name} by force"))
        writes = written(plane, operator, mark, namespace)
        assert [w.code for w in writes if (w.verb, w.name) == ("delete", name)] == [200]
    finally:
        plane.api.delete("v1/nodes", node)
