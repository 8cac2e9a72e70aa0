"""``kubectl lmcache`` on a real kubelet, whose containers have logs, and whose network policies hold."""

import json
import threading
from typing import Any
from zipfile import ZipFile

import pytest

from testing.kube.operator import SYSTEM_NAMESPACE
from testing.node.app import NAMESPACE
from tests.harness.commands.plugin import LIST_PODS, READ, Plugin, kubeconfig_with
from tests.harness.operator.pods import prompt


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
        while not stop.wait(0.2):  # an engine that never pauses would leave the sidecar no core
            pod.complete(prompt(31, 2048), 1)

    def reading() -> tuple[int, dict[str, Any]] | None:
        """Figures of top; None if the sidecar did not answer or no request was counted in the two seconds of
        a reading: a machine without a free core may be that late."""
        top = kubectl("top", "tiny", "--once", "-o", "json")
        (figures,) = json.loads(top.stdout)["pods"]
        is_late = figures["problem"].startswith("no answer within") or not figures["requestsPerSecond"]
        return None if is_late else (top.returncode, figures)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        returncode, figures = tiny.node.wait(reading)
    finally:
        stop.set()
        asking.join()
    assert (returncode, figures["problem"]) == (0, "")
    assert figures["requestsPerSecond"] > 0
    assert figures["tokensPerSecond"]["engine"] > 0


def test_report_has_the_logs_of_engine_sidecar_and_operator(tiny, kubectl, tmp_path):
    pod = tiny.ready_pod()
    shown = kubectl("report", "tiny", "-o", tmp_path / "report.zip")
    assert shown.returncode == 0, shown.stderr  # a previous log may be missing: the kubelet deletes old ones
    with ZipFile(tmp_path / "report.zip") as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    log = files[f"logs/{NAMESPACE}/{pod.name}/sidecar.log"].splitlines()
    raw = pod.logs("sidecar").splitlines()
    assert [line.partition(" ")[2] for line in log[:10]] == raw[:10]
    assert files[f"logs/{NAMESPACE}/{pod.name}/engine.log"]
    logs_of_operator = [name for name in files if name.startswith(f"logs/{SYSTEM_NAMESPACE}/")]
    assert any(f"{NAMESPACE}/tiny: " in files[name] for name in logs_of_operator)


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
