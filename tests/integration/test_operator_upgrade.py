"""Upgrades of the operator: running clusters keep their images until their users choose new ones."""

import contextlib
import json
from collections.abc import Iterator

import pytest

from lmcache_operator.specs.names import STOCK_IMAGES
from testing.kube.api import APPLY, ApiError, Object, manifests
from testing.kube.cluster import CRDS, Cluster
from testing.kube.operator import CRDS as FILES
from tests.harness.kube import CLUSTERS, NAME, example
from tests.harness.operator.clusters import ENGINE, pods, wait_ready

pytestmark = pytest.mark.kube

RECORDED = "lmcache.io/default-images"
EARLIER = {"engine": "vllm/vllm-openai:v0.31.0", "sidecar": "ghcr.io/lmcache-cluster/sidecar:0.0.9"}


def images_of(pod: Object) -> list[str]:
    return [
        container["image"] for kind in ("containers", "initContainers") for container in pod["spec"][kind]
    ]


def test_clusters_follow_default_images_only_with_policy_follow(plane, operator, namespace):
    plane.api.create(CLUSTERS, example(), namespace)

    def runs(images: Object) -> bool:
        running = pods(plane, namespace).values()
        expected = [images["engine"], images["sidecar"], images["sidecar"]]
        ready = [c for pod in running for c in pod["status"].get("conditions", []) if c["type"] == "Ready"]
        is_ready = [c["status"] for c in ready] == ["True"] * 2
        return is_ready and all(images_of(pod) == expected for pod in running)

    plane.wait(lambda: runs(STOCK_IMAGES))
    # Pretend that an operator with other defaults created the cluster. This one keeps the recorded images.
    recorded = {"metadata": {"annotations": {RECORDED: json.dumps(EARLIER)}}}
    plane.api.patch("apps/v1/statefulsets", ENGINE, recorded, namespace)
    plane.wait(lambda: runs(EARLIER))
    live = plane.api.get("apps/v1/statefulsets", ENGINE, namespace)
    assert json.loads(live["metadata"]["annotations"][RECORDED]) == EARLIER

    def in_use() -> Object:
        status: Object = plane.api.get(CLUSTERS, NAME, namespace)["status"]["images"]
        return status

    images = in_use()
    assert f"engine {STOCK_IMAGES['engine']}, sidecar {STOCK_IMAGES['sidecar']}" in images.pop("message")
    assert images == EARLIER
    plane.api.patch(CLUSTERS, NAME, {"spec": {"images": {"policy": "Follow"}}}, namespace)
    plane.wait(lambda: runs(STOCK_IMAGES))
    plane.wait(lambda: in_use() == STOCK_IMAGES)
    before = pods(plane, namespace).keys()
    named = {"engine": {"image": STOCK_IMAGES["engine"]}, "sidecar": {"image": STOCK_IMAGES["sidecar"]}}
    for same_images in ({"images": {"policy": "Keep"}}, named):
        plane.api.patch(CLUSTERS, NAME, {"spec": same_images}, namespace)
        wait_ready(plane, namespace)
        assert pods(plane, namespace).keys() == before


@contextlib.contextmanager
def crd_without_images(plane: Cluster) -> Iterator[None]:
    """The LMCacheCluster definition without ``status.images``, as if it were older than the operator."""
    (file,) = (path for path in FILES if path.name.startswith("lmcacheclusters"))
    (older,) = manifests(file)
    for version in older["spec"]["versions"]:
        del version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["images"]
    plane.api.apply(CRDS, older)
    try:
        yield
    finally:
        plane.api.apply(CRDS, *manifests(file))


def is_images_refused(plane: Cluster, namespace: str) -> bool:
    """Whether the API server uses the older definition now."""
    path = plane.api.path(CLUSTERS, namespace, f"{NAME}/status")
    header = {"apiVersion": "lmcache.io/v1alpha1", "kind": "LMCacheCluster", "metadata": {"name": NAME}}
    body = {**header, "status": {"images": {"engine": "x"}}}
    try:
        plane.api.request("PATCH", f"{path}?fieldManager=test&force=true&dryRun=All", body, APPLY)
    except ApiError as error:
        return "status.images: field not declared in schema" in str(error)
    return False


def test_operator_with_an_older_crd_reports_all_fields_that_the_crd_has(plane, operator, namespace):
    plane.api.create(CLUSTERS, example(), namespace)
    wait_ready(plane, namespace)
    former = plane.api.get(CLUSTERS, NAME, namespace)["status"]
    with crd_without_images(plane):
        plane.wait(lambda: is_images_refused(plane, namespace))
        plane.api.patch(CLUSTERS, NAME, {"spec": {"engine": {"replicas": 3}}}, namespace)
        wait_ready(plane, namespace)
        status = plane.api.get(CLUSTERS, NAME, namespace)["status"]
        # The first heartbeat may come after ``former`` was read.
        assert status.keys() | {"lastHeartbeatTime"} == former.keys() - {"images"} | {"lastHeartbeatTime"}
        assert status["readyReplicas"] == 3
    plane.wait(lambda: not is_images_refused(plane, namespace))
