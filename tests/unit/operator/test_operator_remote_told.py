"""What is told of a managed remote tier, and the Secret that is made for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest
from lmcache_operator.components.base import (
    Context,
    Probed,
    RemoteFigures,
    Sidecar,
)
from lmcache_operator.components.remote.remote import Remote
from lmcache_operator.errors import RefusedError
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.reconcile.reconciler import Reconciler
from lmcache_operator.specs.kinds import ClusterKey, Ref
from lmcache_operator.specs.names import STOCK_IMAGES, annotations_of

from tests.harness.operator_model import NAME, NAMESPACE, UID, World, cluster
from tests.harness.operator_shards import LIST, SECRET, SET, Rig, managed


def figures(rig: Rig, *counts: RemoteFigures) -> dict[str, Any]:
    """What is told of them, and remembered."""
    sidecars = tuple(Sidecar(remote=own) for own in counts)
    observed = replace(rig.observed(Remote()), probed=Probed(sidecars, is_certain=True))
    told = dict(Remote().status(observed, rig.plans["remote"]).fields["remote"])
    rig.world.resource["status"] = {"remote": told}
    return {name: value for name, value in told.items() if name not in ("shards", "readyShards")}


def test_what_sidecars_count_is_told_when_it_is_news():
    rig = Rig()
    rig.settle()
    assert figures(rig) == {}
    assert figures(rig, RemoteFigures(hits=0, misses=7)) == {}
    first = RemoteFigures(1000, 10, 30, 10), RemoteFigures(900, 20, 0, 20)
    assert figures(rig, *first) == {"usedBytes": 1000, "evicted": 20, "hitPercent": 50}
    assert figures(rig, RemoteFigures(1050, 21, 51, 49)) == {
        "usedBytes": 1000,
        "evicted": 20,
        "hitPercent": 50,
    }
    assert figures(rig, RemoteFigures(1060, 22, 6, 4)) == {"usedBytes": 1060, "evicted": 22, "hitPercent": 60}
    assert rig.status()["remote"]["usedBytes"] == 1060, "while none is asked"
    restarted = figures(rig, RemoteFigures(0, 0, 0, 0))
    assert restarted == {"usedBytes": 1060, "evicted": 0, "hitPercent": 60}


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
    found = cluster(tiers={"remote": remote})
    return found | {"metadata": found["metadata"] | {"name": "kv", "uid": "other"}}


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (None, "there is no LMCacheCluster kv"),
        (other(external={"url": "redis://h"}), "LMCacheCluster kv has no tiers.remote.managed"),
        (other(managed={"access": "Cluster"}), "LMCacheCluster kv keeps it for its own pods"),
        (other(managed={"access": "Namespace"}), ""),
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
