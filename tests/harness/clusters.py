"""Looking at the LMCacheCluster of the example, and at what the operator does to it."""

import time

from testing.kube.api import Object
from testing.kube.cluster import Cluster, Write
from tests.harness.kube import CLUSTERS, NAME, Operator

ENGINE = f"{NAME}-engine"


def condition(plane: Cluster, namespace: str, kind: str) -> Object:
    status = plane.api.get(CLUSTERS, NAME, namespace).get("status", {})
    found: Object = next((c for c in status.get("conditions", []) if c["type"] == kind), {})
    return found


def wait_ready(plane: Cluster, namespace: str) -> None:
    """Until the operator has seen the present spec and says Ready."""

    def is_ready() -> bool:
        live = plane.api.get(CLUSTERS, NAME, namespace)
        ready = condition(plane, namespace, "Ready")
        seen = ready.get("observedGeneration") == live["metadata"]["generation"]
        return seen and ready["status"] == "True"

    plane.wait(is_ready)


def pods(plane: Cluster, namespace: str) -> dict[str, Object]:
    """The engine's pods by uid."""
    found = plane.api.objects("v1/pods", namespace, f"lmcache.io/cluster={NAME}")
    return {pod["metadata"]["uid"]: pod for pod in found}


def reconcile_once_more(plane: Cluster, operator: Operator, namespace: str) -> None:
    """Have the cluster reconciled again, by a change that means nothing, and wait until it did."""
    before = operator.num_reconciliations()
    note = {"metadata": {"annotations": {"test/poke": str(time.monotonic_ns())}}}
    plane.api.patch(CLUSTERS, NAME, note, namespace)
    plane.wait(lambda: operator.num_reconciliations() > before)


def wait_quiet(plane: Cluster, operator: Operator, namespace: str) -> None:
    """Until a reconciliation writes nothing."""

    def is_quiet() -> bool:
        mark = plane.mark()
        reconcile_once_more(plane, operator, namespace)
        return not written(plane, operator, mark, namespace)

    plane.wait(is_quiet)


def written(plane: Cluster, operator: Operator, mark: int, namespace: str) -> list[Write]:
    return plane.written_since(mark, by=operator.user, namespace=namespace)
