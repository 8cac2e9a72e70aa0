"""The node itself: what a kubelet of any cluster does, and what may happen to it."""

from __future__ import annotations

import contextlib
import subprocess

import pytest

from testing.node import groups
from testing.node.cluster import NODE
from testing.node.pods import Pod

SECONDS = 120


@pytest.fixture
def sleeper(node, references):
    """A pod that sleeps, in a namespace without rules."""
    made = []

    def make(name, labels=None, volumes=(), **container):
        main = {"name": "main", "image": references["pause"], "command": ["sleep", "infinity"], **container}
        spec = {"terminationGracePeriodSeconds": 0, "containers": [main], "volumes": list(volumes)}
        metadata = {"name": name, "labels": labels or {}}
        node.api.create("v1/pods", {"metadata": metadata, "spec": spec}, "default")
        made.append(name)
        return lambda: Pod(node, node.api.get("v1/pods", name, "default"))

    yield make
    for name in made:
        node.api.delete("v1/pods", name, "default")


def test_pods_find_services_by_name(node, sleeper):
    look = sleeper("asks-names")
    node.wait(lambda: look().is_ready, SECONDS)
    assert (
        look()
        .exec("main", "getent", "hosts", "kubernetes.default.svc.cluster.local")
        .startswith("10.96.0.1 ")
    )


def test_limits_are_in_the_control_group_and_follow_a_resize(node, sleeper):
    memory = {"memory": "64Mi"}
    look = sleeper("grows", resources={"requests": memory, "limits": memory})
    node.wait(lambda: look().is_ready, SECONDS)
    path = node.api.path("v1/pods", "default", "grows/resize")
    for num_bytes in (128 << 20, 96 << 20):
        memory = {"memory": str(num_bytes)}
        patch = {"containers": [{"name": "main", "resources": {"requests": memory, "limits": memory}}]}
        node.api.request("PATCH", path, {"spec": patch}, "application/strategic-merge-patch+json")
        node.wait(lambda limit=num_bytes: groups.memory_limit(look().group("main")) == limit, SECONDS)
    assert look().container("main")["restartCount"] == 0


def test_a_container_over_its_limit_is_killed_and_started_again(node, sleeper):
    memory = {"memory": "64Mi"}
    fill = ["tail", "/dev/zero"]  # it waits for the end of a line
    look = sleeper("eats", command=fill, resources={"requests": memory, "limits": memory})

    def reason():
        state = look().container("main")
        return state["lastState"].get("terminated", state["state"].get("terminated", {})).get("reason")

    node.wait(lambda: reason() == "OOMKilled", SECONDS)


def test_a_resource_that_nobody_offers_can_be_pretended(node, sleeper):
    node.set_capacity("example.com/gpu", 1)
    one = {"limits": {"example.com/gpu": "1"}}
    first, second = sleeper("has-one", resources=one), sleeper("gets-none", resources=one)
    node.wait(lambda: first().is_ready or second().is_ready, SECONDS)
    waiting = second if first().is_ready else first
    (why,) = [c for c in waiting().object["status"]["conditions"] if c["type"] == "PodScheduled"]
    assert "Insufficient example.com/gpu" in why["message"]


def test_an_image_is_a_volume(node, references, sleeper):
    volume = {"name": "redis", "image": {"reference": references["redis"], "pullPolicy": "IfNotPresent"}}
    mount = {"name": "redis", "mountPath": "/redis", "readOnly": True}
    look = sleeper("reads-an-image", volumes=[volume], volumeMounts=[mount])
    node.wait(lambda: look().is_ready, SECONDS)
    assert "redis-server" in look().exec("main", "ls", "/redis/usr/bin")


def test_network_policies_hold_between_pods(node, references, sleeper):
    server = sleeper(
        "serves",
        labels={"part": "server"},
        image=references["redis"],
        command=["redis-server", "--protected-mode", "no", "--dir", "/tmp"],
        readinessProbe={"tcpSocket": {"port": 6379}, "periodSeconds": 1},
    )
    clients = {name: sleeper(name, labels={"is": name}) for name in ("friend", "stranger")}
    for look in (server, *clients.values()):
        node.wait(lambda look=look: look().is_ready, SECONDS)

    def who_gets_in():
        dial = f"timeout 2 bash -c 'exec 3<>/dev/tcp/{server().address}/6379' && echo in || true"
        return [name for name, look in clients.items() if look().exec("main", "sh", "-c", dial)]

    assert who_gets_in() == ["friend", "stranger"]
    rule = {"from": [{"podSelector": {"matchLabels": {"is": "friend"}}}], "ports": [{"port": 6379}]}
    selector = {"matchLabels": {"part": "server"}}
    policy = {"metadata": {"name": "friends"}, "spec": {"podSelector": selector, "ingress": [rule]}}
    node.api.create("networking.k8s.io/v1/networkpolicies", policy, "default")
    node.wait(lambda: who_gets_in() == ["friend"], SECONDS)
    assert server().is_ready  # the kubelet is no pod: its probes pass
    node.api.delete("networking.k8s.io/v1/networkpolicies", "friends", "default")
    node.wait(lambda: who_gets_in() == ["friend", "stranger"], SECONDS)


def test_pods_come_back_after_a_power_cut(node, sleeper):
    look = sleeper("survives")
    node.wait(lambda: look().is_ready, SECONDS)
    node.reboot()
    node.wait(lambda: look().container("main")["restartCount"] >= 1 and look().is_ready, SECONDS)


def test_pods_go_on_without_a_kubelet(node, sleeper):
    look = sleeper("goes-on")
    node.wait(lambda: look().is_ready, SECONDS)
    group = look().group("main")
    node.stop_kubelet()
    try:
        (process,) = (group / "cgroup.procs").read_text().split()
        with pytest.raises(subprocess.CalledProcessError):
            look().exec("main", "true")
    finally:
        node.start_kubelet()

    def answer():
        with contextlib.suppress(subprocess.CalledProcessError):
            return look().exec("main", "echo", "there")

    node.wait(lambda: answer() == "there\n", SECONDS)
    assert (group / "cgroup.procs").read_text().split() == [process]
    assert look().container("main")["restartCount"] == 0
    node.wait(lambda: _is_ready(node), SECONDS)


def _is_ready(node):
    conditions = node.api.get("v1/nodes", NODE)["status"]["conditions"]
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
