"""Memory tiers of running pods on a real API server, which has its own rules for resizes in place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from lmcache_operator.components.base import Context
from lmcache_operator.components.resize import sidecar_memory
from lmcache_operator.kube.client import connect
from lmcache_operator.reconcile.reconciler import Reconciler
from lmcache_operator.specs.kinds import POD, ClusterKey
from lmcache_operator.specs.names import MEMORY_SIZE, RESIZE_REFUSED, STOCK_IMAGES, annotations_of

from testing.kube.api import Api, ApiError, Object
from testing.kube.cluster import Cluster
from tests.harness.kube import CLUSTERS, NAME, Operator, example, since

pytestmark = [pytest.mark.kube, since("1.35")]

SECONDS = 300.0
GIB = 2**30
ENGINE = f"{NAME}-engine"


class Operated:
    """A cluster of two pods, reconciled in this process; its sidecars have at once what their pods say."""

    def __init__(self, plane: Cluster, namespace: str) -> None:
        self.plane, self.api, self.namespace = plane, plane.api, namespace
        resource = example(engine={"replicas": 2, "gpu": {"count": 0}}, tiers={"memory": {"size": "1Gi"}})
        created = self.api.create(CLUSTERS, resource, namespace)
        self.key = ClusterKey(namespace, NAME, created["metadata"]["uid"])

    def declare(self, size: str) -> None:
        self.api.patch(CLUSTERS, NAME, {"spec": {"tiers": {"memory": {"size": size}}}}, self.namespace)

    def pods(self) -> list[Object]:
        return sorted(self.api.objects("v1/pods", self.namespace), key=lambda pod: pod["metadata"]["name"])

    def may_have(self, memory: str) -> bool:
        """Whether the API server would let the first sidecar have it: it learns of limits in its time."""
        both = {"requests": {"memory": memory}, "limits": {"memory": memory}}
        patch = {"spec": {"initContainers": [{"name": "sidecar", "resources": both}]}}
        path = self.api.path("v1/pods", self.namespace, f"{self.pods()[0]['metadata']['name']}/resize")
        try:
            self.api.request("PATCH", f"{path}?dryRun=All", patch, "application/strategic-merge-patch+json")
        except ApiError:
            return False
        return True

    def condition(self, kind: str) -> Object:
        status = self.api.get(CLUSTERS, NAME, self.namespace).get("status", {})
        return next((c for c in status.get("conditions", []) if c["type"] == kind), {})

    def until(self, is_done: Callable[[], Any]) -> None:
        """Reconcile again and again, as the operator does, though sooner."""
        asyncio.run(self._until(is_done))

    async def _until(self, is_done: Callable[[], Any]) -> None:
        async with connect() as api, asyncio.timeout(SECONDS):

            async def stats(address: str) -> Any:
                found = await api.find(POD, self.namespace)
                (pod,) = (pod for pod in found if pod["status"].get("podIP") == address)
                size = int(annotations_of(pod)[MEMORY_SIZE])
                memory = {"size_bytes": size, "target_bytes": size}
                return {"is_ready": True, "num_clients": {"attached": 1}, "memory": memory}

            reconciler = Reconciler(api, Context(STOCK_IMAGES), stats)
            while True:
                await reconciler.reconcile(self.key)
                if await asyncio.to_thread(is_done):
                    return
                await asyncio.sleep(0.2)

    def has(self, size: int) -> bool:
        """Whether all pods serve with it, by annotation and by what the kubelet says."""
        limit = f"{sidecar_memory(size) >> 20}Mi"
        return [_state(pod) for pod in self.pods()] == [(str(size), limit, True)] * 2


def _state(pod: Object) -> tuple[str, str, bool]:
    found = pod.get("status", {}).get("initContainerStatuses") or [{}]
    (sidecar,) = (status for status in found if status.get("name", "sidecar") == "sidecar")
    told = sidecar.get("resources", {}).get("limits", {}).get("memory", "")
    ready = [
        c for c in pod["status"].get("conditions") or () if (c["type"], c["status"]) == ("Ready", "True")
    ]
    return annotations_of(pod).get(MEMORY_SIZE, ""), told, bool(ready)


@pytest.fixture
def operated(
    plane: Cluster, operator_process: Operator, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> Operated:
    if operator_process.is_running:
        operator_process.terminate()
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig()))
    operated = Operated(plane, namespace)
    operated.until(lambda: operated.has(GIB))
    return operated


def test_pods_grow_and_shrink_and_stay_the_same(operated: Operated) -> None:
    before = [pod["metadata"]["uid"] for pod in operated.pods()]
    for size in (2, 4, 1):
        operated.declare(f"{size}Gi")
        operated.until(lambda size=size: operated.has(size * GIB))
        operated.until(lambda: operated.condition("Progressing")["reason"] == "Complete")
    after = operated.pods()
    assert [pod["metadata"]["uid"] for pod in after] == before
    restarts = [s["restartCount"] for pod in after for s in pod["status"]["containerStatuses"]]
    assert restarts == [0, 0]
    # At rest nothing is written any more.
    versions = [pod["metadata"]["resourceVersion"] for pod in after]
    num_looks = iter(range(5))
    operated.until(lambda: next(num_looks) == 4)
    assert [pod["metadata"]["resourceVersion"] for pod in operated.pods()] == versions


LIMIT_RANGE = {"limits": [{"type": "Container", "max": {"memory": "4500Mi"}}]}
"""More than the engine's request: as the engine's limit, too, it is laid down by the API server."""


@pytest.mark.parametrize(
    ("kind", "spec", "message"),
    [
        ("v1/limitranges", LIMIT_RANGE, "maximum memory usage per Container is 4500Mi"),
        ("v1/resourcequotas", {"hard": {"requests.memory": "12Gi"}}, "exceeded quota"),
    ],
)
def test_what_a_namespace_forbids_is_told_and_taken_back(
    operated: Operated, kind: str, spec: Object, message: str
) -> None:
    operated.api.create(kind, {"metadata": {"name": "tight"}, "spec": spec}, operated.namespace)
    operated.plane.wait(lambda: not operated.may_have("4736Mi"))
    operated.declare("4Gi")
    operated.until(lambda: operated.condition("Degraded").get("reason") == "ResizeInfeasible")
    assert message in operated.condition("Degraded")["message"]
    assert operated.condition("Ready")["status"] == "True"
    operated.api.delete(kind, "tight", operated.namespace)
    operated.plane.wait(lambda: operated.may_have("4736Mi"))
    operated.declare("2Gi")
    operated.until(lambda: operated.has(2 * GIB))
    operated.until(lambda: operated.condition("Degraded")["status"] == "False")
    assert not [pod for pod in operated.pods() if RESIZE_REFUSED in annotations_of(pod)]


def test_no_limit_range_reaches_a_running_engine_by_a_resize(operated: Operated) -> None:
    """The API server would give it the range's maximum as its limit, and it could be killed for that."""
    tight = {"metadata": {"name": "tight"}, "spec": LIMIT_RANGE}
    operated.api.create("v1/limitranges", tight, operated.namespace)
    operated.plane.wait(lambda: not operated.may_have("4736Mi"))
    operated.declare("2Gi")
    operated.until(lambda: operated.condition("Degraded").get("reason") == "ResizeInfeasible")
    assert "would limit container engine of the running pod" in operated.condition("Degraded")["message"]
    engines = [own for pod in operated.pods() for own in pod["spec"]["containers"] if own["name"] == "engine"]
    assert [own["resources"].get("limits") for own in engines] == [None, None]


def test_what_a_node_has_no_room_for_is_taken_back(operated: Operated) -> None:
    never = {"metadata": {"annotations": {"test/resize": "never"}}}
    for pod in operated.pods():
        operated.api.patch("v1/pods", pod["metadata"]["name"], never, operated.namespace)
    operated.declare("4Gi")

    def asked() -> list[Object]:
        return [pod for pod in operated.pods() if pod["metadata"]["generation"] > 1]

    operated.until(asked)
    for pod in asked():
        _tell_infeasible(operated.api, pod)
    operated.until(lambda: operated.condition("Degraded").get("reason") == "ResizeInfeasible")
    assert (
        "its node has no room: Node didn't have enough capacity" in operated.condition("Degraded")["message"]
    )

    def limits() -> set[str]:
        sidecars = [c for pod in operated.pods() for c in pod["spec"]["initContainers"]]
        return {c["resources"]["limits"]["memory"] for c in sidecars if c["name"] == "sidecar"}

    operated.until(lambda: limits() == {f"{sidecar_memory(GIB) >> 20}Mi"} or _refuse_again(operated))


def _refuse_again(operated: Operated) -> None:
    """The other pod asks when the first one is done with."""
    for pod in operated.pods():
        is_asking = RESIZE_REFUSED not in annotations_of(pod) and pod["metadata"]["generation"] > 1
        if is_asking:
            _tell_infeasible(operated.api, pod)


def _tell_infeasible(api: Api, pod: Object) -> None:
    """As a kubelet does."""
    told = {
        "type": "PodResizePending", "status": "True", "reason": "Infeasible",
        "message": "Node didn't have enough capacity: memory", "lastTransitionTime": "2026-01-01T00:00:00Z",
        "observedGeneration": pod["metadata"]["generation"],
    }  # fmt: skip
    metadata = pod["metadata"]
    path = api.path("v1/pods", metadata["namespace"], f"{metadata['name']}/status")
    patch = {"status": {"conditions": [told]}}
    api.request("PATCH", path, patch, "application/strategic-merge-patch+json")
