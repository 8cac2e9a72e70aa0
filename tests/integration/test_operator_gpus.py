"""GPU claims on a real API server, scheduler and claim controller. The devices exist only as objects."""

from collections.abc import Iterator

import pytest

from testing.kube.api import Object
from testing.kube.cluster import Cluster
from tests.harness.kube import CLUSTERS, NAME, example, new_namespace, since
from tests.harness.operator.clusters import ENGINE, pods, wait_quiet, wait_ready
from tests.harness.operator.devices import DEVICE_CLASS, published

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
