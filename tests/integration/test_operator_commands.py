"""Commands of ``kubectl lmcache`` on a real API server, with real sidecars as pods."""

import base64
import json
from contextlib import ExitStack
from zipfile import ZipFile

import pytest
import yaml

from lmcache_client.rpc.hello import Role
from lmcache_client.rpc.kvcache_pb2 import Scheduled
from testing.processes import SidecarProcess
from tests.harness.commands.plugin import (
    GET_PROXY,
    LIST_PODS,
    READ,
    Commands,
    Plugin,
    create_pod,
    kubeconfig_with,
)
from tests.harness.engine import session_of
from tests.harness.fences import difference, output
from tests.harness.kube import CLUSTERS, NAME, example, new_namespace, stop_operator
from tests.harness.sidecar.wire import make_keys

pytestmark = [pytest.mark.kube, pytest.mark.usefixtures("no_operator")]


@pytest.fixture(scope="module")
def namespace(plane):
    """A namespace with an LMCacheCluster and two pods. Each sidecar counted one request of 517 tokens."""
    stop_operator()  # it would create pods of the same names
    with new_namespace(plane, "commands") as name, ExitStack() as stack:
        # Mode Off, so that no operator of other tests fills the status.
        plane.api.create(CLUSTERS, example(autoscaling={"mode": "Off"}), name)
        for number in range(2):
            sidecar = stack.enter_context(SidecarProcess(http_host="0.0.0.0"))
            with session_of(sidecar, role=Role.SCHEDULER) as session:
                scheduled = Scheduled(num_prompt_tokens=517)
                session.lookup(f"cmpl-{number}", [(0, make_keys(number, 7))], hint=True, scheduled=scheduled)
            create_pod(plane, name, NAME, number, port=sidecar.http_port)
        yield name


@pytest.fixture
def kubectl(plane, namespace, tmp_path):
    return Plugin(plane, tmp_path, namespace)


@pytest.fixture
def lmcache(plane, namespace):
    return Commands(plane, namespace)


def succeed(completed):
    assert (completed.returncode, completed.stderr) == (0, "")
    return completed.stdout


def test_status_shows_the_figures_of_all_pods(kubectl, lmcache, namespace):
    shown = succeed(kubectl("status", NAME))
    assert f"{namespace}/{NAME}" in shown
    assert "1,034 tokens of prompts since the sidecars started." in shown
    assert "\x1b" not in shown
    status = json.loads(succeed(lmcache("status", NAME, "-o", "json")))
    assert [(pod["name"], pod["promptTokens"]) for pod in status["pods"]] == [
        (f"{NAME}-engine-0", 517),
        (f"{NAME}-engine-1", 517),
    ]
    assert status["causeTokens"] == {"new": 1024, "tail": 10}
    assert yaml.safe_load(lmcache("status", "-o", "yaml").stdout)["causeTokens"] == status["causeTokens"]


def test_explain_adds_up_the_causes_and_finds_a_request(lmcache):
    sums = "1,034 tokens of prompts: 0 % loaded, 100 % computed."
    shown = succeed(lmcache("explain"))
    assert shown.startswith(sums)
    assert not difference(output("how-to/see-whether-the-cache-helps.md", "lmcache explain"), shown)
    assert succeed(lmcache("explain", "--tenant", "default")).startswith(f"Tenant default.\n{sums}")
    shown = succeed(lmcache("explain", NAME, "--request-id", "pl-1"))
    assert shown.startswith(f"Pod {NAME}-engine-1.\nRequest cmpl-1: 517 tokens.")


def test_top_counts_all_pods(lmcache):
    assert succeed(lmcache("top", NAME, "--once")).startswith("2 of 2 pods counted, ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["explain", "--tenant", "search"], "there is no tenant 'search': the tenants are default."),
        (["explain", "--request-id", "x"], "no pod knows a request with 'x' in its id"),
        *(
            ([command, "nobody"], "there is no LMCacheCluster nobody in namespace commands: ")
            for command in ("status", "explain", "hints", "top", "curve", "report", "doctor")
        ),
    ],
    ids=str,
)
def test_unknown_name_is_an_error(lmcache, tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    shown = lmcache(*words)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert sentence in shown.stderr
    assert list(tmp_path.iterdir()) == []


def test_several_clusters_are_a_list_or_need_a_name(plane):
    with new_namespace(plane, "two-clusters") as namespace:
        lmcache = Commands(plane, namespace)
        for command in ("status", "top"):
            assert f"namespace {namespace} has no LMCacheCluster" in lmcache(command).stderr
        for name in ("one", "two"):
            plane.api.create(CLUSTERS, example() | {"metadata": {"name": name}}, namespace)
        listed, refused = lmcache("status"), lmcache("curve")
        explained, document = lmcache("explain"), lmcache("explain", "-o", "json")
        unknown, of_all = lmcache("explain", "--tenant", "x"), lmcache("explain", "--request-id", "x")
    rows = [line.split()[:5] for line in succeed(listed).splitlines()[1:3]]
    assert rows == [[namespace, name, "No", "status", "yet"] for name in ("one", "two")]
    for each in (refused, unknown):  # these are about one cluster
        assert each.returncode == 2
        assert f"name one of the LMCacheClusters of namespace {namespace}: one, two" in each.stderr
    titles = [line for line in succeed(explained).splitlines() if line.startswith(namespace)]
    assert titles == [f"{namespace}/one", f"{namespace}/two"]
    assert [each["name"] for each in json.loads(succeed(document))["clusters"]] == ["one", "two"]
    assert "no pod knows a request with 'x' in its id" in of_all.stderr


@pytest.mark.parametrize(
    ("name", "rules", "status", "text"),
    [
        ("blind", [], 2, "cannot get resource"),
        ("few", [READ], 0, "the pods cannot be listed: pods is forbidden"),
        ("some", [READ, LIST_PODS], 0, 'It needs the right "get pods/proxy", or "get and create pods/portfo'),
        ("reader", [READ, LIST_PODS, GET_PROXY], 0, "1,034 tokens of prompts"),
    ],
)
def test_missing_right_is_named(plane, namespace, name, rules, status, text):
    shown = Commands(plane, namespace, kubeconfig_with(plane, namespace, name, rules))("status", NAME)
    assert shown.returncode == status
    assert text in " ".join((shown.stdout + shown.stderr).split())


def test_report_has_all_parts_and_no_secret(plane, tmp_path):
    secret = "hunter2-Zq8vXw"
    with new_namespace(plane, "report") as namespace, SidecarProcess(http_host="0.0.0.0") as sidecar:
        plane.api.create(CLUSTERS, example(autoscaling={"mode": "Off"}), namespace)
        labels, data = {"lmcache.io/cluster": NAME}, {"password": secret}
        named = {"metadata": {"name": NAME, "labels": labels}}
        plane.api.create("v1/secrets", {**named, "stringData": data}, namespace)
        plane.api.create(
            "v1/configmaps", {**named, "data": {"a": f"redis://:{secret}@redis:6379"}}, namespace
        )
        source = {"secretKeyRef": {"name": NAME, "key": "password"}}
        env = [
            {"name": "REDIS_PASSWORD", "valueFrom": source},
            {"name": "HF_TOKEN", "value": secret},
            {"name": "HF_HOME", "value": "/models"},
        ]
        create_pod(plane, namespace, NAME, 0, port=sidecar.http_port, env=env, args=["--api-key", secret])
        event = {"metadata": {"name": "a"}, "message": f"The token is {secret}.", "reason": "Failed"}
        involved = {"kind": "Pod", "name": f"{NAME}-engine-0", "namespace": namespace}
        plane.api.create("v1/events", {**event, "involvedObject": involved}, namespace)
        file = tmp_path / "cache report.zip"
        shown = Commands(plane, namespace)("report", NAME, "-o", file)
        limited = kubeconfig_with(plane, namespace, "limited", [READ, LIST_PODS])
        few = Commands(plane, namespace, limited)("report", "-o", tmp_path / "few.zip")
    assert (shown.returncode, few.returncode) == (0, 0)
    assert shown.stdout.startswith(f"Wrote {file} ({file.stat().st_size / 1e3:,.0f} kB).")
    content = files_of(file)
    for part in (file.read_bytes(), *content.values()):
        assert secret.encode() not in part
        assert base64.b64encode(secret.encode()) not in part
    assert not any("/Secret/" in name for name in content)
    pod = yaml.safe_load(content[f"objects/{namespace}/Pod/{NAME}-engine-0.yaml"])
    [engine] = pod["spec"]["containers"]
    assert engine["args"] == ["--api-key", "<removed>"]
    values = {"REDIS_PASSWORD": None, "HF_TOKEN": "<removed>", "HF_HOME": "/models"}
    assert {each["name"]: each.get("value") for each in engine["env"]} == values
    assert yaml.safe_load(content[f"objects/{namespace}/ConfigMap/{NAME}.yaml"])["data"] == {
        "a": "redis://:<removed>@redis:6379"
    }
    assert yaml.safe_load(content[f"objects/{namespace}/LMCacheCluster/{NAME}.yaml"])["spec"]
    assert "The token is <removed>." in content["events.yaml"].decode()
    assert yaml.safe_load(content[f"stats/{NAME}-engine-0.yaml"])["version"]
    assert f"{namespace}/{NAME}" in content["status.txt"].decode()
    assert b"gitVersion" in content["versions/kubernetes.json"]
    # Pods of this test have no kubelet, and so no logs.
    assert f"logs/{namespace}/{NAME}-engine-0/engine.log: " in content["errors.txt"].decode()
    assert f"logs/{namespace}/{NAME}-engine-0/engine.log: " in shown.stderr
    missing = files_of(tmp_path / "few.zip")["errors.txt"].decode()
    for plural in ("events", "configmaps", "statefulsets.apps", "pods"):
        assert f"{plural} is forbidden" in missing
    assert "forbidden: get pods/proxy" in missing


def files_of(archive):
    """The files of a zip file by name."""
    with ZipFile(archive) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def test_kubectl_lists_the_plugin_and_completes_its_words(kubectl, plane, namespace, tmp_path):
    def suggested(*words: str) -> list[str]:
        *lines, directive = kubectl.run("__complete", "lmcache", *words).splitlines()
        assert directive == ":0"
        return [line.partition("\t")[0] for line in lines]

    # An installation of this project may be elsewhere on the PATH. kubectl would report the second plugin.
    kubectl.environment["PATH"] = f"{plane.bin}:{tmp_path}:/usr/bin:/bin"
    assert f"{tmp_path}/kubectl-lmcache" in kubectl.run("plugin", "list").splitlines()
    assert suggested("stat") == ["status"]
    assert suggested("status", "-n", namespace, "") == [NAME]
    assert suggested("status", "-n", namespace[:-1]).count(namespace) == 1
