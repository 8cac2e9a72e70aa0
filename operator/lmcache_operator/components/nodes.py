"""Pods whose nodes are gone. Pure.

Nobody there can say that such a pod has ended, so a StatefulSet waits for it for ever. An engine's pod owns
no data that is nowhere else: it is deleted without its node's word.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from lmcache_operator.components.base import Observed, Problem
from lmcache_operator.components.pods import is_ready
from lmcache_operator.specs import Object

_PATIENCE = timedelta(minutes=5)
"""A node may come back until then: as long as Kubernetes itself waits before it deletes the pods there."""


def doubtful_nodes(pods: tuple[Object, ...]) -> set[str]:
    """Nodes to look at: those of pods that don't serve."""
    return {pod["spec"]["nodeName"] for pod in pods if not is_ready(pod) and pod["spec"].get("nodeName")}


def abandoned(observed: Observed) -> Iterator[Object]:
    """Pods to delete by force: they are to go, and their node was given its time.

    Who decides that they are to go is Kubernetes, also where the node does not exist: it may be made again at
    once, by a kubelet that was well all the time.
    """
    for pod, node, since in _on_lost_nodes(observed):
        ends = pod["metadata"].get("deletionTimestamp")
        # Of a node that says itself that it is not ready the kubelet still runs, and ends pods.
        is_ending = node is not None and _ready(node).get("status") == "False"
        is_due = ends is not None and (not is_ending or _time(ends, observed) <= observed.now)
        if is_due and observed.now - since >= _PATIENCE:
            yield pod


def node_problems(observed: Observed) -> Iterator[Problem]:
    """Which nodes are lost, one pod standing for all that are there."""
    for pod, node, since in _on_lost_nodes(observed):
        name, about = pod["metadata"]["name"], pod["spec"]["nodeName"]
        what = "does not exist any more" if node is None else f"has not been ready since {since:%H:%M:%S} UTC"
        minutes = _PATIENCE // timedelta(minutes=1)
        remedy = f"if it does not come back, the pod is replaced after {minutes} minutes and its eviction"
        yield Problem("NodeLost", f"pod {name}: its node {about} {what}; {remedy}")
        return
    if not observed.node_refusal:
        return
    for pod in observed.pods:
        ends = pod["metadata"].get("deletionTimestamp")
        if ends and observed.now - _time(ends, observed) >= _PATIENCE:
            why = f"the operator may not see whether its node is lost: {observed.node_refusal}"
            yield Problem("Refused", f"pod {pod['metadata']['name']} should have ended at {ends}; {why}")
            return


def _on_lost_nodes(observed: Observed) -> Iterator[tuple[Object, Object | None, datetime]]:
    """Pods that don't serve, their nodes that are not ready (None: gone), and since when."""
    for pod in observed.pods:
        name = pod["spec"].get("nodeName")
        if is_ready(pod) or name not in observed.nodes:
            continue
        node = observed.nodes[name]
        condition = _ready(pod if node is None else node)
        if node is None or condition.get("status") != "True":
            yield pod, node, _time(condition.get("lastTransitionTime"), observed)


def _ready(pod_or_node: Object) -> Object:
    conditions = pod_or_node.get("status", {}).get("conditions") or ()
    return next((condition for condition in conditions if condition["type"] == "Ready"), {})


def _time(text: str | None, observed: Observed) -> datetime:
    return datetime.fromisoformat(text) if text else observed.now
