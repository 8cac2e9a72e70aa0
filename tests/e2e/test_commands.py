"""``kubectl lmcache`` on a real kubelet, whose network policies hold."""

import json
import threading

import pytest

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
