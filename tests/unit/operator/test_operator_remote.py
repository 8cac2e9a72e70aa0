"""The managed remote tier: shards come and go with what is declared, and engines notice nothing of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import hypothesis.strategies as st
import pytest
import yaml
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from lmcache_operator.api.parse import parse
from lmcache_operator.components import COMPONENTS
from lmcache_operator.components.base import (
    Context,
    Observed,
    Plan,
    Probed,
    RemoteFigures,
    Sidecar,
)
from lmcache_operator.components.remote.remote import Remote
from lmcache_operator.components.remote.shards import WINDOW, Shards
from lmcache_operator.errors import RefusedError
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.reconcile import plan as planning
from lmcache_operator.reconcile.reconciler import Reconciler
from lmcache_operator.reconcile.status import derive_status
from lmcache_operator.specs.kinds import ClusterKey, Ref, controller_uid
from lmcache_operator.specs.names import STOCK_IMAGES, annotations_of

from tests.harness.operator_model import NAME, NAMESPACE, UID, World, cluster
from tests.harness.operator_plans import carry_out

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
SET, LIST, SECRET, ENGINE = (
    Ref(kind, name)
    for kind, name in (
        ("StatefulSet", "demo-remote"),
        ("ConfigMap", "demo-remote"),
        ("Secret", "demo-remote"),
        ("StatefulSet", "demo-engine"),
    )
)


def managed(shards: int = 2, **more: Any) -> dict[str, Any]:
    return {"remote": {"managed": {"shards": shards, "memoryPerShard": "1Gi", **more}}}


class Rig:
    """A cluster with a managed tier at a time of our choice. It is planned for as if the operator had just
    started: nothing is remembered."""

    def __init__(self, **tier: Any) -> None:
        self.world = World(cluster(tiers=managed(**tier)))
        self.now = NOON
        self.context = Context(STOCK_IMAGES)
        self.plans: dict[str, Plan] = {}

    def observed(self, component: Any) -> Observed:
        children = {ref: self.world.objects[ref] for ref in component.refs(NAME) if ref in self.world.objects}
        uids = {child["metadata"]["uid"] for child in children.values()}
        pods = tuple(pod for pod in self.world.pods.values() if controller_uid(pod) in uids)
        return Observed(resource=self.world.resource, children=children, pods=pods, now=self.now)

    def run(self, *, is_ready: bool = True, most: int = 99) -> list[str]:
        """Plan once and do it, but for what comes after the first so many writes of each component; what was
        written."""
        self.world.writes.clear()
        observed = {own.name: self.observed(own) for own in COMPONENTS}
        self.plans, fault = planning.plan(COMPONENTS, self.world.resource, observed, self.context)
        assert fault is None
        for own in COMPONENTS:
            due = self.plans[own.name]
            due = replace(due, apply=due.apply[:most], delete=due.delete[:most], evict=due.evict[:most])
            carry_out(self.world, due, is_ready=is_ready)
        return list(self.world.writes)

    def settle(self) -> None:
        while self.run():
            pass

    def declare(self, shards: int, **more: Any) -> None:
        self.world.change(tiers=managed(shards, **more))

    @property
    def list(self) -> tuple[int, int]:
        """How many shards there are in the file, and how many there were before."""
        document = yaml.load(self.world.objects[LIST]["data"]["shards.yaml"], yaml.BaseLoader)
        assert ("until" in document) == ("previous" in document)
        return len(document["current"]), len(document.get("previous", ()))

    @property
    def num_servers(self) -> int:
        return int(self.world.objects[SET]["spec"]["replicas"])

    def status(self) -> dict[str, Any]:
        statuses = [own.status(self.observed(own), self.plans[own.name]) for own in COMPONENTS]
        return derive_status(self.world.resource, self.now, statuses, self.plans, ())

    def condition(self, kind: str) -> tuple[str, str]:
        (found,) = [c for c in self.status()["conditions"] if c["type"] == kind]
        return found["status"], found["reason"]


def test_shards_are_made_with_a_password_and_at_rest_nothing_is_written():
    rig = Rig()
    first = rig.run(is_ready=False)
    assert first[-6:] == [
        f"create {SECRET}", f"apply {LIST}", "apply Service demo-remote",
        "apply NetworkPolicy demo-remote", "apply PodDisruptionBudget demo-remote", f"apply {SET}",
    ]  # fmt: skip
    assert rig.plans["remote"].make, "until they are ready, the Secret may be missing"
    assert rig.condition("RemoteTierAvailable") == ("False", "ShardsMissing")
    for name in [*rig.world.pods]:
        rig.world.set_ready(name, True)
    assert rig.run() == []
    assert not rig.plans["remote"].make
    assert rig.condition("RemoteTierAvailable") == ("True", "ShardsReady")
    assert rig.condition("Ready") == ("True", "Ready")
    assert rig.status()["remote"] == {"shards": 2, "readyShards": 2}


def test_shards_that_come_are_in_the_list_when_they_are_ready():
    rig = Rig()
    rig.settle()
    rig.declare(4)
    rig.run(is_ready=False)
    assert (rig.num_servers, rig.list) == (4, (2, 0))
    assert rig.condition("Progressing") == ("True", "Scaling")
    rig.world.set_ready("demo-remote-2", True)
    rig.run()
    assert rig.list == (2, 0)
    rig.world.set_ready("demo-remote-3", True)
    rig.run()
    assert rig.list == (4, 2)
    assert rig.condition("Progressing")[0] == "False"
    assert rig.status()["remote"] == {
        "shards": 4, "readyShards": 4, "previousShards": 2, "previousUntil": "2026-01-31T12:15:00Z"
    }  # fmt: skip
    assert rig.plans["remote"].due_seconds == WINDOW.total_seconds()
    rig.now += WINDOW
    rig.run()
    assert rig.list == (4, 0)


def test_shards_that_go_are_there_until_they_are_not_read_any_more():
    rig = Rig(shards=4)
    rig.settle()
    rig.declare(1)
    rig.run()
    assert (rig.num_servers, rig.list) == (4, (1, 4))
    rig.now += WINDOW - timedelta(seconds=1)
    rig.settle()
    assert (rig.num_servers, rig.list) == (4, (1, 4))
    rig.now += timedelta(seconds=1)
    rig.settle()
    assert (rig.num_servers, rig.list) == (1, (1, 0))
    assert [name for name in rig.world.pods if "remote" in name] == ["demo-remote-0"]


def test_no_number_of_shards_changes_an_engine():
    rig = Rig()
    rig.settle()
    before = rig.world.objects[ENGINE]["metadata"]["resourceVersion"]
    for shards, more in ((4, {}), (1, {"image": "valkey:9"}), (2, {"memoryPerShard": "2Gi"})):
        rig.declare(shards, **more)
        rig.settle()
        rig.now += WINDOW
        rig.settle()
    assert rig.world.objects[ENGINE]["metadata"]["resourceVersion"] == before


def test_a_list_that_somebody_spoiled_is_written_anew():
    rig = Rig(shards=3)
    rig.settle()
    rig.world.edit(LIST, "data", "shards.yaml", value="current: [elsewhere:1]")
    rig.settle()
    assert rig.list == (3, 0)
    rig.world.edit(LIST, "metadata", "annotations", value={})
    rig.settle()
    assert rig.list == (3, 0)


def ready_at(rig: Rig, name: str, time: datetime) -> None:
    rig.world.set_ready(name, True)
    rig.world.pods[name]["status"]["conditions"][0]["lastTransitionTime"] = time.isoformat()


def test_changed_servers_are_replaced_one_by_one_with_time_to_fill():
    rig = Rig(shards=3)
    rig.settle()
    rig.declare(3, memoryPerShard="2Gi")
    assert rig.run() == [f"apply {SET}"]
    for number in range(3):
        assert rig.run() == [f"evict demo-remote-{number}"]
        ready_at(rig, f"demo-remote-{number}", rig.now)
        assert rig.run() == []
        if number < 2:
            assert rig.plans["remote"].due_seconds == WINDOW.total_seconds()
            assert rig.condition("Progressing") == ("True", "Replacing")
        rig.now += WINDOW
    assert rig.condition("Progressing") == ("False", "Complete")


def test_the_image_is_that_of_when_the_servers_were_made():
    rig = Rig()
    rig.settle()
    rig.context = Context(STOCK_IMAGES, shard_image="valkey:later")
    assert rig.run() == []
    rig.world.change(images={"policy": "Follow"})
    rig.run()
    (server,) = rig.world.objects[SET]["spec"]["template"]["spec"]["containers"]
    assert server["image"] == "valkey:later"


def test_a_tier_that_is_not_wanted_any_more_is_deleted_dependents_first():
    rig = Rig()
    rig.settle()
    rig.world.change(tiers={"remote": None})
    deleted = [write for write in rig.run() if write.startswith("delete")]
    assert deleted[0] == f"delete {SET}"
    assert deleted[-1] == f"delete {LIST}"
    rig.settle()
    assert not set(rig.world.objects) & {SET, LIST}
    assert "RemoteTierAvailable" not in {c["type"] for c in rig.status()["conditions"]}


def test_an_invalid_spec_leaves_shards_and_what_is_told_of_them():
    rig = Rig()
    rig.settle()
    rig.world.resource["status"] = rig.status()
    rig.world.change(engine={"args": ["--port=1"]})
    assert rig.run() == []
    assert rig.condition("RemoteTierAvailable") == ("True", "ShardsReady")
    assert rig.status()["remote"] == {"shards": 2, "readyShards": 2}


def test_a_cluster_without_an_engine_is_a_remote_tier_alone():
    spec = {"tiers": managed(2)}
    objects = [
        child for own in COMPONENTS for child in own.render(parse(cluster(spec)), Context(STOCK_IMAGES))
    ]
    assert {child["metadata"]["name"] for child in objects} == {"demo-remote"}
    rig = Rig()
    rig.world = World(cluster(spec))
    rig.settle()
    status = rig.status()
    assert {c["type"]: c["status"] for c in status["conditions"]} == {
        "Degraded": "False", "Progressing": "False", "Ready": "True", "RemoteTierAvailable": "True"
    }  # fmt: skip
    assert "replicas" not in status


@pytest.mark.parametrize(
    ("remote", "owner"), [(managed(), "demo"), ({"remote": {"clusterRef": {"name": "kv"}}}, "kv")]
)
def test_engines_follow_the_list_and_need_none_to_start(remote, owner):
    objects = [
        c for own in COMPONENTS for c in own.render(parse(cluster(tiers=remote)), Context(STOCK_IMAGES))
    ]
    (config,) = [
        yaml.safe_load(c["data"]["sidecar.yaml"]) for c in objects if "sidecar.yaml" in c.get("data", {})
    ]
    assert config["remote_url"] == f"redis://lmcache@{owner}-remote.team.svc:6379"
    assert config["remote_shards_file"] == "/etc/lmcache/remote/shards.yaml"
    assert config["remote_password_file"] == "/etc/lmcache/remote-auth/password"
    (template,) = [
        c["spec"]["template"]["spec"]
        for c in objects
        if c["metadata"]["name"] == "demo-engine" and c["kind"] == "StatefulSet"
    ]
    volumes = {volume["name"]: volume for volume in template["volumes"]}
    assert volumes["remote"]["configMap"] == {"name": f"{owner}-remote", "optional": True}
    assert volumes["remote-auth"]["secret"]["optional"]
    assert volumes["remote-auth"]["secret"]["secretName"] == f"{owner}-remote"
    (sidecar,) = [c for c in template["initContainers"] if c["name"] == "sidecar"]
    assert {"/etc/lmcache/remote", "/etc/lmcache/remote-auth"} <= {
        m["mountPath"] for m in sidecar["volumeMounts"]
    }


def sources(access: str) -> list[Any]:
    tiers = managed(access=access)
    objects = Remote().render(parse(cluster(tiers=tiers)), Context(STOCK_IMAGES))
    (policy,) = [child["spec"] for child in objects if child["kind"] == "NetworkPolicy"]
    (rule,) = policy["ingress"]
    assert rule["ports"] == [{"port": 6379, "protocol": "TCP"}]
    assert all("namespaceSelector" not in source for source in rule["from"])
    return [source["podSelector"] for source in rule["from"]]


def test_other_clusters_may_use_it_unless_it_is_for_its_own_pods():
    own, injected = sources("Cluster")
    assert own["matchLabels"]["lmcache.io/cluster"] == injected["matchLabels"]["lmcache.io/inject"] == NAME
    others, injected = sources("Namespace")
    assert others == {"matchLabels": {"lmcache.io/component": "engine"}}
    assert injected == {"matchExpressions": [{"key": "lmcache.io/inject", "operator": "Exists"}]}


class KillMachine(RuleBasedStateMachine):
    """The operator is killed after any write. What is read is there, and in the end all is as declared."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig()
        self.rig.settle()

    @rule(number=st.integers(1, 4))
    def declare(self, number: int) -> None:
        self.rig.declare(number)

    @rule(seconds=st.integers(1, 1000))
    def wait(self, seconds: int) -> None:
        self.rig.now += timedelta(seconds=seconds)

    @rule(number=st.integers(0, 3), is_ready=st.booleans())
    def change_a_pod(self, number: int, is_ready: bool) -> None:
        if f"demo-remote-{number}" in self.rig.world.pods:
            self.rig.world.set_ready(f"demo-remote-{number}", is_ready)

    @rule(most=st.integers(0, 3), is_ready=st.booleans())
    def run_and_be_killed(self, most: int, is_ready: bool) -> None:
        self.rig.run(is_ready=is_ready, most=most)

    @invariant()
    def what_is_read_is_there(self) -> None:
        live = Shards.parse(annotations_of(self.rig.world.objects[LIST])["lmcache.io/shards"])
        assert self.rig.list == (live.current, live.previous)
        is_read = live.previous and self.rig.now < live.until
        assert max(live.current, live.previous if is_read else 0) <= self.rig.num_servers
        assert annotations_of(self.rig.world.objects[ENGINE]) == self.engine

    @initialize()
    def begin(self) -> None:
        self.engine = annotations_of(self.rig.world.objects[ENGINE])

    def teardown(self) -> None:
        rig = self.rig
        for _ in range(4):
            for pod in rig.world.pods:
                rig.world.set_ready(pod, True)
            rig.settle()
            rig.now += WINDOW
        declared = rig.world.resource["spec"]["tiers"]["remote"]["managed"]["shards"]
        assert (rig.num_servers, rig.list) == (declared, (declared, 0))


TestKills = KillMachine.TestCase
TestKills.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


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
