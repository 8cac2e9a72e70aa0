"""The managed remote tier: shards follow the spec, and engines are not restarted for that."""

import copy
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import yaml

from lmcache_operator.api.parse import Lender, parse
from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.components.remote.remote import Remote
from lmcache_operator.components.remote.shards import WINDOW
from lmcache_operator.contract.base import Context
from lmcache_operator.policy.report import Choice, Report
from lmcache_operator.specs.names import STOCK_IMAGES
from tests.harness.operator.model import NAME, UID, cluster, secret_of
from tests.harness.operator.render import CONTEXT, child_of, container, part, template_of
from tests.harness.operator.shards import (
    ACCOUNT,
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


def test_shards_are_created_with_a_password_and_then_nothing_is_written():
    rig = Rig()
    first = rig.run(is_ready=False)
    assert first[-7:] == [
        f"create {SECRET}", f"apply {ACCOUNT}", f"apply {LIST}", "apply Service demo-remote",
        "apply NetworkPolicy demo-remote", "apply PodDisruptionBudget demo-remote", f"apply {SET}",
    ]  # fmt: skip
    assert rig.plans["remote"].make, "the Secret may be missing until shards are ready"
    assert rig.condition("RemoteTierAvailable") == ("False", "ShardsMissing")
    for name in [*rig.world.pods]:
        rig.world.set_ready(name, True)
    assert rig.run() == []
    assert not rig.plans["remote"].make
    assert rig.condition("RemoteTierAvailable") == ("True", "ShardsReady")
    assert rig.condition("Ready") == ("True", "Ready")
    assert rig.status()["remote"] == {"shards": 2, "readyShards": 2}


def test_remote_tier_without_engines_is_ready_while_a_shard_serves():
    rig = Rig()
    rig.world.resource["spec"] = {"tiers": managed()}
    rig.run(is_ready=False)
    rig.run(is_ready=False)
    first, second = rig.world.pods
    assert rig.condition("Ready") == ("False", "Starting")
    rig.world.set_ready(first, True)
    assert (rig.condition("Ready"), rig.condition("Progressing")) == (
        ("True", "Serving"),
        ("True", "Starting"),
    )
    rig.world.set_ready(second, True)
    rig.run()
    assert rig.condition("Ready") == ("True", "Ready")
    rig.declare(2, memoryPerShard="much")
    rig.run()
    assert (rig.condition("Ready"), rig.condition("Degraded")) == (
        ("True", "Serving"),
        ("True", "InvalidSpec"),
    )
    for name in (first, second):
        rig.world.set_ready(name, False)
    rig.run()
    assert rig.condition("Ready") == ("False", "InvalidSpec")


def test_added_shards_are_listed_when_all_are_ready():
    rig = Rig.settled()
    rig.declare(4)
    rig.run(is_ready=False)
    assert (rig.num_servers, rig.list) == (4, (2, 0))
    assert rig.condition("Progressing") == ("True", "Scaling")
    rig.world.set_ready("demo-remote-2", True)
    rig.run()
    assert rig.list == (2, 0)
    rig.world.set_ready("demo-remote-3", True)
    rig.run()
    assert (rig.list, rig.condition("Progressing")[0]) == ((4, 2), "False")
    assert rig.status()["remote"] == {
        "shards": 4, "readyShards": 4, "previousShards": 2, "previousUntil": "2026-01-31T12:15:00Z"
    }  # fmt: skip
    assert rig.plans["remote"].due_seconds == WINDOW.total_seconds()
    rig.now += WINDOW
    rig.run()
    assert rig.list == (4, 0)


def test_chosen_number_of_shards_is_applied_after_the_previous_change():
    rig = Rig()
    rig.world.change(autoscaling={"mode": "Auto", "remote": {"minShards": 1, "maxShards": 4}})
    rig.settle()

    def choose(num_shards: int, instead_of: int = 2) -> tuple[int, int]:
        rig.report = Report({}, shards=Choice(num_shards, instead_of))
        rig.settle()
        return rig.list

    assert choose(3) == (3, 2)
    assert choose(1) == (3, 2), "rows of two changes ago would be lost"
    assert rig.condition("Progressing") == ("True", "Scaling")
    rig.now += WINDOW
    assert choose(1) == (1, 3)
    rig.now += WINDOW
    assert choose(9) == (4, 1), "the bounds limit the number"
    rig.now += WINDOW
    rig.report = None
    rig.settle()
    assert rig.list == (4, 0), "a restarted operator keeps the choice"
    rig.declare(3)
    assert choose(4, 2) == (3, 4), "a changed spec replaces the choice"
    assert rig.world.resource["spec"]["tiers"]["remote"]["managed"]["shards"] == 3


def test_edited_list_of_shards_is_restored():
    rig = Rig.settled(shards=3)
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
        assert (rig.num_servers, rig.list) == (3, (3, 0)), "an edited ConfigMap must not add servers"


def test_foreign_pod_with_shard_labels_is_not_counted():
    rig = Rig.settled(shards=2)
    pod = copy.deepcopy(rig.world.pods["demo-remote-1"])
    pod["metadata"]["name"] = "demo-remote-other"
    rig.world.pods["demo-remote-other"] = pod
    assert (rig.run(), rig.status()["remote"]) == ([], {"shards": 2, "readyShards": 2})


def test_tls_rolls_out_by_shard_and_the_list_names_secure_shards():
    rig = Rig.settled(shards=2)
    before = rig.world.objects[ENGINE]["spec"]["template"]
    rig.declare(2, tls={"issuerRef": {"name": "caches", "kind": "ClusterIssuer"}})
    assert rig.run() == [f"apply {CERTIFICATE}", f"apply {SET}"]
    for number in range(2):
        assert (secure(rig), rig.run()) == (["0"][:number], [f"evict demo-remote-{number}"])
        ready_at(rig, f"demo-remote-{number}", rig.now)
        assert rig.run() == [f"apply {LIST}"]
        if number == 0:
            assert (rig.run(), rig.plans["remote"].due_seconds) == ([], WINDOW.total_seconds())
            assert rig.condition("Progressing") == ("True", "Replacing")
        rig.now += WINDOW
    assert (rig.condition("Progressing"), secure(rig)) == (("False", "Complete"), ["0", "1"])
    assert rig.world.objects[ENGINE]["spec"]["template"] == before


def test_certificate_covers_the_shard_names():
    rig = Rig.settled(tls={"issuerRef": {"name": "caches"}})
    assert rig.world.objects[CERTIFICATE]["spec"] == {
        "dnsNames": ["*.demo-remote.team.svc"],
        "issuerRef": {"group": "cert-manager.io", "kind": "Issuer", "name": "caches"},
        "privateKey": {"rotationPolicy": "Always"},
        "secretName": secret_of("remote-tls").name,
        "usages": ["digital signature", "key encipherment", "server auth"],
    }
    assert secure(rig) == ["0", "1"]


def test_shard_on_a_lost_node_is_abandoned_and_stays_listed():
    rig = Rig.settled(shards=3)
    pod, long_ago = rig.world.pods["demo-remote-1"], (NOON - timedelta(minutes=9)).isoformat()
    pod["spec"]["nodeName"] = "gone"
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False", "lastTransitionTime": long_ago}]
    pod["metadata"]["deletionTimestamp"] = long_ago
    rig.nodes = {"gone": None}
    assert (rig.run(), rig.plans["remote"].abandon) == ([], (pod,))
    assert rig.condition("RemoteTierAvailable") == ("False", "ShardsMissing")
    assert rig.condition("Degraded") == ("True", "NodeLost")
    del rig.world.pods["demo-remote-1"]
    rig.settle()
    assert (rig.condition("RemoteTierAvailable"), rig.list) == (("True", "ShardsReady"), (3, 0))


def test_shards_keep_their_image_until_policy_follow():
    rig = Rig.settled()
    rig.context = Context(STOCK_IMAGES, shard_image="valkey:later")
    assert rig.run() == []
    rig.world.change(images={"policy": "Follow"})
    rig.run()
    (server,) = rig.world.objects[SET]["spec"]["template"]["spec"]["containers"]
    assert server["image"] == "valkey:later"


def test_only_a_renamed_certificate_changes_the_engine_pods():
    def pods(tls: dict[str, Any] | None) -> tuple[str, str]:
        template = template_of(tiers=managed(tls=tls))
        auth = part(template["spec"]["volumes"], "remote-auth")["projected"]["sources"][1]["secret"]["name"]
        return template["metadata"]["annotations"]["lmcache.io/spec-hash"], auth

    plain_hash, secret = pods(None)
    assert secret == secret_of("remote-tls").name
    assert pods({"issuerRef": {"name": "caches"}}) == (plain_hash, secret)
    other_hash, secret = pods({"secretRef": {"name": "ours"}})
    assert (other_hash != plain_hash, secret) == (True, "ours")


def test_removed_remote_tier_is_deleted_with_dependents_first():
    rig = Rig.settled()
    rig.world.change(tiers={"remote": None})
    deleted = [write for write in rig.run() if write.startswith("delete")]
    assert (deleted[0], deleted[-1]) == (f"delete {SET}", f"delete {ACCOUNT}")
    rig.settle()
    assert not set(rig.world.objects) & {SET, LIST}
    assert "RemoteTierAvailable" not in {c["type"] for c in rig.status()["conditions"]}


def test_invalid_spec_keeps_shards_and_their_status():
    rig = Rig.settled()
    rig.world.resource["status"] = rig.status()
    rig.world.change(engine={"args": ["--port=1"]})
    assert (rig.run(), rig.condition("RemoteTierAvailable")) == ([], ("True", "ShardsReady"))
    assert rig.status()["remote"] == {"shards": 2, "readyShards": 2}


@pytest.mark.parametrize(
    ("remote", "owner"), [(managed(), "demo"), ({"remote": {"clusterRef": {"name": "kv"}}}, "kv")]
)
def test_engines_mount_the_list_of_shards_as_optional(remote, owner):
    resource = parse(cluster(tiers=remote))
    lenders = {"kv": Lender("uid of kv")} if owner == "kv" else {}
    config = yaml.safe_load(child_of("ConfigMap", tiers=remote)["data"]["sidecar.yaml"])
    assert {key: value for key, value in config.items() if key.startswith("remote")} == {
        "remote_url": f"redis://lmcache@{owner}-remote.team.svc:6379",
        "remote_shards_file": "/etc/lmcache/remote/shards.yaml",
        "remote_password_file": "/etc/lmcache/remote-auth/password",
    }
    engines = Engine().render(replace(resource, lenders=lenders), CONTEXT)[-1]
    pod, uid = engines["spec"]["template"]["spec"], "uid of kv" if lenders else UID
    assert part(pod["volumes"], "remote")["configMap"] == {
        "items": [{"key": "shards.yaml", "path": "shards.yaml"}],
        "name": f"{owner}-remote",
        "optional": True,
    }
    assert part(pod["volumes"], "remote-auth")["projected"]["sources"] == [
        {"secret": {"items": [{"key": key, "path": key}], "name": name, "optional": True}}
        for key, name in (("password", f"{owner}-remote-{uid}"), ("ca.crt", f"{owner}-remote-tls-{uid}"))
    ]
    mounted = {mount["mountPath"] for mount in container(pod, "sidecar")["volumeMounts"]}
    assert {"/etc/lmcache/remote", "/etc/lmcache/remote-auth"} <= mounted


@pytest.mark.parametrize(
    ("access", "engines", "injected"),
    [
        (
            "Cluster",
            {"matchLabels": {"lmcache.io/cluster": NAME, "lmcache.io/component": "engine"}},
            {"matchLabels": {"lmcache.io/inject": NAME}},
        ),
        (
            "Namespace",
            {"matchLabels": {"lmcache.io/component": "engine"}},
            {"matchExpressions": [{"key": "lmcache.io/inject", "operator": "Exists"}]},
        ),
    ],
)
def test_network_policy_follows_the_access_setting(access, engines, injected):
    (rule,) = child_of("NetworkPolicy", Remote(), tiers=managed(access=access))["spec"]["ingress"]
    assert rule == {
        "from": [{"podSelector": engines}, {"podSelector": injected}],
        "ports": [{"port": 6379, "protocol": "TCP"}],
    }
