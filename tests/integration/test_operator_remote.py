"""Shards on a real API server: created, listed, drained and deleted while engines keep running."""

import base64
import contextlib
from collections.abc import Iterator

import pytest
import yaml

from testing.kube.api import Object
from testing.kube.cluster import Cluster
from tests.harness.clusters import wait_quiet, wait_ready
from tests.harness.kube import CLUSTERS, NAME, example

pytestmark = pytest.mark.kube

REMOTE = f"{NAME}-remote"
STATE = "lmcache.io/shards"


def declare(plane: Cluster, namespace: str, managed: Object | None) -> None:
    remote = managed and {"managed": managed}
    plane.api.patch(CLUSTERS, NAME, {"spec": {"tiers": {"remote": remote}}}, namespace)


def state(plane: Cluster, namespace: str) -> str:
    live: Object = plane.api.find("v1/configmaps", REMOTE, namespace) or {"metadata": {}}
    return str((live["metadata"].get("annotations") or {}).get(STATE, ""))


def uids(plane: Cluster, namespace: str, component: str) -> set[str]:
    labels = f"lmcache.io/cluster={NAME},lmcache.io/component={component}"
    return {pod["metadata"]["uid"] for pod in plane.api.objects("v1/pods", namespace, labels)}


def end_window(plane: Cluster, namespace: str) -> None:
    """End the window in which the previous shards are read, as if 15 minutes had passed."""
    before, _, _ = state(plane, namespace).partition(" until ")
    changed = {"metadata": {"annotations": {STATE: f"{before} until 2001-01-01T00:00:00Z"}}}
    plane.api.patch("v1/configmaps", REMOTE, changed, namespace)


def test_shards_are_added_removed_and_deleted_without_restarting_engines(plane, operator, namespace):
    resource = example()
    resource["spec"]["tiers"]["remote"] = {"managed": {"shards": 2, "memoryPerShard": "1Gi"}}
    plane.api.create(CLUSTERS, resource, namespace)
    wait_ready(plane, namespace)
    wait_quiet(plane, operator, namespace)
    secret = plane.api.get("v1/secrets", REMOTE, namespace)
    assert len(base64.b64decode(secret["data"]["password"])) >= 43
    engines, servers = uids(plane, namespace, "engine"), uids(plane, namespace, "remote")
    assert len(servers) == 2
    assert plane.api.get(CLUSTERS, NAME, namespace)["status"]["remote"] == {"shards": 2, "readyShards": 2}

    declare(plane, namespace, {"shards": 3, "memoryPerShard": "1Gi"})
    plane.wait(lambda: state(plane, namespace).startswith("3 from 2 until "))
    listed = yaml.safe_load(plane.api.get("v1/configmaps", REMOTE, namespace)["data"]["shards.yaml"])
    assert listed["current"][2] == f"{REMOTE}-2.{REMOTE}.{namespace}.svc:6379"
    assert listed["previous"] == listed["current"][:2]
    end_window(plane, namespace)
    plane.wait(lambda: state(plane, namespace) == "3")
    edited = {"data": {"shards.yaml": "current: [elsewhere:6379]"}}
    plane.api.patch("v1/configmaps", REMOTE, edited, namespace)
    plane.wait(lambda: plane.api.get("v1/configmaps", REMOTE, namespace)["data"] != edited["data"])
    assert state(plane, namespace) == "3"

    declare(plane, namespace, {"shards": 1, "memoryPerShard": "1Gi"})
    plane.wait(lambda: state(plane, namespace).startswith("1 from 3 until "))
    wait_quiet(plane, operator, namespace)
    assert len(uids(plane, namespace, "remote")) == 3, "sidecars still read the removed shards"
    end_window(plane, namespace)
    plane.wait(lambda: len(uids(plane, namespace, "remote")) == 1)
    assert uids(plane, namespace, "remote") < servers
    assert uids(plane, namespace, "engine") == engines

    declare(plane, namespace, None)
    for kind in ("apps/v1/statefulsets", "v1/configmaps"):
        plane.wait(lambda kind=kind: not plane.api.find(kind, REMOTE, namespace))
    assert plane.api.find("apps/v1/statefulsets", f"{NAME}-engine", namespace)


def test_certificate_of_a_tier_alone_is_requested_once_cert_manager_is_installed(plane, operator, namespace):
    tier = {"memoryPerShard": "1Gi", "tls": {"issuerRef": {"name": "caches"}}}
    plane.api.create(CLUSTERS, example() | {"spec": {"tiers": {"remote": {"managed": tier}}}}, namespace)

    def refusal() -> str:
        conditions = plane.api.get(CLUSTERS, NAME, namespace).get("status", {}).get("conditions", ())
        return "".join(
            c["message"] for c in conditions if c["type"] == "Degraded" and c["reason"] == "Refused"
        )

    plane.wait(lambda: "it needs cert-manager" in refusal())
    assert plane.api.find("apps/v1/statefulsets", REMOTE, namespace), "its pods wait for the Secret"
    assert not plane.api.find("apps/v1/statefulsets", f"{NAME}-engine", namespace)
    with cert_manager(plane):
        certificate = plane.wait(lambda: plane.api.find("cert-manager.io/v1/certificates", REMOTE, namespace))
        assert certificate["spec"]["dnsNames"] == [f"*.{REMOTE}.{namespace}.svc"]
        wait_ready(plane, namespace)
        wait_quiet(plane, operator, namespace)
        declare(plane, namespace, tier | {"tls": None})
        plane.wait(lambda: not plane.api.find("cert-manager.io/v1/certificates", REMOTE, namespace))


@contextlib.contextmanager
def cert_manager(plane: Cluster) -> Iterator[None]:
    """The definition of cert-manager's Certificates, without its fields."""
    group, definitions = "cert-manager.io", "apiextensions.k8s.io/v1/customresourcedefinitions"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"plural": "certificates", "singular": "certificate", "kind": "Certificate"}
    spec = {"group": group, "scope": "Namespaced", "names": names, "versions": [version]}
    header = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    definition = header | {"metadata": {"name": f"certificates.{group}"}, "spec": spec}
    plane.api.create(definitions, definition)
    try:
        yield
    finally:
        plane.api.delete(definitions, f"certificates.{group}")
        plane.wait(lambda: not plane.api.find(definitions, f"certificates.{group}"))
