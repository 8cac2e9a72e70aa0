"""Access to the example's LMCacheCluster, and to the operator's effects on it."""

import time
from datetime import UTC, datetime, timedelta

from lmcache_operator.specs.names import HEARTBEAT_MANAGER
from testing.kube.api import Object
from testing.kube.audit import Request
from testing.kube.cluster import FAKE_NODE, Cluster
from tests.harness.kube import CLUSTERS, NAME, Operator

ENGINE = f"{NAME}-engine"
HELD: Object = {"metadata": {"annotations": {"test/hold": "true"}}}
"""Pod template of pods whose status only the test writes: it plays the kubelet."""
_TIME_CHARS = len("2026-01-31T12:00:00.000000")  # of ISO times in UTC, without the zone


def condition(plane: Cluster, namespace: str, kind: str) -> Object:
    status = plane.api.get(CLUSTERS, NAME, namespace).get("status", {})
    matching: Object = next((c for c in status.get("conditions", []) if c["type"] == kind), {})
    return matching


def wait_ready(plane: Cluster, namespace: str) -> None:
    """Wait until the operator has observed the latest spec, and reports that all pods serve it."""

    def is_ready() -> bool:
        live = plane.api.get(CLUSTERS, NAME, namespace)
        conditions = live.get("status", {}).get("conditions", [])
        ready = [
            c["observedGeneration"] for c in conditions if (c["type"], c["reason"]) == ("Ready", "Ready")
        ]
        return ready == [live["metadata"]["generation"]]

    plane.wait(is_ready)


def set_running(plane: Cluster, namespace: str, pod: str, address: str, *, is_ready: bool = True) -> None:
    """Report a pod of the template ``HELD`` as running, with this address."""
    ready = [{"type": "Ready", "status": str(is_ready)}]
    status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": ready}
    plane.api.patch("v1/pods", f"{pod}/status", {"status": status}, namespace)


def lose(plane: Cluster, node: str, namespace: str, pod: str, minutes: float) -> None:
    """Write what controllers write for a node without heartbeat since ``minutes``, and for a pod on it."""
    plane.api.patch("v1/nodes", node, {"metadata": {"annotations": {FAKE_NODE: None}}})
    since = (datetime.now(UTC) - timedelta(minutes=minutes)).strftime("%Y-%m-%dT%H:%M:%SZ")
    times = {"lastTransitionTime": since, "lastHeartbeatTime": since}
    unknown = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}
    plane.api.patch("v1/nodes", f"{node}/status", {"status": {"conditions": [unknown | times]}})
    unready = {"type": "Ready", "status": "False", "reason": "NodeNotReady", "lastTransitionTime": since}
    plane.api.patch("v1/pods", f"{pod}/status", {"status": {"conditions": [unready]}}, namespace)


def pods(plane: Cluster, namespace: str) -> dict[str, Object]:
    """The engine's pods by uid."""
    engine_pods = plane.api.objects("v1/pods", namespace, f"lmcache.io/cluster={NAME}")
    return {pod["metadata"]["uid"]: pod for pod in engine_pods}


def reconcile_once_more(plane: Cluster, operator: Operator, namespace: str) -> None:
    """Trigger a reconciliation by a change without effect, and wait until it has ended.

    The operator never runs two reconciliations of a cluster at the same time, so the first one has ended when
    a second one begins. The operator's count of reconciliations is of no use here: it includes those of other
    clusters, for example in the namespaces of former tests.
    """
    for _ in range(2):
        _begin_reconciliation(plane, operator, namespace)


def _begin_reconciliation(plane: Cluster, operator: Operator, namespace: str) -> None:
    """Trigger a reconciliation, and wait until one has begun since this call: it has read the cluster."""
    mark, now = plane.mark(), datetime.now(UTC).isoformat(timespec="microseconds")[:_TIME_CHARS]
    change = {"metadata": {"annotations": {"test/poke": str(time.monotonic_ns())}}}
    plane.api.patch(CLUSTERS, NAME, change, namespace)

    def has_begun() -> bool:
        reads = plane.reads_since(mark, by=operator.user, namespace=namespace)
        return any(read.name == NAME and read.received[:_TIME_CHARS] > now for read in reads)

    plane.wait(has_begun)


def wait_quiet(plane: Cluster, operator: Operator, namespace: str) -> None:
    """Wait until a reconciliation writes nothing."""

    def is_quiet() -> bool:
        mark = plane.mark()
        reconcile_once_more(plane, operator, namespace)
        return not written(plane, operator, mark, namespace)

    plane.wait(is_quiet)


def written(plane: Cluster, operator: Operator, mark: int, namespace: str) -> list[Request]:
    """Writes of the operator, except for its heartbeats."""
    writes = plane.written_since(mark, by=operator.user, namespace=namespace)
    return [write for write in writes if HEARTBEAT_MANAGER not in write.uri]
