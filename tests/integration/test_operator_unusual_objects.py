"""Unusual objects on a real API server: valid ones settle, broken ones do not affect others."""

import asyncio
import contextlib
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from lmcache_operator.components.peers.peers import Peers
from lmcache_operator.contract.base import Observed
from lmcache_operator.kube.client import connect
from lmcache_operator.reconcile.observe import observe
from testing.kube.api import ApiError, Object
from testing.kube.cluster import CRDS, Cluster
from tests.harness.kube import CLUSTERS, example
from tests.harness.operator.clusters import condition

pytestmark = pytest.mark.kube

CRD = "lmcacheclusters.lmcache.io"


def odd_cluster(name: str, template: object) -> Object:
    resource = example()
    resource["metadata"]["name"] = name
    resource["spec"]["engine"] |= {"replicas": 0, "podTemplate": template}
    return resource


@contextlib.contextmanager
def loose_definition(plane: Cluster) -> Iterator[None]:
    """Replace the definition's schema by one that accepts everything, as an earlier version might."""
    schema = "/spec/versions/0/schema/openAPIV3Schema"
    present = plane.api.get(CRDS, CRD)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

    def put(value: Object) -> None:
        operations = [{"op": "replace", "path": schema, "value": value}]
        path = plane.api.path(CRDS, None, CRD)
        plane.api.request("PATCH", path, operations, "application/json-patch+json")

    put({"type": "object", "x-kubernetes-preserve-unknown-fields": True})
    try:
        yield
    finally:
        put(present)


def broken() -> dict[str, Object]:
    """Objects that violate the definition or are very large, by name."""
    deep: object = {}
    for _ in range(400):
        deep = {"spec": deep}
    env = [{"name": f"V{number}", "value": "x" * 100} for number in range(5000)]
    large = {"metadata": {"annotations": {"large": "x" * 200_000}}}
    specs: dict[str, object] = {
        "text": "text", "list": [1], "nothing": None, "types": {"model": 1, "tiers": []},
        "replicas": {**example()["spec"], "engine": {"replicas": "many"}},
    }  # fmt: skip
    objects = {name: example() | {"spec": spec} for name, spec in specs.items()}
    objects |= {"deep": odd_cluster("deep", deep), "large": odd_cluster("large", large)}
    objects["env"] = odd_cluster("env", {"spec": {"containers": [{"name": "engine", "env": env}]}})
    objects["conditions"] = example() | {"status": {"conditions": [{"type": "Ready"}], "images": {}}}
    for name, resource in objects.items():
        resource["metadata"] = {"name": f"broken-{name}"}
    return objects


def test_broken_objects_do_not_block_other_clusters(plane, operator, namespace):
    objects = broken()

    def refusal(resource: Object) -> str:
        try:
            plane.api.create(CLUSTERS, resource, namespace)
        except ApiError as error:
            if error.code not in (400, 422):
                raise
            return str(error)
        return ""

    with loose_definition(plane):
        # Wait until the API server has read the loose definition. Objects that it still refuses are harmless.
        first = objects.pop("types")
        plane.wait(lambda: not refusal(first))
        refused = {name: why for name, resource in objects.items() if (why := refusal(resource))}
        assert not refused.keys() & {"deep", "env", "large"}, refused
        found_reasons = plane.wait(lambda: reasons(plane, namespace, len(objects) + 1 - len(refused)))
    assert found_reasons["broken-types"] == found_reasons["broken-deep"] == "InvalidSpec", found_reasons
    assert found_reasons["broken-large"] == found_reasons["broken-env"] == "AsDeclared", found_reasons
    plane.api.create(CLUSTERS, example(), namespace)
    plane.wait(lambda: condition(plane, namespace, "Ready").get("reason") == "Ready")


def reasons(plane: Cluster, namespace: str, number: int) -> dict[str, str]:
    """The reason of each cluster's Degraded condition. Empty until ``number`` clusters have one."""
    degraded_reasons = {}
    for resource in plane.api.objects(CLUSTERS, namespace):
        conditions = (resource.get("status") or {}).get("conditions") or []
        if degraded := [c for c in conditions if c["type"] == "Degraded"]:
            degraded_reasons[resource["metadata"]["name"]] = degraded[0]["reason"]
    return degraded_reasons if len(degraded_reasons) == number else {}


def test_large_valid_objects_are_not_in_memory_together(plane, no_operator, namespace, monkeypatch):
    """Each reconciliation of a cluster with peers lists all clusters of the namespace.

    The largest objects have more than a megabyte. Without a quota, a user can create any number of them.
    """
    large = "x" * 1_200_000 + "\U0001f999"  # takes four bytes for each character in this process
    tiers: Object = {"memory": {"size": "64Mi"}, "peers": {}}
    for number in range(10):
        engine = {"replicas": 0, "env": [{"name": "LARGE", "value": large}]}
        resource = example(engine=engine, tiers=tiers) | {"metadata": {"name": f"large-{number}"}}
        plane.api.create(CLUSTERS, resource, namespace)
        tiers["peers"] = {"clusterRef": {"name": "large-0"}}
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig()))
    listed = plane.api.get(CLUSTERS, "large-0", namespace)

    async def observe_at_once() -> list[Observed]:
        async with connect() as api:
            runs = (observe(api, Peers(), listed, {}, frozenset(), datetime.now(UTC)) for _ in range(6))
            return await asyncio.gather(*runs)

    tracemalloc.start()
    try:
        parts = asyncio.run(observe_at_once())
        largest = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [len(part.users) for part in parts] == [9] * 6
    assert largest < 64 << 20
