"""``kubectl lmcache`` on a real kubelet, whose containers have logs, and whose network policies hold."""

import json
import subprocess
import threading

import pytest

from testing.child_process import wait_until
from testing.kube.operator import SYSTEM_NAMESPACE
from testing.node.app import NAMESPACE
from tests.harness.plugin import LIST_PODS, READ, Plugin, kubeconfig_with
from tests.harness.pods import prompt


@pytest.fixture
def kubectl(installed, tmp_path) -> Plugin:
    return Plugin(installed, tmp_path, NAMESPACE)


def test_status_and_top_reach_the_sidecar_through_network_policies(tiny, kubectl):
    pod = tiny.ready_pod()
    pod.complete(prompt(31, 2048))
    shown = kubectl("status", "tiny")
    assert (shown.returncode, shown.stderr) == (0, "")
    (row,) = [line for line in shown.stdout.splitlines() if line.startswith(pod.name)]
    assert "in use" in row
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            pod.complete(prompt(31, 2048), 1)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        top = kubectl("top", "tiny", "--once", "-o", "json")
    finally:
        stop.set()
        asking.join()
    (figures,) = json.loads(top.stdout)["pods"]
    assert (top.returncode, figures["problem"]) == (0, "")
    assert figures["requestsPerSecond"] > 0
    assert figures["tokensPerSecond"]["engine"] > 0


def test_logs_of_engine_sidecar_and_operator_are_merged_by_time(tiny, kubectl):
    pod = tiny.ready_pod()
    shown = kubectl("logs", "tiny", "--since", "24h", "-o", "json")
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    times = [line["time"] for line in lines]
    assert times == sorted(times)
    containers = {(line["component"], line["container"]) for line in lines}
    assert {("engine", "engine"), ("sidecar", "sidecar")} <= containers
    of_operator = [line for line in lines if line["component"] == "operator"]
    assert {line["namespace"] for line in of_operator} == {SYSTEM_NAMESPACE}
    assert any(f"{NAMESPACE}/tiny: " in line["message"] for line in of_operator)
    raw = pod.logs("sidecar").splitlines()
    assert [line["message"] for line in lines if line["component"] == "sidecar"][: len(raw)] == raw
    few = kubectl(
        "logs", "tiny", "--component", "engine", "--tail", "3", "--since", "24h"
    ).stdout.splitlines()
    assert len(few) == 3
    assert all(f" {pod.name}/engine " in line for line in few)


def test_followed_logs_show_a_new_request(tiny, kubectl, tmp_path):
    pod = tiny.ready_pod()
    words = ["kubectl", "lmcache", "logs", "-n", NAMESPACE, "tiny", "--follow", "--since", "1s"]
    output = tmp_path / "lines"
    with output.open("wb") as file:
        following = subprocess.Popen(words, env=kubectl.environment, stdout=file, stderr=subprocess.STDOUT)
    try:

        def is_shown() -> bool:
            assert following.poll() is None, output.read_text()
            pod.complete(prompt(32, 256), 1)
            return "POST /v1/completions" in output.read_text()

        wait_until(is_shown, timeout=120)
    finally:
        following.terminate()
        following.wait()


@pytest.mark.parametrize(
    ("name", "resource", "verbs"),
    [("proxy", "pods/proxy", ["get"]), ("forward", "pods/portforward", ["get", "create"])],
)
def test_each_of_the_two_rights_is_enough(tiny, installed, kubectl, name, resource, verbs):
    """The network policies admit no one but scrapers and the operator to the sidecar's port."""
    pod = tiny.ready_pod()
    rules = [READ, LIST_PODS, {"apiGroups": [""], "resources": [resource], "verbs": verbs}]
    kubeconfig = kubeconfig_with(installed, NAMESPACE, f"reads-by-{name}", rules)
    shown = kubectl("status", "tiny", "--kubeconfig", kubeconfig)
    (row,) = [line for line in shown.stdout.splitlines() if line.startswith(pod.name)]
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "in use" in row
