"""Certificates of shards on an API server that gets cert-manager later."""

import contextlib
from collections.abc import Iterator

import pytest

from testing.kube.api import Object
from testing.kube.cluster import Cluster
from tests.harness.kube import CLUSTERS, NAME, example
from tests.harness.operator.clusters import wait_quiet, wait_ready

pytestmark = pytest.mark.kube

REMOTE = f"{NAME}-remote"


def declare(plane: Cluster, namespace: str, managed: Object | None) -> None:
    remote = managed and {"managed": managed}
    plane.api.patch(CLUSTERS, NAME, {"spec": {"tiers": {"remote": remote}}}, namespace)


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
