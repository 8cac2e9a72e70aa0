"""Pods on lost nodes. Pure.

No kubelet can confirm that such a pod has ended, so its StatefulSet would wait for it forever. An engine's
pod holds only cached data, so the operator deletes it without that confirmation.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from lmcache_operator.contract.base import Observed
from lmcache_operator.contract.conditions import Problem
from lmcache_operator.pods.pods import condition_of, is_ready, time_of
from lmcache_operator.specs import Object

_PATIENCE = timedelta(minutes=5)
"""Time for a lost node to come back: as long as Kubernetes waits before it evicts the node's pods."""


def doubtful_nodes(pods: tuple[Object, ...]) -> set[str]:
    """Names of the nodes to observe: those with pods that are not ready."""
    return {pod["spec"]["nodeName"] for pod in pods if not is_ready(pod) and pod["spec"].get("nodeName")}


def abandoned(observed: Observed) -> Iterator[Object]:
    """Terminating pods whose node has been lost for five minutes. They are to be deleted by force.

    Kubernetes decides that a pod terminates, even if its node object does not exist: a healthy kubelet may
    register the node again at once.
    """
    for pod, node, since in _on_lost_nodes(observed):
        ends = pod["metadata"].get("deletionTimestamp")
        # On a node that reports itself as not ready the kubelet still runs, and can end pods.
        is_ending = node is not None and condition_of(node, "Ready").get("status") == "False"
        is_due = ends is not None and (not is_ending or time_of(ends, observed) <= observed.now)
        if is_due and observed.now - since >= _PATIENCE:
            yield pod


def node_problems(observed: Observed) -> Iterator[Problem]:
    """A problem if nodes are lost, or if the operator may not read nodes. It quotes the first pod."""
    for pod, node, since in _on_lost_nodes(observed):
        name, node_name = pod["metadata"]["name"], pod["spec"]["nodeName"]
        what = "no longer exists" if node is None else f"has not been ready since {since:%H:%M:%S} UTC"
        minutes = _PATIENCE // timedelta(minutes=1)
        remedy = f"unless it comes back in {minutes} minutes, the pod is replaced once Kubernetes evicts it"
        yield Problem("NodeLost", f"pod {name}: its node {node_name} {what}; {remedy}")
        return
    if not observed.node_refusal:
        return
    for pod in observed.pods:
        ends = pod["metadata"].get("deletionTimestamp")
        if ends and observed.now - time_of(ends, observed) >= _PATIENCE:
            why = f"the operator is not allowed to check whether its node is lost: {observed.node_refusal}"
            yield Problem("Refused", f"pod {pod['metadata']['name']} should have ended at {ends}; {why}")
            return


def _on_lost_nodes(observed: Observed) -> Iterator[tuple[Object, Object | None, datetime]]:
    """Unready pods on lost nodes, each with the node (None: it does not exist) and the time of the loss."""
    for pod in observed.pods:
        name = pod["spec"].get("nodeName")
        if is_ready(pod) or name not in observed.nodes:
            continue
        node = observed.nodes[name]
        condition = condition_of(pod if node is None else node, "Ready")
        if node is None or condition.get("status") != "True":
            yield pod, node, time_of(condition.get("lastTransitionTime"), observed)
