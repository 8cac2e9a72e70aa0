"""The test node itself: it behaves like a kubelet of any cluster, and survives faults."""

import contextlib
import subprocess

import pytest

from testing.node import groups
from testing.node.cluster import NODE
from testing.node.pods import Pod

SECONDS = 120


@pytest.fixture
def sleeper(node, references):
    """A function that creates a pod that sleeps, in a namespace without policies."""
    names = []

    def make(name, labels=None, volumes=(), **container):
        main = {"name": "main", "image": references["pause"], "command": ["sleep", "infinity"], **container}
        spec = {"terminationGracePeriodSeconds": 0, "containers": [main], "volumes": list(volumes)}
        metadata = {"name": name, "labels": labels or {}}
        node.api.create("v1/pods", {"metadata": metadata, "spec": spec}, "default")
        names.append(name)
        return lambda: Pod(node, node.api.get("v1/pods", name, "default"))

    yield make
    for name in names:
        node.api.delete("v1/pods", name, "default")


def test_pods_find_services_by_name(node, sleeper):
    get_pod = sleeper("asks-names")
    node.wait(lambda: get_pod().is_ready, SECONDS)
    assert (
        get_pod()
        .exec("main", "getent", "hosts", "kubernetes.default.svc.cluster.local")
        .startswith("10.96.0.1 ")
    )


def test_memory_limits_reach_the_control_group_and_follow_resizes(node, sleeper):
    memory = {"memory": "64Mi"}
    get_pod = sleeper("grows", resources={"requests": memory, "limits": memory})
    node.wait(lambda: get_pod().is_ready, SECONDS)
    path = node.api.path("v1/pods", "default", "grows/resize")
    for num_bytes in (128 << 20, 96 << 20):
        memory = {"memory": str(num_bytes)}
        patch = {"containers": [{"name": "main", "resources": {"requests": memory, "limits": memory}}]}
        node.api.request("PATCH", path, {"spec": patch}, "application/strategic-merge-patch+json")
        node.wait(lambda limit=num_bytes: groups.memory_limit(get_pod().group("main")) == limit, SECONDS)
    assert get_pod().container("main")["restartCount"] == 0


def test_container_over_its_memory_limit_is_killed(node, sleeper):
    memory = {"memory": "64Mi"}
    fill = ["tail", "/dev/zero"]  # tail buffers an endless line
    get_pod = sleeper("eats", command=fill, resources={"requests": memory, "limits": memory})

    def reason():
        state = get_pod().container("main")
        return state["lastState"].get("terminated", state["state"].get("terminated", {})).get("reason")

    node.wait(lambda: reason() == "OOMKilled", SECONDS)


def test_node_capacity_can_be_set_for_any_resource(node, sleeper):
    node.set_capacity("example.com/gpu", 1)
    one_gpu = {"limits": {"example.com/gpu": "1"}}
    first, second = sleeper("has-one", resources=one_gpu), sleeper("gets-none", resources=one_gpu)
    node.wait(lambda: first().is_ready or second().is_ready, SECONDS)
    waiting = second if first().is_ready else first
    (scheduled,) = [c for c in waiting().object["status"]["conditions"] if c["type"] == "PodScheduled"]
    assert "Insufficient example.com/gpu" in scheduled["message"]


def test_image_can_be_mounted_as_a_volume(node, references, sleeper):
    volume = {"name": "redis", "image": {"reference": references["redis"], "pullPolicy": "IfNotPresent"}}
    mount = {"name": "redis", "mountPath": "/redis", "readOnly": True}
    get_pod = sleeper("reads-an-image", volumes=[volume], volumeMounts=[mount])
    node.wait(lambda: get_pod().is_ready, SECONDS)
    assert "redis-server" in get_pod().exec("main", "ls", "/redis/usr/bin")


def test_network_policies_apply_between_pods(node, references, sleeper):
    server = sleeper(
        "serves",
        labels={"part": "server"},
        image=references["redis"],
        command=["redis-server", "--protected-mode", "no", "--dir", "/tmp"],
        readinessProbe={"tcpSocket": {"port": 6379}, "periodSeconds": 1},
    )
    clients = {name: sleeper(name, labels={"is": name}) for name in ("friend", "stranger")}
    for get_pod in (server, *clients.values()):
        node.wait(lambda get_pod=get_pod: get_pod().is_ready, SECONDS)

    def reaching_clients():
        dial = f"timeout 2 bash -c 'exec 3<>/dev/tcp/{server().address}/6379' && echo in || true"
        return [name for name, get_pod in clients.items() if get_pod().exec("main", "sh", "-c", dial)]

    assert reaching_clients() == ["friend", "stranger"]
    rule = {"from": [{"podSelector": {"matchLabels": {"is": "friend"}}}], "ports": [{"port": 6379}]}
    selector = {"matchLabels": {"part": "server"}}
    policy = {"metadata": {"name": "friends"}, "spec": {"podSelector": selector, "ingress": [rule]}}
    node.api.create("networking.k8s.io/v1/networkpolicies", policy, "default")
    node.wait(lambda: reaching_clients() == ["friend"], SECONDS)
    assert server().is_ready  # policies do not apply to the kubelet's probes
    node.api.delete("networking.k8s.io/v1/networkpolicies", "friends", "default")
    node.wait(lambda: reaching_clients() == ["friend", "stranger"], SECONDS)


def test_pods_restart_after_a_power_cut(node, sleeper):
    get_pod = sleeper("survives")
    node.wait(lambda: get_pod().is_ready, SECONDS)
    node.reboot()
    node.wait(lambda: get_pod().container("main")["restartCount"] >= 1 and get_pod().is_ready, SECONDS)


def test_pods_keep_running_without_a_kubelet(node, sleeper):
    get_pod = sleeper("goes-on")
    node.wait(lambda: get_pod().is_ready, SECONDS)
    group = get_pod().group("main")
    node.stop_kubelet()
    try:
        (process,) = (group / "cgroup.procs").read_text().split()
        with pytest.raises(subprocess.CalledProcessError):
            get_pod().exec("main", "true")
    finally:
        node.start_kubelet()

    def answer():
        with contextlib.suppress(subprocess.CalledProcessError):
            return get_pod().exec("main", "echo", "there")

    node.wait(lambda: answer() == "there\n", SECONDS)
    assert (group / "cgroup.procs").read_text().split() == [process]
    assert get_pod().container("main")["restartCount"] == 0
    node.wait(lambda: _is_ready(node), SECONDS)


def _is_ready(node):
    conditions = node.api.get("v1/nodes", NODE)["status"]["conditions"]
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
