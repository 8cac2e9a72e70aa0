"""What is told of a managed remote tier, and the Secret that is made for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest
from lmcache_operator.components.base import (
    Context,
    LookupFigures,
    Probed,
    RemoteFigures,
    Sidecar,
)
from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.components.remote.remote import Remote
from lmcache_operator.errors import RefusedError
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.reconcile.reconciler import Reconciler
from lmcache_operator.specs.kinds import ClusterKey, Ref
from lmcache_operator.specs.names import STOCK_IMAGES, annotations_of

from tests.harness.operator_model import NAME, NAMESPACE, UID, World, cluster
from tests.harness.operator_shards import LIST, SECRET, SET, Rig, managed


def told(rig: Rig, *sidecars: Sidecar, component: Any = None) -> dict[str, Any]:
    """What the status says with these sidecars, and goes on to say."""
    own = component or Remote()
    observed = replace(rig.observed(own), probed=Probed(sidecars, is_certain=True))
    fields = dict(own.status(observed, rig.plans[own.name]).fields)
    rig.world.resource["status"] = (rig.world.resource.get("status") or {}) | fields
    return fields


def usage(rig: Rig, *counts: tuple[int, int]) -> dict[str, Any]:
    sidecars = [Sidecar(remote=RemoteFigures(used, evicted)) for used, evicted in counts]
    found = told(rig, *sidecars).get("remote", {})
    return {name: found[name] for name in ("usedBytes", "evicted") if name in found}


def test_how_full_servers_are_is_told_when_it_is_news():
    rig = Rig()
    rig.settle()
    assert usage(rig) == {}
    assert usage(rig, (0, 0)) == {}
    assert usage(rig, (1000, 10), (900, 20)) == {"usedBytes": 1000, "evicted": 20}
    assert usage(rig, (1040, 20)) == {"usedBytes": 1000, "evicted": 20}
    assert usage(rig, (1060, 20)) == {"usedBytes": 1060, "evicted": 20}
    assert rig.status()["remote"]["usedBytes"] == 1060, "while none is asked"
    assert usage(rig, (0, 0)) == {"usedBytes": 1060, "evicted": 20}, "they do not say"


@pytest.mark.parametrize("remote", [{"clusterRef": {"name": "kv"}}, {"external": {"url": "redis://h"}}, None])
def test_who_uses_servers_of_others_tells_how_full_they_are(remote):
    rig = Rig()
    rig.world = World(cluster(tiers={"remote": remote}))
    rig.settle()
    assert usage(rig, (1000, 10)) == ({"usedBytes": 1000, "evicted": 10} if remote else {})


def user(name: str, remote: dict[str, Any], status: dict[str, Any] | None) -> dict[str, Any]:
    found = cluster(tiers={"remote": remote})
    metadata = found["metadata"] | {"name": name, "uid": name}
    return found | {"metadata": metadata} | ({} if status is None else {"status": status})


def test_a_tier_without_engines_tells_what_its_users_told():
    def told_with(world: World) -> Any:
        reconcile(world)
        own = world.resource["status"]["remote"]
        return own.get("usedBytes"), own.get("evicted")

    world = World(cluster({"tiers": managed()}))
    reference = {"clusterRef": {"name": NAME}}
    assert told_with(world) == (None, None)
    for name, remote, status in (
        ("new", reference, None),
        ("silent", reference, {"remote": {}}),
        ("small", reference, {"readyReplicas": 1, "remote": {"usedBytes": 1000, "evicted": 20}}),
        ("large", reference, {"readyReplicas": 2, "remote": {"usedBytes": 1040, "evicted": 7}}),
        ("asleep", reference, {"readyReplicas": 0, "remote": {"usedBytes": 5000, "evicted": 70}}),
        ("others", {"clusterRef": {"name": "another"}}, {"readyReplicas": 1, "remote": {"usedBytes": 2**40}}),
        ("own", {"external": {"url": "redis://h"}}, {"remote": {"usedBytes": 2**40}}),
    ):
        world.objects[Ref("LMCacheCluster", name)] = user(name, remote, status)
    assert told_with(world) == (1040, 20)
    assert reconcile(world) == []
    engines = World(cluster(tiers=managed()))
    engines.objects |= {ref: own for ref, own in world.objects.items() if ref.kind == "LMCacheCluster"}
    assert told_with(engines) == (None, None), "its own sidecars are asked"


def test_hits_are_told_by_tier():
    def hits(*counts: LookupFigures, **more: Any) -> Any:
        sidecars = [Sidecar(lookups=own, **more) for own in counts]
        return told(rig, *sidecars, component=Engine()).get("hitPercent")

    rig = Rig()
    rig.settle()
    assert hits() is None
    assert hits(LookupFigures()) is None
    assert hits(LookupFigures(1000, 100, 300), LookupFigures(1000, 0, 100)) == {"engine": 5, "memory": 20}
    assert hits(LookupFigures(1000, 50, 209)) == {"engine": 5, "memory": 20}, "no news"
    tiers = {"is_remote_reachable": False, "is_disk_available": True}
    assert hits(LookupFigures(1000, 50, 300, 7, 150), **tiers) == {
        "engine": 5, "memory": 30, "disk": 0, "remote": 15
    }  # fmt: skip
    assert hits(LookupFigures(1, 2**60))["engine"] == 100
    assert rig.status()["hitPercent"]["engine"] == 100, "while none is asked"


# -- with the reconciler


def reconcile(world: World) -> list[str]:
    world.writes.clear()
    reconciler = Reconciler(cast(KubeApi, world), Context(STOCK_IMAGES), world.ask)
    asyncio.run(reconciler.reconcile(ClusterKey(NAMESPACE, NAME, UID)))
    world.run_stateful_sets()
    return [write for write in world.writes if write != "status"]


def test_the_password_is_random_and_made_once():
    passwords = []
    for _ in range(2):
        world = World(cluster(tiers=managed()))
        reconcile(world)
        secret = world.objects.pop(SECRET)
        passwords.append(secret["stringData"]["password"])
        assert secret["metadata"]["ownerReferences"][0]["uid"] == UID
        assert reconcile(world) == [], "servers that are ready have a Secret"
        world.set_ready("demo-remote-0", False)
        assert reconcile(world) == [f"create {SECRET}"]
        assert reconcile(world) == []
    assert len(set(passwords)) == 2
    assert min(map(len, passwords)) >= 43


def test_a_secret_that_may_not_be_made_is_told_and_hinders_nothing_else():
    world = World(cluster(tiers=managed()))
    world.failures["create Secret"] = RefusedError("create", "secrets is forbidden")
    assert f"apply {SET}" in reconcile(world)
    (degraded,) = [c for c in world.resource["status"]["conditions"] if c["type"] == "Degraded"]
    assert (degraded["reason"], degraded["message"]) == ("Refused", f"making {SECRET}: secrets is forbidden")
    reconcile(world)
    (ready,) = [c for c in world.resource["status"]["conditions"] if c["type"] == "Ready"]
    assert ready["status"] == "True", "its user may have made it"


def other(**remote: Any) -> dict[str, Any]:
    return user("kv", remote, None)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (None, "there is no LMCacheCluster kv"),
        (other(external={"url": "redis://h"}), "LMCacheCluster kv has no tiers.remote.managed"),
        (other(managed={"access": "Cluster"}), "LMCacheCluster kv keeps it for its own pods"),
        (other(managed={"access": "Namespace"}), ""),
        (other(managed={"tls": {"secretRef": {"name": "x"}}}), "others look for kv-remote-tls"),
        (other(managed={"tls": {"secretRef": {"name": "kv-remote-tls"}}}), ""),
    ],
)
def test_who_refers_to_a_tier_that_is_not_for_it_is_told(found, why):
    world = World(cluster(tiers={"remote": {"clusterRef": {"name": "kv"}}}))
    if found is not None:
        world.objects[Ref("LMCacheCluster", "kv")] = found
    reconcile(world)
    reconcile(world)
    conditions = {c["type"]: c for c in world.resource["status"]["conditions"]}
    assert conditions["Ready"]["status"] == "True"
    assert (conditions["Degraded"]["reason"] == "RemoteTierNotShared") == bool(why)
    assert why in conditions["Degraded"]["message"]


@pytest.mark.parametrize("name", ["../../secrets/x", 7, None, "a/b"])
def test_only_a_name_is_asked_for(name):
    assert Remote().referred({"spec": {"tiers": {"remote": {"clusterRef": {"name": name}}}}}) == ""
    assert Remote().referred({"spec": name}) == ""


def annotated(world: World) -> str:
    return annotations_of(world.objects[LIST])["lmcache.io/shards"]


def test_the_list_is_told_in_numbers_too():
    world = World(cluster(tiers=managed(3)))
    reconcile(world)
    assert annotated(world) == "3"
    assert reconcile(world) == []
    world.change(tiers=managed(2))
    assert reconcile(world) == [f"apply {LIST}"]
    assert annotated(world).startswith("2 from 3 until 20")
