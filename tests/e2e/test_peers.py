"""Pods that read each other's memory tiers, without a remote tier. The tests depend on their order."""

import base64
import socket
import subprocess
from collections.abc import Iterator

import pytest

from testing.node.app import NAMESPACE, App
from testing.node.pods import ENGINE_PORT, SIDECAR_PORT, Completion, Pod
from tests.harness.operator.client_pods import client_pod
from tests.harness.operator.pods import no_restart_between, prompt

NAME, PEERS_PORT = "peers", 9465
PROMPTS = [prompt(seed, 2048) for seed in range(81, 87)]
LATE_PROMPT = prompt(91, 2048)
ANSWER_SECONDS = "2"
"""Time for peers to answer. The default of 5 ms is for a machine that is not busy."""
SECONDS = 300
"""The kubelet updates a mounted ConfigMap within a minute and a half."""


@pytest.fixture(scope="module")
def app(make_app) -> Iterator[App]:
    app: App = make_app(NAME, peers={})
    del app.spec["spec"]["tiers"]["remote"]
    patient = {"name": "LMCACHE_PEER_ANSWER_SECONDS", "value": ANSWER_SECONDS}
    sidecar = {"name": "sidecar", "env": [patient]}
    app.spec["spec"]["engine"]["podTemplate"]["spec"]["initContainers"] = [sidecar]
    scale(app, 2)
    yield app
    app.delete()


def scale(app: App, replicas: int) -> None:
    app.spec["spec"]["engine"]["replicas"] = replicas
    app.apply()


@pytest.fixture(scope="module")
def cold(app) -> list[Completion]:
    """The answers to all prompts without any cache. Afterwards only the first pod has their rows."""
    pod = app.ready_pod()
    answers = [pod.complete(question) for question in PROMPTS]
    app.node.wait(lambda: pod.stats()["num_unwritten_rows"] == 0, 120)
    return answers


def peers_of(pod: Pod) -> dict[str, str]:
    """The problem of each peer of a pod, by its name; an empty text if it answers."""
    return {server["name"]: server["problem"] for server in pod.stats()["peers"]["servers"]}


def name_of(number: int) -> str:
    return f"{NAME}-engine-{number}.{NAME}-engine.{NAMESPACE}.svc:{PEERS_PORT}"


def tokens_from_peers(pod: Pod) -> int:
    return int(pod.stats()["causes"]["cause_tokens"].get("peers", 0))


def load_from_peers(pod: Pod, cold: list[Completion]) -> None:
    """Ask for prompts that only another pod has, until tokens of one are loaded from there.

    All answers are those without a cache. An engine on a busy machine computes a prompt instead of waiting.
    """
    for question, answer in zip(PROMPTS, cold, strict=True):
        assert pod.complete(question).tokens == answer.tokens
        if tokens_from_peers(pod):
            return
    raise AssertionError(f"no prompt was loaded from another pod: {pod.stats()['peers']}")


def test_each_pod_reads_all_others(app):
    for number in (0, 1):
        pod = app.ready_pod(number)
        app.node.wait(lambda pod=pod, number=number: peers_of(pod) == {name_of(1 - number): ""}, SECONDS)


def test_prompt_of_one_pod_is_a_hit_in_the_other(app, cold):
    assert {answer.num_cached for answer in cold} == {0}
    first, second = app.ready_pod(0), app.ready_pod(1)
    assert second.stats()["memory"]["used_rows"] == 0
    load_from_peers(second, cold)
    assert tokens_from_peers(first) == 0
    assert first.stats()["peer_server"]["read_columns"] > 0
    assert second.stats()["peers"]["invalid"] == {}


def test_only_engine_pods_of_the_cluster_reach_the_port(app, cold, references):
    pod = app.ready_pod()
    with client_pod(app.node, NAMESPACE, references["sidecar"]) as client:
        app.node.wait(lambda: client.reaches(pod, SIDECAR_PORT), 60)
        assert client.reaches(pod, ENGINE_PORT)
        assert not client.reaches(pod, PEERS_PORT)


def ask(pod: Pod, *commands: str) -> bytes:
    """The replies of a pod's port for peers. The node itself reaches every port."""
    with socket.create_connection((pod.address, PEERS_PORT), 10) as connection:
        for command in commands:
            words = command.encode().split()
            connection.sendall(b"*%d\r\n" % len(words))
            connection.sendall(b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words))
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(4096), b""))


def test_only_the_password_opens_the_port_and_the_engine_does_not_have_it(app, cold):
    pod = app.ready_pod()
    secret = app.node.api.get("v1/secrets", app.secret_name("peers"), NAMESPACE)
    password = base64.b64decode(secret["data"]["password"]).decode()
    assert ask(pod, f"AUTH {password}", "PING") == b"+OK\r\n+PONG\r\n"
    assert ask(pod, "AUTH wrong").startswith(b"-WRONGPASS")
    assert ask(pod, "PING").startswith(b"-NOAUTH")
    file = "/etc/lmcache/peers-auth/password"
    assert pod.exec("sidecar", "cat", file) == password
    with pytest.raises(subprocess.CalledProcessError, match="cat"):
        pod.exec("engine", "cat", file)
    assert password not in pod.exec("engine", "env")


def test_engine_serves_while_its_peer_is_frozen(app, cold):
    first, second = app.ready_pod(0), app.ready_pod(1)
    with second.stopped("sidecar"):
        assert len(first.complete(prompt(90)).tokens) == 8


def test_scaling_changes_the_list_of_running_sidecars(app, cold):
    before, removed = app.ready_pod(0), app.ready_pod(1)
    app.node.wait(lambda: peers_of(before) == {name_of(1): ""}, SECONDS)
    late = removed.complete(LATE_PROMPT)
    app.node.wait(lambda: removed.stats()["num_unwritten_rows"] == 0, 120)
    scale(app, 1)
    app.node.wait(lambda: not peers_of(before), SECONDS)
    taken_over = before.complete(LATE_PROMPT)
    assert taken_over.tokens == late.tokens
    assert taken_over.num_cached > 0, "the removed pod had the only rows of this prompt"
    scale(app, 2)
    added = app.ready_pod(1)
    load_from_peers(added, cold)
    app.node.wait(lambda: peers_of(before).keys() == {name_of(1)}, SECONDS)
    after = app.ready_pod(0)
    assert after.uid == before.uid
    assert no_restart_between(before, after)
