"""Resizes of the memory tiers of running pods on a real API server, which has its own rules for them."""

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from lmcache_operator.contract.base import Context
from lmcache_operator.kube.client import KubeApi, connect
from lmcache_operator.pods import resize
from lmcache_operator.pods.resize import sidecar_memory
from lmcache_operator.reconcile.reconciler import Reconciler
from lmcache_operator.specs.kinds import POD, ClusterKey
from lmcache_operator.specs.names import MEMORY_SIZE, RESIZE_REFUSED, STOCK_IMAGES, annotations_of
from testing.kube.api import ApiError, Object
from testing.kube.cluster import Cluster
from tests.harness.kube import CLUSTERS, NAME, Operator, example, new_namespace, since
from tests.harness.operator.autoscaling import GIB

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900), since("1.35")]

SECONDS = 300.0


class Operated:
    """A cluster of two pods, reconciled in this process. Its sidecars reach their target size at once."""

    def __init__(self, plane: Cluster, namespace: str) -> None:
        self.plane, self.api, self.namespace = plane, plane.api, namespace
        resource = example(engine={"replicas": 2, "gpu": {"count": 0}}, tiers={"memory": {"size": "1Gi"}})
        created = self.api.create(CLUSTERS, resource, namespace)
        self.key = ClusterKey(namespace, NAME, created["metadata"]["uid"])

    def declare(self, size: str) -> None:
        self.api.patch(CLUSTERS, NAME, {"spec": {"tiers": {"memory": {"size": size}}}}, self.namespace)

    def pods(self) -> list[Object]:
        return sorted(self.api.objects("v1/pods", self.namespace), key=lambda pod: pod["metadata"]["name"])

    def is_allowed(self, memory: str) -> bool:
        """Whether the API server would accept this memory for a sidecar. Limits apply after a delay."""
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
        """Reconcile repeatedly, like the operator but without its pauses."""
        asyncio.run(self._until(is_done))

    async def _until(self, is_done: Callable[[], Any]) -> None:
        async with connect() as api, asyncio.timeout(SECONDS):
            reconciler = self._reconciler(api)
            while True:
                await reconciler.reconcile(self.key)
                if await asyncio.to_thread(is_done):
                    return
                await asyncio.sleep(0.2)  # real time: a pause between polls

    def _reconciler(self, api: KubeApi) -> Reconciler:
        async def stats(address: str, _: str) -> Any:
            pods = await api.find(POD, self.namespace)
            (pod,) = (pod for pod in pods if pod["status"].get("podIP") == address)
            size = int(annotations_of(pod)[MEMORY_SIZE])
            memory = {"size_bytes": size, "target_bytes": size}
            return {"is_ready": True, "num_clients": {"attached": 1}, "memory": memory}

        # The clock stands still: no pause ends in which work is left to another operator.
        return Reconciler(api, Context(STOCK_IMAGES), stats, monotonic=lambda: 0.0)

    def block_growth(self, annotation: str | None = "never") -> None:
        """Make the kubelet ignore resizes. ``None`` ends this."""
        patch = {"metadata": {"annotations": {"test/resize": annotation}}}
        for pod in self.pods():
            self.api.patch("v1/pods", pod["metadata"]["name"], patch, self.namespace)

    def refused_pods(self) -> list[Object]:
        """Pods that were refused a size."""
        return [pod for pod in self.pods() if RESIZE_REFUSED in annotations_of(pod)]

    def pods_asking(self) -> list[Object]:
        """Pods that have requested memory and have no answer."""
        return [pod for pod in self.pods() if _is_asking(pod) and RESIZE_REFUSED not in annotations_of(pod)]

    def all_pods_have(self, size: int) -> bool:
        """Whether all pods serve with this size, by annotation and by the kubelet's status."""
        limit = f"{sidecar_memory(size) >> 20}Mi"
        return [_state(pod) for pod in self.pods()] == [(str(size), limit, True)] * 2


def _limit(containers: list[Object]) -> str:
    (sidecar,) = (each for each in containers if each.get("name") == "sidecar")
    return str(sidecar["resources"]["limits"]["memory"])


def _is_asking(pod: Object) -> bool:
    """Whether the pod requests another memory limit than the kubelet has applied."""
    return _state(pod)[1] not in ("", _limit(pod["spec"]["initContainers"]))


def _state(pod: Object) -> tuple[str, str, bool]:
    statuses = pod.get("status", {}).get("initContainerStatuses")
    limit = _limit(statuses) if statuses and "resources" in str(statuses) else ""
    ready = ("Ready", "True") in [(c["type"], c["status"]) for c in pod["status"].get("conditions") or ()]
    return annotations_of(pod).get(MEMORY_SIZE, ""), limit, ready


@pytest.fixture(scope="module")
def shared(plane: Cluster, operator_process: Operator) -> Iterator[Operated]:
    if operator_process.is_running:
        operator_process.terminate()
    with pytest.MonkeyPatch.context() as patch, new_namespace(plane, "resizes") as namespace:
        patch.setenv("KUBECONFIG", str(plane.kubeconfig()))
        yield Operated(plane, namespace)


@pytest.fixture
def operated(shared: Operated) -> Operated:
    """The cluster with two pods of 1 GiB, which were refused no other size."""
    shared.block_growth(None)
    for size in (1536, 1024):  # a granted resize ends a refusal
        shared.declare(f"{size}Mi")
        shared.until(lambda size=size: shared.all_pods_have(size << 20))
    assert not shared.refused_pods()
    return shared


def test_pods_grow_and_shrink_without_replacement(operated: Operated) -> None:
    before = [pod["metadata"]["uid"] for pod in operated.pods()]
    for size in (2, 4, 1):
        operated.declare(f"{size}Gi")
        operated.until(lambda size=size: operated.all_pods_have(size * GIB))
        operated.until(lambda: operated.condition("Progressing")["reason"] == "Complete")
    after = operated.pods()
    assert [pod["metadata"]["uid"] for pod in after] == before
    restarts = [s["restartCount"] for pod in after for s in pod["status"]["containerStatuses"]]
    assert restarts == [0, 0]
    # An idle operator writes nothing.
    versions = [pod["metadata"]["resourceVersion"] for pod in after]
    num_looks = iter(range(5))
    operated.until(lambda: next(num_looks) == 4)
    assert [pod["metadata"]["resourceVersion"] for pod in operated.pods()] == versions


LIMIT_RANGE = {"limits": [{"type": "Container", "max": {"memory": "4500Mi"}}]}
"""The maximum exceeds the engine's request. The API server sets it as the engine's limit, too."""


@pytest.mark.parametrize(
    ("kind", "spec", "message"),
    [
        ("v1/limitranges", LIMIT_RANGE, "maximum memory usage per Container is 4500Mi"),
        ("v1/resourcequotas", {"hard": {"requests.memory": "12Gi"}}, "exceeded quota"),
    ],
)
def test_resize_that_a_namespace_forbids_is_reported_and_reverted(
    operated: Operated, kind: str, spec: Object, message: str
) -> None:
    operated.api.create(kind, {"metadata": {"name": "tight"}, "spec": spec}, operated.namespace)
    operated.plane.wait(lambda: not operated.is_allowed("4736Mi"))
    operated.declare("4Gi")
    operated.until(lambda: operated.condition("Degraded").get("reason") == "ResizeInfeasible")
    assert message in operated.condition("Degraded")["message"]
    assert operated.condition("Ready")["reason"] == "Ready"
    if spec == LIMIT_RANGE:
        # The API server would set the maximum as the engine's limit, and the kernel could kill the engine.
        operated.declare("2Gi")
        sentence = "would limit container engine of the running pod"
        operated.until(lambda: sentence in operated.condition("Degraded")["message"])
        engines = [c for pod in operated.pods() for c in pod["spec"]["containers"] if c["name"] == "engine"]
        assert [engine["resources"].get("limits") for engine in engines] == [None, None]
    operated.api.delete(kind, "tight", operated.namespace)
    operated.plane.wait(lambda: operated.is_allowed("4736Mi"))
    operated.declare("3Gi")
    operated.until(lambda: operated.all_pods_have(3 * GIB))
    operated.until(lambda: operated.condition("Degraded")["status"] == "False")
    assert not operated.refused_pods()


def test_resize_that_a_node_does_not_grant_is_reverted(
    operated: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    operated.block_growth()
    operated.declare("4Gi")
    operated.until(operated.pods_asking)
    _defer(operated)
    operated.until(lambda: "waiting for the kubelet" in operated.condition("Progressing")["message"])
    assert operated.condition("Degraded")["status"] == "False"
    monkeypatch.setattr(resize, "_PATIENCE", timedelta())
    operated.until(lambda: operated.condition("Degraded").get("reason") == "ResizeInfeasible")
    message = "the kubelet has not granted the memory for 0 minutes: Node didn't have enough"
    assert message in operated.condition("Degraded")["message"]

    def is_reverted() -> bool:
        _defer(operated)  # the second pod requests memory once the first has its answer
        return len(operated.refused_pods()) == 2 and not any(map(_is_asking, operated.pods()))

    operated.until(is_reverted)
    assert operated.condition("Ready")["reason"] == "Ready"


def _defer(operated: Operated) -> None:
    """Answer all requests for memory as a kubelet without free memory does."""
    for pod in operated.pods_asking():
        metadata = pod["metadata"]
        pending = {
            "type": "PodResizePending", "status": "True", "reason": "Deferred",
            "message": "Node didn't have enough capacity: memory",
            "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": metadata["generation"],
        }  # fmt: skip
        path = operated.api.path("v1/pods", metadata["namespace"], f"{metadata['name']}/status")
        patch = {"status": {"conditions": [pending]}}
        operated.api.request("PATCH", path, patch, "application/strategic-merge-patch+json")


def test_pod_replaced_during_a_resize_starts_with_the_new_size(operated: Operated) -> None:
    operated.block_growth()
    operated.declare("4Gi")
    operated.until(operated.pods_asking)
    (growing,) = operated.pods_asking()
    operated.api.delete("v1/pods", growing["metadata"]["name"], operated.namespace)
    (remaining,) = (pod for pod in operated.pods() if pod["metadata"]["uid"] != growing["metadata"]["uid"])
    uid = remaining["metadata"]["uid"]
    operated.until(lambda: [pod["metadata"]["uid"] for pod in operated.pods_asking()] == [uid])
    operated.block_growth(None)
    operated.until(lambda: operated.all_pods_have(4 * GIB))
    operated.until(lambda: operated.condition("Progressing")["reason"] == "Complete")
    assert uid in [pod["metadata"]["uid"] for pod in operated.pods()]
