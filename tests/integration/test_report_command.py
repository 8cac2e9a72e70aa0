"""``kubectl lmcache report`` on a real API server, with real sidecars as pods."""

from __future__ import annotations

import socket
import time

import pytest

from lmcache.rpc.hello import Role
from lmcache.rpc.session import Scheduled
from testing.processes import SidecarProcess
from tests.harness.engine import session_of
from tests.harness.kube import CLUSTERS, NAME, example
from tests.harness.plugin import Plugin, create_pod, kubeconfig_with
from tests.harness.wire import make_keys

pytestmark = [pytest.mark.kube, pytest.mark.usefixtures("no_operator")]

READ = {"apiGroups": ["lmcache.io"], "resources": ["lmcacheclusters"], "verbs": ["get", "list"]}
LIST_PODS = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}


@pytest.fixture
def cluster(plane, namespace):
    """An LMCacheCluster with a pod whose sidecar counted one request of 517 tokens."""
    plane.api.create(CLUSTERS, example(), namespace)
    with SidecarProcess(http_host="0.0.0.0") as sidecar:
        with session_of(sidecar, role=Role.SCHEDULER) as session:
            scheduled = Scheduled(num_prompt_tokens=517)
            session.lookup("cmpl-0", [(0, make_keys(0, 7))], hint=True, scheduled=scheduled)
        create_pod(plane, namespace, NAME, 0, port=sidecar.http_port)
        yield sidecar


@pytest.fixture
def kubectl(plane, namespace, tmp_path):
    return Plugin(plane, tmp_path, namespace)


@pytest.fixture
def silent_server():
    """The URL of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_report_is_written_with_figures_and_events(cluster, kubectl, plane, namespace, tmp_path):
    resource = plane.api.get(CLUSTERS, NAME, namespace)
    involved = {key: resource["metadata"][key] for key in ("name", "namespace", "uid")}
    message = "The memory tier grows to <b>128Gi</b>."
    plane.api.create(
        "v1/events",
        {
            "metadata": {"name": "decision"}, "type": "Normal", "reason": "Resizing", "message": message,
            "involvedObject": {"apiVersion": resource["apiVersion"], "kind": resource["kind"], **involved},
            "lastTimestamp": "2026-11-18T09:30:00Z",
        },
        namespace,
    )  # fmt: skip
    file = tmp_path / "cache report.html"
    completed = kubectl("report", NAME, "-o", file)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert completed.stdout == f"Wrote {file}. Open it in a browser: {file.as_uri()}\n"
    text = file.read_text()
    assert "Engines computed 517 of 517 prompt tokens." in text
    assert "The memory tier grows to &lt;b&gt;128Gi&lt;/b&gt;." in text
    assert "2026-11-18 09:30" in text
    assert f"{NAME}-engine-0" in text
    assert kubectl("report", "-o", "-").stdout.startswith("<!DOCTYPE html>")


def test_prometheus_that_never_answers_becomes_a_sentence(cluster, kubectl, silent_server, tmp_path):
    file = tmp_path / "report.html"
    before = time.monotonic()
    completed = kubectl("report", NAME, "-o", file, "--prometheus", silent_server)
    assert completed.returncode == 0
    assert time.monotonic() - before < 30  # 5 s on a machine that does nothing else
    text = file.read_text()
    assert f"Prometheus at {silent_server} did not answer within 4 s." in text
    assert "Engines computed 517 of 517 prompt tokens." in text


def test_report_says_which_rights_are_missing(cluster, plane, namespace, tmp_path):
    limited = kubeconfig_with(plane, namespace, "limited", [READ, LIST_PODS])
    completed = Plugin(plane, tmp_path, namespace, limited)("report", NAME, "-o", "-")
    assert completed.returncode == 0
    assert "The Events cannot be listed: events is forbidden" in completed.stdout
    assert "It needs the right &quot;get pods/proxy&quot;" in completed.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--since", "soon"], "'soon' is not a time from 1m to 366d"),
        (["--since", "367d"], "'367d' is not a time from 1m to 366d"),
        (["--prometheus", "localhost"], "'localhost' is not a URL such as http://localhost:9090"),
        (["--prometheus", "http://[::1"], "is not a URL"),
    ],
)
def test_bad_options_are_refused(kubectl, options, message):
    completed = kubectl("report", NAME, *options)
    assert completed.returncode == 2
    assert message in completed.stderr


def test_file_that_cannot_be_written_is_an_error(cluster, kubectl, tmp_path):
    completed = kubectl("report", NAME, "-o", tmp_path / "missing" / "report.html")
    assert completed.returncode == 2
    assert completed.stderr.endswith("report.html: No such file or directory\n")


def test_missing_cluster_is_an_error(kubectl, tmp_path):
    completed = kubectl("report", "nobody", "-o", tmp_path / "report.html")
    assert completed.returncode == 2
    assert "there is no LMCacheCluster nobody" in completed.stderr
    assert not (tmp_path / "report.html").exists()
