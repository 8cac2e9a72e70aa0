"""The managed remote tier: shards come and go with what is declared, and engines notice nothing of it."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import yaml
from lmcache_operator.api.parse import parse
from lmcache_operator.autoscaling.report import Choice, Report
from lmcache_operator.components import COMPONENTS
from lmcache_operator.components.base import (
    Context,
)
from lmcache_operator.components.remote.remote import Remote
from lmcache_operator.components.remote.shards import WINDOW
from lmcache_operator.specs.names import STOCK_IMAGES

from tests.harness.operator_model import NAME, World, cluster
from tests.harness.operator_shards import (
    CERTIFICATE,
    ENGINE,
    LIST,
    NOON,
    SECRET,
    SET,
    Rig,
    managed,
    ready_at,
    secure,
)


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


def test_as_many_shards_as_were_chosen_one_change_at_a_time():
    rig = Rig()
    rig.world.change(autoscaling={"mode": "Auto", "remote": {"minShards": 1, "maxShards": 4}})
    rig.settle()

    def choose(number: int, instead_of: int = 2) -> tuple[int, int]:
        rig.report = Report({}, shards=Choice(number, instead_of))
        rig.settle()
        return rig.list

    assert choose(3) == (3, 2)
    assert choose(1) == (3, 2), "what was two changes ago would not be found"
    assert rig.condition("Progressing") == ("True", "Scaling")
    rig.now += WINDOW
    assert choose(1) == (1, 3)
    rig.now += WINDOW
    assert choose(9) == (4, 1), "within the bounds"
    rig.now += WINDOW
    rig.report = None
    rig.settle()
    assert rig.list == (4, 0), "an operator that starts again remembers"
    rig.declare(3)
    assert choose(4, 2) == (3, 4), "who declares another number means that one"
    assert rig.world.resource["spec"]["tiers"]["remote"]["managed"]["shards"] == 3


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
    until = (rig.now + WINDOW).isoformat()
    for state in ("64", f"3 from 64 until {until}", "64 from 3 until 2001-01-01T00:00:00Z"):
        rig.world.edit(LIST, "metadata", "annotations", value={"lmcache.io/shards": state})
        rig.settle()
        assert (rig.num_servers, rig.list) == (3, (3, 0)), "nobody makes servers by a ConfigMap"


def test_a_pod_that_somebody_gave_to_the_servers_is_none_of_them():
    rig = Rig(shards=2)
    rig.settle()
    pod = copy.deepcopy(rig.world.pods["demo-remote-1"])
    pod["metadata"]["name"] = "demo-remote-other"
    rig.world.pods["demo-remote-other"] = pod
    assert rig.run() == []
    assert rig.status()["remote"] == {"shards": 2, "readyShards": 2}


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


def test_a_change_on_top_of_another_empties_the_emptiest_server():
    rig = Rig(shards=3)
    rig.settle()
    rig.declare(3, memoryPerShard="2Gi")
    rig.run()
    for number in range(2):
        assert rig.run() == [f"evict demo-remote-{number}"]
        ready_at(rig, f"demo-remote-{number}", rig.now)
        rig.now += WINDOW if number == 0 else timedelta(minutes=1)
    rig.declare(3, memoryPerShard="4Gi")
    rig.run()
    assert rig.run() == ["evict demo-remote-1"]


def test_servers_get_tls_one_by_one_and_sidecars_know_which_have_it():
    rig = Rig(shards=2)
    rig.settle()
    before = rig.world.objects[ENGINE]["spec"]["template"]
    rig.declare(2, tls={"issuerRef": {"name": "caches", "kind": "ClusterIssuer"}})
    assert rig.run() == [f"apply {CERTIFICATE}", f"apply {SET}"]
    for number in range(2):
        assert secure(rig) == ["0"][:number]
        assert rig.run() == [f"evict demo-remote-{number}"]
        ready_at(rig, f"demo-remote-{number}", rig.now)
        assert rig.run() == [f"apply {LIST}"]
        rig.now += WINDOW
    assert secure(rig) == ["0", "1"]
    assert rig.world.objects[ENGINE]["spec"]["template"] == before


def test_the_certificate_is_for_the_servers_names():
    rig = Rig(tls={"issuerRef": {"name": "caches"}})
    rig.settle()
    assert rig.world.objects[CERTIFICATE]["spec"] == {
        "dnsNames": ["*.demo-remote.team.svc"],
        "issuerRef": {"group": "cert-manager.io", "kind": "Issuer", "name": "caches"},
        "privateKey": {"rotationPolicy": "Always"},
        "secretName": "demo-remote-tls",
        "usages": ["digital signature", "key encipherment", "server auth"],
    }
    assert secure(rig) == ["0", "1"]


def test_only_a_certificate_of_another_name_has_to_be_mounted_anew():
    def pods(tls: dict[str, Any] | None) -> tuple[str, str]:
        rig = Rig(tls=tls)
        rig.settle()
        template = rig.world.objects[ENGINE]["spec"]["template"]
        (auth,) = [v["projected"] for v in template["spec"]["volumes"] if v["name"] == "remote-auth"]
        return template["metadata"]["annotations"]["lmcache.io/spec-hash"], auth["sources"][1]["secret"][
            "name"
        ]

    plain, _ = pods(None)
    assert pods({"secretRef": {"name": "demo-remote-tls"}}) == (plain, "demo-remote-tls")
    assert pods({"issuerRef": {"name": "caches"}}) == (plain, "demo-remote-tls")
    other, secret = pods({"secretRef": {"name": "ours"}})
    assert (other != plain, secret) == (True, "ours")


def test_a_shard_on_a_lost_node_is_given_up_and_the_list_stays():
    rig = Rig(shards=3)
    rig.settle()
    pod, long_ago = rig.world.pods["demo-remote-1"], (NOON - timedelta(minutes=9)).isoformat()
    pod["spec"]["nodeName"] = "gone"
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False", "lastTransitionTime": long_ago}]
    pod["metadata"]["deletionTimestamp"] = long_ago
    rig.nodes = {"gone": None}
    assert rig.run() == []
    assert rig.plans["remote"].abandon == (pod,)
    assert rig.condition("RemoteTierAvailable") == ("False", "ShardsMissing")
    assert rig.condition("Ready") == ("False", "NodeLost")
    del rig.world.pods["demo-remote-1"]
    rig.settle()
    assert rig.condition("RemoteTierAvailable") == ("True", "ShardsReady")
    assert rig.list == (3, 0)


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
    assert volumes["remote-auth"]["projected"]["sources"] == [
        {"secret": {"items": [{"key": key, "path": key}], "name": name, "optional": True}}
        for key, name in (("password", f"{owner}-remote"), ("ca.crt", f"{owner}-remote-tls"))
    ]
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
