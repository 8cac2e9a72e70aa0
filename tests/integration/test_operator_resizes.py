"""Memory tiers of running pods on a real API server, which has its own rules for resizes in place."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pytest
from lmcache_operator.autoscaling.report import Choice, Report
from lmcache_operator.components import resize
from lmcache_operator.components.base import Context, Observed
from lmcache_operator.components.resize import sidecar_memory
from lmcache_operator.errors import ApiError as KubeError
from lmcache_operator.kube.client import KubeApi, connect
from lmcache_operator.reconcile.reconciler import Autoscaler, Reconciler
from lmcache_operator.specs.kinds import POD, ClusterKey
from lmcache_operator.specs.names import MEMORY_SIZE, RESIZE_REFUSED, STOCK_IMAGES, annotations_of

from testing.kube.api import ApiError, Object
from testing.kube.cluster import Cluster
from tests.harness.kube import CLUSTERS, NAME, Operator, example, since

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900), since("1.35")]

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
            reconciler = self.reconciler(api)
            while True:
                await reconciler.reconcile(self.key)
                if await asyncio.to_thread(is_done):
                    return
                await asyncio.sleep(0.2)

    def reconciler(self, api: KubeApi, autoscaler: Autoscaler | None = None) -> Reconciler:
        async def stats(address: str) -> Any:
            found = await api.find(POD, self.namespace)
            (pod,) = (pod for pod in found if pod["status"].get("podIP") == address)
            size = int(annotations_of(pod)[MEMORY_SIZE])
            memory = {"size_bytes": size, "target_bytes": size}
            return {"is_ready": True, "num_clients": {"attached": 1}, "memory": memory}

        # No pause ends in which something is left to another operator.
        context = Context(STOCK_IMAGES)
        return Reconciler(api, context, stats, autoscaler=autoscaler, monotonic=lambda: 0.0)

    def keep_from_growing(self, annotation: str | None = "never") -> None:
        """The kubelet does not answer, until it is None."""
        patch = {"metadata": {"annotations": {"test/resize": annotation}}}
        for pod in self.pods():
            self.api.patch("v1/pods", pod["metadata"]["name"], patch, self.namespace)

    def asking(self) -> list[Object]:
        """Pods that have asked for memory, and have no answer."""
        return [
            pod
            for pod in self.pods()
            if pod["metadata"]["generation"] > 1 and RESIZE_REFUSED not in annotations_of(pod)
        ]

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


@pytest.mark.parametrize(
    ("verdict", "told"),
    [
        ("Infeasible", "its node has no room: Node didn't have enough capacity"),
        ("Deferred", "its node has not given the memory in 0 minutes: Node didn't have enough capacity"),
    ],
)
def test_what_a_node_has_no_room_for_is_taken_back(
    operated: Operated, monkeypatch: pytest.MonkeyPatch, verdict: str, told: str
) -> None:
    operated.keep_from_growing()
    operated.declare("4Gi")
    operated.until(operated.asking)
    _tell(operated, verdict)
    if verdict == "Deferred":
        operated.until(lambda: "waits for its node" in operated.condition("Progressing")["message"])
        assert operated.condition("Degraded")["status"] == "False"
        monkeypatch.setattr(resize, "_PATIENCE", timedelta())
    operated.until(lambda: operated.condition("Degraded").get("reason") == "ResizeInfeasible")
    assert told in operated.condition("Degraded")["message"]

    def limits() -> set[str]:
        sidecars = [c for pod in operated.pods() for c in pod["spec"]["initContainers"]]
        return {c["resources"]["limits"]["memory"] for c in sidecars if c["name"] == "sidecar"}

    def is_taken_back() -> bool:
        _tell(operated, verdict)  # the other pod asks when the first one is done with
        refused = [pod for pod in operated.pods() if RESIZE_REFUSED in annotations_of(pod)]
        return len(refused) == 2 and limits() == {f"{sidecar_memory(GIB) >> 20}Mi"}

    operated.until(is_taken_back)
    assert operated.condition("Ready")["status"] == "True"


def _tell(operated: Operated, verdict: str) -> None:
    """As a kubelet does."""
    for pod in operated.asking():
        metadata = pod["metadata"]
        told = {
            "type": "PodResizePending", "status": "True", "reason": verdict,
            "message": "Node didn't have enough capacity: memory",
            "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": metadata["generation"],
        }  # fmt: skip
        path = operated.api.path("v1/pods", metadata["namespace"], f"{metadata['name']}/status")
        patch = {"status": {"conditions": [told]}}
        operated.api.request("PATCH", path, patch, "application/strategic-merge-patch+json")


def test_a_pod_replaced_while_it_grows_comes_as_declared_and_the_other_grows_on(operated: Operated) -> None:
    operated.keep_from_growing()
    operated.declare("4Gi")
    operated.until(operated.asking)
    (asking,) = operated.asking()
    operated.api.delete("v1/pods", asking["metadata"]["name"], operated.namespace)
    (other,) = (pod for pod in operated.pods() if pod["metadata"]["uid"] != asking["metadata"]["uid"])
    uid = other["metadata"]["uid"]
    operated.until(lambda: [pod["metadata"]["uid"] for pod in operated.asking()] == [uid])
    operated.keep_from_growing(None)
    operated.until(lambda: operated.has(4 * GIB))
    operated.until(lambda: operated.condition("Progressing")["reason"] == "Complete")
    assert uid in [pod["metadata"]["uid"] for pod in operated.pods()]


class Chooser:
    """An operator's own opinion of how large a memory tier should be."""

    def __init__(self, size: int) -> None:
        self._size = size

    def report(self, key: ClusterKey, observed: Mapping[str, Observed]) -> Report:
        return Report({}, memory=Choice(self._size, GIB), state="counted")

    def forget(self, key: ClusterKey) -> None:
        """Nothing is remembered."""


def test_two_operators_of_different_opinions_come_to_an_end(operated: Operated) -> None:
    """Both run by mistake; pods get a size of one of them, and then are left alone."""
    auto = {"spec": {"autoscaling": {"mode": "Auto", "memory": {"minSize": "1Gi", "maxSize": "4Gi"}}}}
    operated.api.patch(CLUSTERS, NAME, auto, operated.namespace)

    def versions() -> list[str]:
        return [pod["metadata"]["resourceVersion"] for pod in operated.pods()]

    def have_what_was_chosen() -> bool:
        chosen = operated.api.get("v1/configmaps", f"{NAME}-autoscaling", operated.namespace)["data"]["sizes"]
        return operated.has(int(json.loads(chosen)["memory"]["size"]))

    async def scenario() -> None:
        async with connect() as api, asyncio.timeout(SECONDS):
            both = [operated.reconciler(api, Chooser(size * GIB)) for size in (2, 3)]
            num_quiet, before = 0, list[str]()
            while num_quiet < 5 or not await asyncio.to_thread(have_what_was_chosen):
                for reconciler in both:
                    with contextlib.suppress(KubeError):  # as 409, where the other was quicker
                        await reconciler.reconcile(operated.key)
                now = await asyncio.to_thread(versions)
                num_quiet, before = num_quiet + 1 if now == before else 0, now

    asyncio.run(scenario())
