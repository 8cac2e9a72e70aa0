"""GPU claims on a real API server, scheduler and claim controller. The devices exist only as objects."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_operator.contract.base import SidecarState
from lmcache_operator.reconcile.probe import SidecarProber
from lmcache_operator.stats import StatsClient
from testing.kube.api import Object
from testing.kube.cluster import Cluster
from testing.processes import SidecarProcess
from tests.harness.kube import CLUSTERS, NAME, example, new_namespace, since
from tests.harness.operator.clusters import ENGINE, condition, pods, wait_quiet, wait_ready
from tests.harness.operator.devices import DEVICE_CLASS, published
from tests.harness.sidecar.wire import RawClient

pytestmark = pytest.mark.kube

TEMPLATES, CLAIMS = "resource.k8s.io/v1/resourceclaimtemplates", "resource.k8s.io/v1/resourceclaims"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


@pytest.fixture
def devices(plane: Cluster) -> Iterator[None]:
    with published(plane, per_node=4):
        yield


def transfer(plane: Cluster, namespace: str) -> Object:
    status: Object = plane.api.get(CLUSTERS, NAME, namespace)["status"]["transfer"]
    return status


def num_devices(plane: Cluster, namespace: str) -> list[int]:
    """Number of allocated devices of each claim."""
    claims = plane.api.objects(CLAIMS, namespace)
    results = [claim.get("status", {}).get("allocation", {}).get("devices", {}) for claim in claims]
    return [len(devices.get("results", [])) for devices in results]


def change(plane: Cluster, namespace: str, **spec: Object) -> None:
    plane.api.patch(CLUSTERS, NAME, {"spec": spec}, namespace)


@since("1.34")
def test_engine_and_sidecar_share_a_claim_through_changes_and_removal(plane, operator, devices):
    with new_namespace(plane, "claims", **RESTRICTED) as namespace:
        engine = {"replicas": 2, "gpu": {"deviceClassName": DEVICE_CLASS}}
        plane.api.create(CLUSTERS, example(engine=engine), namespace)
        wait_ready(plane, namespace)
        status = transfer(plane, namespace)
        assert (status["requested"], status["reason"]) == ("Auto", "DRAClaimShared")
        assert num_devices(plane, namespace) == [1, 1]
        for pod in pods(plane, namespace).values():
            (claim_status,) = pod["status"]["resourceClaimStatuses"]
            claim = plane.api.get(CLAIMS, claim_status["resourceClaimName"], namespace)
            assert [user["uid"] for user in claim["status"]["reservedFor"]] == [pod["metadata"]["uid"]]
            users = [*pod["spec"]["containers"], pod["spec"]["initContainers"][0]]
            assert [user["resources"]["claims"] for user in users] == [[{"name": "gpu"}]] * 2
        # When idle, the operator writes nothing: the API server's defaults are not taken for changes.
        wait_quiet(plane, operator, namespace)
        first_uid = plane.api.get(TEMPLATES, ENGINE, namespace)["metadata"]["uid"]

        change(plane, namespace, engine={"gpu": {"count": 2}, "parallelism": {"tensor": 2}})
        plane.wait(lambda: num_devices(plane, namespace) == [2, 2])
        wait_ready(plane, namespace)
        assert plane.api.get(TEMPLATES, ENGINE, namespace)["metadata"]["uid"] != first_uid

        no_claim = {"count": 1, "deviceClassName": None}
        change(plane, namespace, engine={"gpu": no_claim, "parallelism": {"tensor": 1}})
        plane.wait(lambda: num_devices(plane, namespace) == [])
        wait_ready(plane, namespace)
        assert plane.api.find(TEMPLATES, ENGINE, namespace) is None
        assert transfer(plane, namespace)["reason"] == "GPUNotShared"
        wait_quiet(plane, operator, namespace)


def test_unsatisfiable_claim_is_reported(plane, operator, namespace):
    engine = {"replicas": 1, "gpu": {"deviceClassName": "no-such-class"}}
    plane.api.create(CLUSTERS, example(engine=engine), namespace)
    # A Kubernetes with claims reports the class through its scheduler. An older one lacks the kind.
    has_claims = _has_claim_api(plane)
    reason, message = (
        ("Unschedulable", "no-such-class") if has_claims else ("Refused", "needs a newer Kubernetes")
    )
    plane.wait(lambda: condition(plane, namespace, "Degraded").get("reason") == reason)
    assert message in condition(plane, namespace, "Degraded")["message"]


def _has_claim_api(plane: Cluster) -> bool:
    groups = plane.api.request("GET", "/apis")["groups"]
    return any(v["groupVersion"] == "resource.k8s.io/v1" for group in groups for v in group["versions"])


def test_prober_reads_the_transfer_of_a_real_sidecar():
    async def read(sidecar: SidecarProcess) -> SidecarState:
        async def stats(_: str) -> Any:
            async with StatsClient(sidecar.http_port) as client:
                return await client.read("127.0.0.1", "uid")

        status = {"phase": "Running", "podIP": "127.0.0.1"}
        pod = {"metadata": {"name": "p", "uid": "u"}, "spec": {"initContainers": [{"name": "sidecar"}]}}
        survey = await SidecarProber(stats, time.monotonic).probe([pod | {"status": status}])
        return survey.sidecars[0]

    with SidecarProcess(transfer="CudaIPC") as sidecar:
        assert asyncio.run(read(sidecar)).transfer == ""
        with RawClient(sidecar) as engine:
            engine.attach()
            attached = asyncio.run(read(sidecar))
    assert (attached.is_attached, attached.transfer) == (True, "SharedMemory")
    assert attached.transfer_reason == "the engine copies: its KV is in host memory"
