"""Encrypted rows on a real API server: the sidecars mount the Secret, which the operator never touches."""

import pytest

from testing.kube.api import Object
from testing.kube.cluster import Cluster
from tests.harness.clusters import ENGINE, pods, wait_quiet, wait_ready, written
from tests.harness.kube import CLUSTERS, NAME, example

pytestmark = pytest.mark.kube

SECRET = {"metadata": {"name": "kv-keys"}, "stringData": {"1": "0a" * 32}}


def key_secrets(plane: Cluster, namespace: str) -> dict[str, list[str]]:
    """Containers that mount each Secret of the engine pods, as the API server stores the StatefulSet."""
    spec = plane.api.get("apps/v1/statefulsets", ENGINE, namespace)["spec"]["template"]["spec"]
    sources = {v["name"]: v["secret"] for v in spec["volumes"] if "secret" in v}
    assert all(source["optional"] is True for source in sources.values())
    users: dict[str, list[str]] = {source["secretName"]: [] for source in sources.values()}
    for container in spec["initContainers"] + spec["containers"]:
        for mount in container["volumeMounts"]:
            if mount["name"] in sources:
                users[sources[mount["name"]]["secretName"]].append(container["name"])
    return users


def encryption(name: str) -> Object:
    return {"encryption": {"secretRef": {"name": name}}}


def test_secret_is_mounted_by_sidecars_and_only_its_name_replaces_pods(plane, operator, namespace):
    """The operator has no right to read Secrets. Its fixture checks that no request was refused."""
    resource = example()
    remote = {"external": {"url": "redis://kv:6379"}} | encryption("kv-keys")
    resource["spec"]["tiers"] |= {"remote": remote}
    plane.api.create("v1/secrets", SECRET, namespace)
    plane.api.create(CLUSTERS, resource, namespace)
    wait_ready(plane, namespace)
    wait_quiet(plane, operator, namespace)
    assert key_secrets(plane, namespace) == {"kv-keys": ["sidecar"]}

    before, mark = pods(plane, namespace).keys(), plane.mark()
    plane.api.patch("v1/secrets", "kv-keys", {"stringData": {"2": "0b" * 32}}, namespace)
    plane.api.delete("v1/secrets", "kv-keys", namespace)
    wait_quiet(plane, operator, namespace)
    assert pods(plane, namespace).keys() == before
    assert written(plane, operator, mark, namespace) == []

    other = {"spec": {"tiers": {"remote": encryption("other")}}}
    plane.api.patch(CLUSTERS, NAME, other, namespace)
    plane.wait(lambda: len(now := pods(plane, namespace).keys()) == 2 and not now & before)
    assert key_secrets(plane, namespace) == {"other": ["sidecar"]}
