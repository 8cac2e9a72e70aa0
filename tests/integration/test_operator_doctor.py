"""``kubectl lmcache doctor`` on a real API server, with real faults, sidecars and Redis servers."""

import json
from contextlib import ExitStack

import pytest
import yaml
from vllm.version import __version__ as vllm_version

from testing.child_process import free_port
from testing.engine.process import ServedEngine, connector_config
from testing.processes import RedisProcess, SidecarProcess
from tests.harness.commands.plugin import GET_PROXY, LIST_PODS, READ, Commands, create_pod, kubeconfig_with
from tests.harness.kube import CLUSTERS, NAME, example

pytestmark = pytest.mark.kube

REDIS = {"remote": {"external": {"url": "redis://redis.cache:6379"}}}


@pytest.fixture
def doctor(plane, chart, no_operator, namespace):
    """Run doctor. Returns its exit status, and level and statement by check."""

    def run(*argv):
        shown = Commands(plane, namespace)("doctor", "-o", "json", *argv)
        assert shown.stderr == ""
        checks = json.loads(shown.stdout)["checks"]
        return shown.returncode, {each["check"]: (each["level"], each["statement"]) for each in checks}

    return run


def create_cluster(plane, namespace, **spec):
    plane.api.create(CLUSTERS, example(**spec), namespace)


def test_healthy_installation_has_no_failure(doctor, plane, namespace):
    lmcache = Commands(plane, namespace)
    with SidecarProcess(http_host="0.0.0.0") as sidecar:
        create_cluster(plane, namespace, engine={"replicas": 1})
        create_pod(plane, namespace, NAME, 0, port=sidecar.http_port)
        mark = plane.mark()
        status, checks = doctor()
        assert plane.written_since(mark, by="admin", namespace=namespace) == []
        shown = lmcache("doctor", NAME)
    for check in (
        "kubernetesVersion", "crd:lmcacheclusters", "crd:lmcacheprofiles", "operator", "versions", "clocks",
        "watchedNamespace", "userRights", "operatorRights", "spec", "podAdmission", "sidecarVersions",
        "podClocks",
    ):  # fmt: skip
        assert checks[check][0] == "ok", checks[check]
    # The pod is Ready, and no engine is attached.
    assert checks["sidecars"] == (
        "failure",
        f"An engine serves without the cache. This concerns 1 pod: {NAME}-engine-0.",
    )
    assert status == 1
    first, second, third = shown.stdout.splitlines()[:3]
    assert first.startswith(f"FAILURE {namespace}/{NAME} sidecars: An engine serves without the cache.")
    assert "-> Read the lines of LMCache in its log." in f"{second} {third}"
    assert "\x1b" not in shown.stdout
    assert yaml.safe_load(lmcache("doctor", "-o", "yaml").stdout)["version"] == 1


@pytest.mark.vllm
def test_engine_and_its_sidecar_are_checked(doctor, plane, namespace, tmp_path):
    with ExitStack() as stack:
        server = stack.enter_context(RedisProcess(maxmemory="64mb", maxmemory_policy="allkeys-lru"))
        sidecar = stack.enter_context(SidecarProcess(http_host="0.0.0.0", remote_url=server.url))
        port, config = free_port(), connector_config(sidecar.socket_path)
        more = ("--host=0.0.0.0", "--enable-prefix-caching")
        engine = stack.enter_context(ServedEngine(tmp_path / "log", port, config, *more))
        engine.wait_ready()
        sidecar.wait_until(lambda stats: stats["num_clients"]["attached"], timeout=300)
        args = [f"--port={port}", f"--kv-transfer-config={json.dumps(config)}"]
        args.append("--prefix-caching-hash-algo=sha256_cbor")
        create_cluster(plane, namespace, tiers={"memory": {"size": "1Gi"}, **REDIS})
        create_pod(plane, namespace, NAME, 0, port=sidecar.http_port, command=["vllm", "serve"], args=args)
        _, checks = doctor(NAME)
    assert checks["sidecars"] == ("ok", "Sidecars that are ready and in use: 1.")
    assert checks["engineVersion"] == ("ok", f"The engines run vLLM {vllm_version}.")
    text = "Servers with an allkeys policy and a memory limit of 64Mi: 1."
    assert checks["remoteSettings"] == ("ok", text)
    assert checks["engineSettings"] == ("ok", "Prefix caching is on. A block has 32 tokens.")
    for check in ("engineArguments", "privateKeys", "sidecarVersions", "remoteReachable", "remoteRefusals"):
        assert checks[check][0] == "ok", checks[check]


def test_answer_of_the_api_server_to_a_new_pod_is_shown(doctor, plane, namespace):
    model = example()["spec"]["model"] | {"volume": {"hostPath": {"path": "/models"}}}
    create_cluster(plane, namespace, model=model)

    def label(**levels):
        labels = {f"pod-security.kubernetes.io/{mode}": level for mode, level in levels.items()}
        plane.api.patch("v1/namespaces", namespace, {"metadata": {"labels": labels}})

    def wait_for(level, text):  # the API server reads its own rules with a delay
        def is_shown():
            shown_level, statement = doctor()[1]["podAdmission"]
            return shown_level == level and text in statement

        plane.wait(is_shown)

    wait_for("ok", "The API server admits pods of component engine.")
    label(warn="baseline")
    wait_for("warning", 'and warns: would violate PodSecurity "baseline:latest": hostPath volumes')
    label(warn=None, enforce="baseline")
    wait_for("failure", 'is forbidden: violates PodSecurity "baseline:latest": hostPath volumes')
    label(enforce=None)
    quota = {"metadata": {"name": "small"}, "spec": {"hard": {"requests.memory": "1Gi"}}}
    plane.api.create("v1/resourcequotas", quota, namespace)
    wait_for("failure", "exceeded quota: small, requested: requests.memory=")
    limits = [{"type": "Container", "max": {"memory": "64Mi"}}]
    plane.api.create("v1/limitranges", {"metadata": {"name": "low"}, "spec": {"limits": limits}}, namespace)
    wait_for("failure", "must be less than or equal to memory limit of 64Mi")
    assert doctor()[0] == 1
    assert plane.api.objects("v1/pods", namespace) == []


@pytest.mark.parametrize(
    ("name", "rules", "status", "check", "right"),
    [
        ("blind", [], 2, "clusters", "list lmcacheclusters.lmcache.io"),
        # A user who reads the sidecar sees that no engine is attached.
        ("reader", [READ, LIST_PODS, GET_PROXY], 1, "operator", "list deployments.apps"),
    ],
)
def test_missing_right_is_named(plane, namespace, no_operator, name, rules, status, check, right):
    with SidecarProcess(http_host="0.0.0.0") as sidecar:
        create_cluster(plane, namespace)
        create_pod(plane, namespace, NAME, 0, port=sidecar.http_port)
        lmcache = Commands(plane, namespace, kubeconfig_with(plane, namespace, name, rules))
        shown = lmcache("doctor", "-o", "json")
    checks = {each["check"]: each for each in json.loads(shown.stdout)["checks"]}
    assert (checks[check]["level"], checks[check]["missingRight"]) == ("unknown", right)
    assert checks["kubernetesVersion"]["level"] == "ok"
    assert shown.returncode == status
