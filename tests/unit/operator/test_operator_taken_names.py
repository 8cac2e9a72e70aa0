"""Objects of other owners at names that the operator needs: no pods of the operator use them."""

from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_operator.components.registry import COMPONENTS
from lmcache_operator.specs.kinds import Ref
from lmcache_operator.specs.names import COMPONENT_LABEL, ENGINE, PEERS, REMOTE
from tests.harness.operator.components import ReconciledCluster
from tests.harness.operator.model import NAME, secret_of

TLS = {"tls": {"issuerRef": {"name": "caches"}}}
FULL: dict[str, Any] = {
    "engine": {"gpu": {"deviceClassName": "gpu.nvidia.com"}, "prefill": {}},
    "router": {},
    "tiers": {"peers": TLS, "remote": {"managed": {"memoryPerShard": "1Gi", **TLS}}},
}
OWNERS_OF_PODS = ("StatefulSet", "Deployment", "LMCacheProfile", "LMCacheCluster")
COMPONENT_OF = {ref: each.name for each in COMPONENTS for ref in each.refs(NAME)}
ALL = [ref for ref in COMPONENT_OF if ref != Ref("ConfigMap", "demo-autoscaling")]
"""Every object that the operator writes for `FULL`. The autoscaler has nothing to save yet."""
UNUSED = [
    ref for ref in ALL if ref.kind in ("Certificate", "PodDisruptionBudget") or ref == Ref("Service", NAME)
]
"""Objects that no pod uses."""


def foreign(ref: Ref) -> dict[str, Any]:
    """An object of another owner. It has the operator's labels, as any user can set them."""
    labels = {"lmcache.io/cluster": NAME, "app.kubernetes.io/managed-by": "lmcache-operator"}
    metadata = {"name": ref.name, "uid": "1", "generation": 1, "labels": labels}
    return {"metadata": metadata, "spec": {"replicas": 0}}


def used(value: Any) -> Iterator[Ref]:
    """References in a pod template or in a profile."""
    if isinstance(value, list):
        for item in value:
            yield from used(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            kind = {
                "configMap": "ConfigMap", "serviceAccountName": "ServiceAccount", "serviceName": "Service",
                "resourceClaimTemplateName": "ResourceClaimTemplate",
            }.get(key)  # fmt: skip
            if kind:
                yield Ref(kind, item["name"] if isinstance(item, dict) else item)
            yield from used(item)


def owners_of_pods(bench: ReconciledCluster) -> dict[Ref, dict[str, Any]]:
    return {ref: each for ref, each in bench.world.objects.items() if ref.kind in OWNERS_OF_PODS}


def test_walk_finds_the_references_of_pods() -> None:
    bench = ReconciledCluster.settled(**FULL)
    assert bench.world.objects.keys() >= {*ALL}
    references = {ref for each in owners_of_pods(bench).values() for ref in used(each)}
    kinds = ("ConfigMap", "ServiceAccount", "ResourceClaimTemplate")
    expected = {ref for ref in ALL if ref.kind in kinds}
    assert expected <= references <= expected | {Ref("Service", "demo-engine"), Ref("Service", "demo-remote")}


@pytest.mark.parametrize("ref", ALL, ids=str)
def test_no_pods_are_created_that_would_use_an_object_of_another_owner(ref: Ref) -> None:
    bench = ReconciledCluster(**FULL)
    bench.world.objects[ref] = taken = foreign(ref)
    bench.settle()
    assert bench.world.objects[ref] is taken
    assert bench.condition("Degraded") == ("True", "NameTaken")
    assert str(ref) in bench.message("Degraded")
    made = {other: each for other, each in owners_of_pods(bench).items() if other != ref}
    assert [other for other, each in made.items() if ref in used(each)] == []
    labels = [each["metadata"]["labels"][COMPONENT_LABEL] for each in made.values()]
    component = COMPONENT_OF[ref]
    assert ((ENGINE if component == PEERS else component) in labels) == (ref in UNUSED)
    tiers = {PEERS: PEERS, ENGINE: PEERS, REMOTE: REMOTE}
    if ref not in UNUSED and (tier := tiers.get(component)):
        assert secret_of(tier) not in bench.world.objects, "sidecars of other clusters would connect"

    del bench.world.objects[ref]
    bench.settle()
    assert owners_of_pods(bench).keys() == {each for each in ALL if each.kind in OWNERS_OF_PODS}
    assert bench.conditions()["Degraded"] == "False"


@pytest.mark.parametrize("ref", [ref for ref in ALL if ref not in UNUSED], ids=str)
def test_no_pods_are_changed_that_would_use_an_object_of_another_owner(ref: Ref) -> None:
    bench = ReconciledCluster.settled(**FULL)
    before = {other: each for other, each in owners_of_pods(bench).items() if other != ref}
    bench.world.objects[ref] = foreign(ref)
    bench.world.change(engine={"args": ["--a=1"]}, tiers={"remote": {"managed": {"memoryPerShard": "2Gi"}}},
                       router={"replicas": 5})  # fmt: skip
    written = bench.settle()
    component = COMPONENT_OF[ref]
    for other, each in before.items():
        if ref in used(each) or component == each["metadata"]["labels"][COMPONENT_LABEL]:
            assert f"apply {other}" not in written
    evicted = [write for write in written if write.startswith(("evict", "delete"))]
    assert [write for write in evicted if f"{NAME}-{component}" in write] == []


def test_name_that_the_spec_does_not_need_may_be_taken() -> None:
    bench = ReconciledCluster()
    for ref in COMPONENT_OF:
        if ref.name in ("demo-remote", "demo-router", "demo-peers", "demo-prefill"):
            bench.world.objects[ref] = foreign(ref)
    bench.settle()
    assert bench.condition("Ready") == ("True", "Ready")


def test_component_without_a_part_in_the_spec_is_deleted_although_a_name_is_taken() -> None:
    """Prefill pods that the user no longer wants would otherwise hold their GPUs."""
    bench = ReconciledCluster.settled(**FULL)
    ref = Ref("ConfigMap", "demo-remote")
    bench.world.objects[ref] = foreign(ref)
    bench.change(engine={"prefill": None, "gpu": None})
    assert Ref("LMCacheCluster", "demo-prefill") not in bench.world.objects
    assert Ref("ResourceClaimTemplate", "demo-engine") in bench.world.objects, "the engines stay unchanged"
