"""Status of the remote tier, and the Secret of a managed remote tier."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import pytest

from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.components.engine.features.base import TierReport
from lmcache_operator.components.remote.remote import Remote, why_filling, why_never_ready
from lmcache_operator.components.remote.shards import WINDOW
from lmcache_operator.contract.base import Context, LookupFigures, Probed, SidecarState
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.reconcile.reconciler import Reconciler
from lmcache_operator.specs.kinds import ClusterKey, Ref
from lmcache_operator.specs.names import STOCK_IMAGES
from tests.harness.operator.model import NAME, NAMESPACE, UID, World, cluster
from tests.harness.operator.shards import SECRET, SET, Rig, managed, ready_at


def status_fields(rig: Rig, *sidecars: SidecarState, component: Any = None) -> dict[str, Any]:
    """Status fields with these sidecars. They become part of the cluster's status."""
    component = component or Remote()
    observed = replace(rig.observed(component), probed=Probed(sidecars, is_certain=True))
    fields = dict(component.status(observed, rig.plans[component.name]).fields)
    rig.world.resource["status"] = (rig.world.resource.get("status") or {}) | fields
    return fields


def usage(rig: Rig, *counts: tuple[int, int]) -> dict[str, Any]:
    sidecars = [
        SidecarState(features={"remote": TierReport(used_bytes=used, evicted=evicted)})
        for used, evicted in counts
    ]
    remote = status_fields(rig, *sidecars).get("remote", {})
    return {name: remote[name] for name in ("usedBytes", "evicted") if name in remote}


def test_usage_is_reported_when_it_changes_by_5_percent():
    rig = Rig.settled()
    assert (usage(rig), usage(rig, (0, 0))) == ({}, {})
    assert usage(rig, (1000, 10), (900, 20)) == {"usedBytes": 1000, "evicted": 20}
    assert usage(rig, (1040, 20)) == {"usedBytes": 1000, "evicted": 20}
    assert usage(rig, (1060, 20)) == {"usedBytes": 1060, "evicted": 20}
    assert rig.status()["remote"]["usedBytes"] == 1060, "while no sidecar is polled"
    assert usage(rig, (0, 0)) == {"usedBytes": 1060, "evicted": 20}, "sidecars report no usage"


@pytest.mark.parametrize("remote", [{"clusterRef": {"name": "kv"}}, {"external": {"url": "redis://h"}}, None])
def test_usage_of_unmanaged_servers_is_reported(remote):
    rig = Rig()
    rig.world = World(cluster(tiers={"remote": remote}))
    rig.settle()
    assert usage(rig, (1000, 10)) == ({"usedBytes": 1000, "evicted": 10} if remote else {})


def referring_cluster(name: str, remote: dict[str, Any], status: dict[str, Any] | None) -> dict[str, Any]:
    resource = cluster(tiers={"remote": remote})
    metadata = resource["metadata"] | {"name": name, "uid": name}
    return resource | {"metadata": metadata} | ({} if status is None else {"status": status})


def test_tier_without_engines_reports_usage_of_referring_clusters():
    def reported_usage(world: World) -> Any:
        reconcile(world)
        remote = world.resource["status"]["remote"]
        return remote.get("usedBytes"), remote.get("evicted")

    world = World(cluster({"tiers": managed()}))
    reference = {"clusterRef": {"name": NAME}}
    assert reported_usage(world) == (None, None)
    for name, remote, status in (
        ("new", reference, None),
        ("silent", reference, {"remote": {}}),
        ("small", reference, {"readyReplicas": 1, "remote": {"usedBytes": 1000, "evicted": 20}}),
        ("large", reference, {"readyReplicas": 2, "remote": {"usedBytes": 1040, "evicted": 7}}),
        ("asleep", reference, {"readyReplicas": 0, "remote": {"usedBytes": 5000, "evicted": 70}}),
        ("others", {"clusterRef": {"name": "another"}}, {"readyReplicas": 1, "remote": {"usedBytes": 2**40}}),
        ("own", {"external": {"url": "redis://h"}}, {"remote": {"usedBytes": 2**40}}),
    ):
        world.objects[Ref("LMCacheCluster", name)] = referring_cluster(name, remote, status)
    assert (reported_usage(world), reconcile(world)) == ((1040, 20), [])
    engines = World(cluster(tiers=managed()))
    engines.objects |= {ref: each for ref, each in world.objects.items() if ref.kind == "LMCacheCluster"}
    assert reported_usage(engines) == (None, None), "the tier's own sidecars are polled"


def test_hit_percentages_are_reported_by_tier():
    def hits(*counts: LookupFigures, **features: Any) -> Any:
        sidecars = [SidecarState(lookups=counters, features=features) for counters in counts]
        return status_fields(rig, *sidecars, component=Engine()).get("hitPercent")

    rig = Rig.settled()
    assert hits() is None
    assert hits(LookupFigures()) is None
    former = LookupFigures(1000, {"engine": 100, "memory": 300}), LookupFigures(1000, {"memory": 100})
    assert hits(*former) == {"engine": 5, "memory": 20}
    small_change = LookupFigures(1000, {"engine": 50, "memory": 209})
    assert hits(small_change) == {"engine": 5, "memory": 20}, "a small change is not reported"
    tiers = {"remote": TierReport(False), "disk": TierReport(True), "peers": True}
    tokens = {"engine": 50, "memory": 300, "disk": 7, "peers": 120, "remote": 150}
    assert hits(LookupFigures(1000, tokens), **tiers) == {
        "engine": 5, "memory": 30, "disk": 0, "peers": 12, "remote": 15
    }  # fmt: skip
    assert hits(LookupFigures(1, {"engine": 2**60}))["engine"] == 100
    assert rig.status()["hitPercent"]["engine"] == 100, "while no sidecar is polled"


# -- reconciliations


def reconcile(world: World) -> list[str]:
    world.writes.clear()
    reconciler = Reconciler(cast(KubeApi, world), Context(STOCK_IMAGES), world.ask)
    asyncio.run(reconciler.reconcile(ClusterKey(NAMESPACE, NAME, UID)))
    world.run_stateful_sets()
    return [write for write in world.writes if write != "status"]


def test_password_is_random_and_created_once():
    passwords = []
    for _ in range(2):
        world = World(cluster(tiers=managed()))
        reconcile(world)
        secret = world.objects.pop(SECRET)
        passwords.append(secret["stringData"]["password"])
        assert secret["metadata"]["ownerReferences"][0]["uid"] == UID
        assert reconcile(world) == [], "ready servers have a Secret"
        world.set_ready("demo-remote-0", False)
        assert (reconcile(world), reconcile(world)) == ([f"create {SECRET}"], [])
    assert len(set(passwords)) == 2
    assert min(map(len, passwords)) >= 43


def referred_cluster(**remote: Any) -> dict[str, Any]:
    return referring_cluster("kv", remote, None)


@pytest.mark.parametrize(
    ("referred", "why"),
    [
        (None, "there is no LMCacheCluster kv"),
        (referred_cluster(external={"url": "redis://h"}), "LMCacheCluster kv has no tiers.remote.managed"),
        (referred_cluster(managed={"access": "Cluster"}), "kv shares it only with its own pods"),
        (referred_cluster(managed={"access": "Namespace"}), ""),
        (referred_cluster(managed={"tls": {"secretRef": {"name": "x"}}}), ""),
    ],
)
def test_reference_to_an_unshared_tier_degrades_the_cluster(referred, why):
    world = World(cluster(tiers={"remote": {"clusterRef": {"name": "kv"}}}))
    if referred is not None:
        world.objects[Ref("LMCacheCluster", "kv")] = referred
    reconcile(world)
    reconcile(world)
    conditions = {c["type"]: c for c in world.resource["status"]["conditions"]}
    degraded = conditions["Degraded"]
    assert conditions["Ready"]["status"] == "True"
    assert (degraded["reason"] == "RemoteTierNotShared", why in degraded["message"]) == (bool(why), True)


@pytest.mark.parametrize("name", ["../../secrets/x", 7, None, "a/b"])
def test_reference_that_is_no_name_is_ignored(name):
    assert Remote().referred({"spec": {"tiers": {"remote": {"clusterRef": {"name": name}}}}}) == ""
    assert Remote().referred({"spec": name}) == ""


# -- reasons to delay decisions about the number of shards


def test_hits_are_not_judged_while_shards_fill():
    def why() -> str:
        return why_filling(rig.observed(Remote()))

    rig = Rig(shards=2)
    assert why() == "there are no shards yet"
    rig.settle()
    assert why() == ""
    ready_at(rig, "demo-remote-1", rig.now)
    assert "new" in why()
    rig.now += WINDOW
    assert why() == ""
    rig.world.set_ready("demo-remote-0", False)
    assert "not ready" in why()
    rig.world.set_ready("demo-remote-0", True)
    rig.declare(1)
    rig.settle()
    assert "under way" in why()
    rig.now += WINDOW
    rig.settle()
    assert why() == ""
    del rig.world.pods["demo-remote-0"]
    assert why()


def test_shard_that_does_not_become_ready_fails_after_ten_minutes():
    def why() -> str:
        return why_never_ready(rig.observed(Remote()))

    rig = Rig.settled(shards=2)
    assert why() == ""
    rig.declare(3)
    rig.run()
    rig.world.set_ready("demo-remote-2", False)
    rig.world.pods["demo-remote-2"]["metadata"]["creationTimestamp"] = rig.now.isoformat()
    assert (why(), rig.list[0]) == ("", 2)
    rig.now += timedelta(minutes=11)
    assert why() == "shard demo-remote-2 has not become ready in 10 minutes"
    rig.world.set_ready("demo-remote-2", True)
    assert why() == ""


def test_shard_that_cannot_be_created_fails_after_ten_minutes():
    """A quota can forbid the pod, for example. Then there is no pod to inspect."""

    def why() -> str:
        observed = rig.observed(Remote())
        owner, last = rig.world.objects[SET]["metadata"]["uid"], rig.now.isoformat()
        failure = {"reason": "FailedCreate", "message": "exceeded quota", "firstTimestamp": first.isoformat()}
        event_meta = {"involvedObject": {"uid": owner}, "lastTimestamp": last}
        return why_never_ready(replace(observed, warnings=(failure | event_meta,)))

    rig = Rig.settled(shards=2)
    rig.declare(3)
    rig.run()
    rig.world.pods.pop("demo-remote-2")
    first = rig.now = rig.now + timedelta(minutes=1)
    assert why() == ""
    rig.now += timedelta(minutes=11)
    assert why() == "no further shard could be created for 10 minutes: exceeded quota"
    del rig.world.pods["demo-remote-0"]  # a listed shard is missing, which is another problem
    assert why() == ""


def test_removed_shard_is_not_waited_for():
    rig = Rig.settled(shards=3)
    rig.declare(2)
    rig.settle()
    rig.world.set_ready("demo-remote-2", False)
    rig.world.pods["demo-remote-2"]["metadata"]["creationTimestamp"] = rig.now.isoformat()
    rig.now += timedelta(minutes=11)
    assert (rig.list, why_never_ready(rig.observed(Remote()))) == ((2, 3), "")
