"""``kubectl lmcache status`` and ``explain`` on a real API server, with real sidecars as pods."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time

import pytest
import yaml

from lmcache.rpc.hello import Role
from lmcache.rpc.session import Scheduled
from testing.child_process import reachable_address
from testing.processes import SidecarProcess
from tests.harness.engine import session_of
from tests.harness.kube import CLUSTERS, NAME, example
from tests.harness.plugin import Plugin, create_pod, kubeconfig_with
from tests.harness.wire import make_keys

pytestmark = [pytest.mark.kube, pytest.mark.usefixtures("no_operator")]

READ = {"apiGroups": ["lmcache.io"], "resources": ["lmcacheclusters"], "verbs": ["get", "list"]}
LIST_PODS = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
GET_PROXY = {"apiGroups": [""], "resources": ["pods/proxy"], "verbs": ["get"]}


@pytest.fixture
def sidecars():
    """Two sidecars that the API server can reach. Each counted one request of 517 tokens."""
    with SidecarProcess(http_host="0.0.0.0") as first, SidecarProcess(http_host="0.0.0.0") as second:
        for number, sidecar in enumerate((first, second)):
            with session_of(sidecar, role=Role.SCHEDULER) as session:
                keys = [(0, make_keys(number, 7))]
                scheduled = Scheduled(num_prompt_tokens=517)
                session.lookup(f"cmpl-{number}", keys, hint=True, scheduled=scheduled)
        yield first, second


@pytest.fixture
def cluster(plane, namespace, sidecars):
    """An LMCacheCluster, and a pod of it for each sidecar."""
    plane.api.create(CLUSTERS, example(), namespace)
    for number, sidecar in enumerate(sidecars):
        create_pod(plane, namespace, NAME, number, port=sidecar.http_port)


@pytest.fixture
def kubectl(plane, namespace, tmp_path):
    return Plugin(plane, tmp_path, namespace)


def test_status_shows_the_figures_of_all_pods(cluster, kubectl, namespace):
    shown = kubectl("status", NAME)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"{namespace}/{NAME}" in shown.stdout
    assert "1,034 tokens of prompts since the sidecars started." in shown.stdout
    assert "\x1b" not in shown.stdout
    status = json.loads(kubectl("status", NAME, "-o", "json").stdout)
    assert [(pod["name"], pod["promptTokens"]) for pod in status["pods"]] == [
        (f"{NAME}-engine-0", 517),
        (f"{NAME}-engine-1", 517),
    ]
    assert status["causeTokens"] == {"new": 1024, "tail": 10}
    assert yaml.safe_load(kubectl("status", "-o", "yaml").stdout)["causeTokens"] == status["causeTokens"]


def test_explain_adds_up_the_causes_and_finds_a_request(cluster, kubectl):
    shown = kubectl("explain")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("1,034 tokens of prompts: 0 % loaded, 100 % computed.")
    assert json.loads(kubectl("explain", "-o", "json").stdout)["pods"] == 2
    shown = kubectl("explain", NAME, "--request-id", "pl-1")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"Pod {NAME}-engine-1.\nRequest cmpl-1: 517 tokens.")
    unknown = kubectl("explain", NAME, "--request-id", "nobody")
    assert unknown.returncode == 2
    assert "no pod knows a request with 'nobody' in its id" in unknown.stderr


def test_explain_adds_up_one_tenant_of_all_pods(cluster, kubectl):
    shown = kubectl("explain", NAME, "--tenant", "default")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("Tenant default.\n1,034 tokens of prompts: 0 % loaded, 100 % computed.")
    assert (
        json.loads(kubectl("explain", NAME, "--tenant", "default", "-o", "json").stdout)["promptTokens"]
        == 1034
    )
    unknown = kubectl("explain", NAME, "--tenant", "search")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "there is no tenant 'search': the tenants are default." in unknown.stderr


def test_read_rights_are_enough(cluster, kubectl, plane, namespace):
    reader = kubeconfig_with(plane, namespace, "reader", [READ, LIST_PODS, GET_PROXY])
    shown = kubectl("status", NAME, "--kubeconfig", reader)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "1,034 tokens" in shown.stdout


@pytest.mark.parametrize(
    ("name", "rules", "status", "text"),
    [
        ("blind", [], 2, "cannot get resource"),
        ("few", [READ], 0, "the pods cannot be listed: pods is forbidden"),
        (
            "some",
            [READ, LIST_PODS],
            0,
            'It needs the right "get pods/proxy", or "get and create pods/portforward"',
        ),
    ],
)
def test_missing_right_is_named(cluster, kubectl, plane, namespace, name, rules, status, text):
    kubeconfig = kubeconfig_with(plane, namespace, name, rules)
    shown = kubectl("status", NAME, "--kubeconfig", kubeconfig)
    assert shown.returncode == status
    assert text in " ".join((shown.stdout + shown.stderr).split())


def test_pods_that_do_not_answer_are_shown_within_five_seconds(cluster, kubectl, plane, namespace):
    with socket.create_server(("0.0.0.0", 0)) as silent:  # accepts, and never answers
        for number in range(2, 150):
            create_pod(plane, namespace, NAME, number, port=silent.getsockname()[1])
        kubectl("status", "--help")  # so that the imports of the next run are in the page cache
        began = time.monotonic()
        shown = kubectl("status", NAME)
        seconds = time.monotonic() - began
    assert shown.returncode == 0
    assert "no answer within 3 s" in shown.stdout
    assert "more pods" in shown.stdout
    assert seconds < 30  # 5 s on a machine that does nothing else


def test_name_is_needed_if_there_are_several_clusters(kubectl, plane, namespace):
    assert "has no LMCacheCluster" in kubectl("status").stderr
    for name in ("one", "two"):
        plane.api.create(CLUSTERS, example() | {"metadata": {"name": name}}, namespace)
    shown = kubectl("status")
    assert shown.returncode == 2
    assert f"name one of the LMCacheClusters of namespace {namespace}: one, two" in shown.stderr


def test_pod_cannot_redirect_a_command(kubectl, plane, namespace):
    """The API server passes a redirect of a pod on, and the command could use its user's rights elsewhere."""
    paths = []

    class Redirect(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(302)
            self.send_header("Location", f"http://{reachable_address()}:{self.server.server_port}/stolen")
            self.end_headers()

    with http.server.ThreadingHTTPServer(("0.0.0.0", 0), Redirect) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        plane.api.create(CLUSTERS, example(), namespace)
        create_pod(plane, namespace, NAME, 0, port=server.server_port)
        shown = kubectl("status", NAME)
        server.shutdown()
        thread.join()
    assert (shown.returncode, paths) == (0, ["/stats"])
    assert "HTTP 302" in shown.stdout
