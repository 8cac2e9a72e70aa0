"""ConfigMaps, Secrets and NetworkPolicies reach the engine's pod without a restart of any container."""

import base64

from testing.kube.operator import SYSTEM_NAMESPACE
from testing.node.app import NAMESPACE, OPERATOR, PASSWORD, REDIS_NAMESPACE, REDIS_SECRET
from testing.node.pods import ENGINE_PORT, SIDECAR_PORT
from tests.harness.operator.client_pods import client_pod
from tests.harness.operator.pods import (
    is_in_service,
    is_ready,
    no_restart_between,
    prompt,
    stats_after_restart,
)

CONFIG = "tiny-sidecar"
CONFIG_FILE = "/etc/lmcache/config/sidecar.yaml"


def test_sidecar_recovers_from_an_invalid_configuration(tiny):
    """The ConfigMap is edited while no operator runs to restore it."""
    node, before = tiny.node, tiny.ready_pod()
    num_operators = node.api.get("apps/v1/deployments", OPERATOR, SYSTEM_NAMESPACE)["spec"]["replicas"]
    _scale_operator(node, 0)
    try:
        _break_configuration(tiny, before)
    finally:
        _scale_operator(node, num_operators)
    node.wait(lambda: is_ready(before), 180)  # the operator restored it, and the sidecar has read it again
    assert no_restart_between(before, tiny.ready_pod())
    tiny.wait_condition("SidecarAttached")


def _break_configuration(tiny, before) -> None:
    node = tiny.node
    text = node.api.get("v1/configmaps", CONFIG, NAMESPACE)["data"]["sidecar.yaml"]
    broken = {"data": {"sidecar.yaml": f"{text}drain_grace_seconds: many\n"}}
    node.api.patch("v1/configmaps", CONFIG, broken, NAMESPACE)
    node.wait(lambda: "many" in before.exec("sidecar", "cat", CONFIG_FILE), 180)
    pid = before.stats()["pid"]
    before.exec("sidecar", "sh", "-c", f"kill -KILL {pid}")
    assert (
        "drain_grace_seconds" in node.wait(lambda: stats_after_restart(before, pid), 120)["not_ready_reason"]
    )
    assert before.stats()["is_ready"] is False
    assert len(before.complete(prompt(3, 512)).tokens) == 8
    assert is_in_service(tiny)


def _scale_operator(node, replicas: int) -> None:
    node.api.patch("apps/v1/deployments", OPERATOR, {"spec": {"replicas": replicas}}, SYSTEM_NAMESPACE)

    def is_done():
        status = node.api.get("apps/v1/deployments", OPERATOR, SYSTEM_NAMESPACE)["status"]
        return status.get("availableReplicas", 0) == status.get("replicas", 0) == replicas

    node.wait(is_done, 180)


def test_sidecar_uses_a_rotated_password_without_a_restart(tiny):
    before = tiny.ready_pod()
    _rotate(tiny.node, PASSWORD, "second-horse")
    try:
        num_stored_before = before.stats()["remote"]["stored"]
        before.complete(prompt(4), 1)
        tiny.node.wait(lambda: before.stats()["remote"]["stored"] >= num_stored_before + 15, 180)
    finally:
        _rotate(tiny.node, "second-horse", PASSWORD)
    tiny.node.wait(lambda: before.stats()["remote"]["is_reachable"], 180)
    assert no_restart_between(before, tiny.ready_pod())


def _rotate(node, old: str, new: str) -> None:
    """Change the password in Redis, disconnect its clients, and change the Secret."""
    for command in (("CONFIG", "SET", "requirepass", new), ("CLIENT", "KILL", "TYPE", "normal")):
        secret = old if command[0] == "CONFIG" else new
        node.kubectl(
            "exec",
            "-n",
            REDIS_NAMESPACE,
            "kv",
            "--",
            "redis-cli",
            "--no-auth-warning",
            "-a",
            secret,
            *command,
        )
    data = {"data": {"password": base64.b64encode(new.encode()).decode()}}
    node.api.patch("v1/secrets", REDIS_SECRET, data, NAMESPACE)


def test_only_pods_of_the_namespace_reach_the_sidecar(tiny, references):
    pod, node, image = tiny.ready_pod(), tiny.node, references["sidecar"]
    with client_pod(node, NAMESPACE, image) as near, client_pod(node, REDIS_NAMESPACE, image) as far:
        node.wait(lambda: near.reaches(pod, SIDECAR_PORT), 60)
        node.wait(lambda: not far.reaches(pod, SIDECAR_PORT), 60)
        assert far.reaches(pod, ENGINE_PORT)
        assert near.reaches(pod, SIDECAR_PORT)
