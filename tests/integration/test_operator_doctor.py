"""``kubectl lmcache doctor`` on a real API server, with real faults, sidecars and Redis servers."""

import gc
import itertools
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import yaml
from vllm.version import __version__ as vllm_version

from testing.child_process import free_port
from testing.engine.process import ServedEngine, connector_config
from testing.kube.cluster import Cluster
from testing.kube.operator import ROOT
from testing.processes import RedisProcess, SidecarProcess
from tests.harness.commands.faulty_api import faulty_api
from tests.harness.commands.plugin import (
    GET_PROXY,
    LIST_PODS,
    READ,
    Commands,
    Plugin,
    create_pod,
    kubeconfig_with,
)
from tests.harness.kube import CLUSTERS, NAME, example

pytestmark = pytest.mark.kube

PATIENCE = ("--timeout", "100")  # a busy machine takes more than the usual five seconds
REDIS = {"remote": {"external": {"url": "redis://redis.cache:6379"}}}


@pytest.fixture
def doctor(plane, chart, no_operator, namespace):
    """Run doctor. Returns its exit status, and level and statement by check."""

    def run(*argv):
        shown = Commands(plane, namespace)("doctor", "-o", "json", *PATIENCE, *argv)
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
        shown = lmcache("doctor", NAME, *PATIENCE)
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
    assert "-> Read the lines of LMCache in its log:" in f"{second} {third}"
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
        shown = lmcache("doctor", "-o", "json", *PATIENCE)
    checks = {each["check"]: each for each in json.loads(shown.stdout)["checks"]}
    assert (checks[check]["level"], checks[check]["missingRight"]) == ("unknown", right)
    assert checks["kubernetesVersion"]["level"] == "ok"
    assert shown.returncode == status


@pytest.fixture(scope="module")
def empty() -> Iterator[Cluster]:
    """A Kubernetes cluster without the chart and its CRDs."""
    with Cluster(num_nodes=1) as plane:
        yield plane


class Repairs:
    """Runs doctor in a namespace, and pastes the commands that it prints."""

    def __init__(self, plane, folder, kubeconfig=None, namespace="team"):
        self.plane, self.plugin = plane, Plugin(plane, folder, namespace)
        self.lmcache = Commands(plane, namespace, kubeconfig)

    def failures(self, *options):
        shown = self.lmcache("doctor", "-o", "json", *(options or PATIENCE))
        assert shown.stderr == ""
        return [each for each in json.loads(shown.stdout)["checks"] if each["level"] == "failure"]

    def paste(self, command):
        words = ["sh", "-ec", command]
        done = subprocess.run(words, cwd=ROOT, env=self.plugin.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def repair(self, check, text):
        """Wait for a failure, check that it is the only one, and that its command repairs it."""
        (failure,) = self.plane.wait(self.failures)
        assert failure["check"] == check
        assert text in failure["statement"]
        self.paste(failure["command"])
        self.plane.wait(lambda: not self.failures())


def test_one_cause_is_one_failure_whose_command_repairs_it(empty, tmp_path):
    doctor = Repairs(empty, tmp_path)
    (absent,) = doctor.failures()
    assert absent["check"] == "installed"
    assert "not installed in the Kubernetes cluster of context local" in absent["statement"]
    assert "choose another with --context" in absent["remedy"]
    doctor.paste(absent["command"])
    doctor.repair("namespace", "There is no namespace team")
    operator = ("-n", "lmcache-system", "deployment/lmcache-lmcache-operator")
    empty.kubectl("scale", *operator, "--replicas=0")
    doctor.repair("operator", "is scaled to 0 pods")
    empty.kubectl("delete", "clusterrolebinding", "-l", "app.kubernetes.io/instance=lmcache")
    doctor.repair("operatorRights", "The operator lacks rights in namespace team")
    empty.kubectl("delete", "crd", "lmcacheclusters.lmcache.io", "lmcacheprofiles.lmcache.io")
    doctor.repair("crd", "lacks the CRD lmcacheclusters.lmcache.io and the CRD lmcacheprofiles.lmcache.io")
    empty.helm("uninstall", "lmcache", "-n", "lmcache-system", "--wait")  # keeps the CRDs
    doctor.repair("operator", "No operator is installed")
    empty.helm("upgrade", "lmcache", ROOT / "charts/lmcache-operator", "-n", "lmcache-system",
              "--set", "watchNamespaces={default}")  # fmt: skip
    doctor.repair("watchedNamespace", "The operator does not watch namespace team.")


def test_quota_is_a_failure_only_while_it_refuses_a_pod(plane, chart, no_operator, namespace, tmp_path):
    doctor = Repairs(plane, tmp_path, namespace=namespace)
    resource = example(engine={"replicas": 1})
    plane.api.create(CLUSTERS, resource, namespace)
    quota = {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "1", "requests.memory": "1Gi"}}}
    plane.api.create("v1/resourcequotas", quota, namespace)
    doctor.repair("podAdmission", "exceeded quota: small, requested: requests.memory=")
    labels = {"lmcache.io/cluster": NAME, "lmcache.io/component": "engine"}
    resources = {"requests": {"memory": "1Gi"}}
    container = {"name": "engine", "image": "i", "resources": resources}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    engines = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template, "serviceName": NAME}
    metadata = {"name": f"{NAME}-engine", "labels": labels}
    plane.api.create("apps/v1/statefulsets", {"metadata": metadata, "spec": engines}, namespace)
    plane.kubectl("-n", namespace, "rollout", "status", f"statefulset/{NAME}-engine", "--timeout=300s")
    assert doctor.failures() == []  # the quota is full, and no pod is missing
    plane.kubectl("-n", namespace, "scale", f"statefulset/{NAME}-engine", "--replicas=3")
    plane.wait(lambda: len(plane.api.objects("v1/pods", namespace)) == 1)
    doctor.repair("podAdmission", "exceeded quota: small, requested: pods=1, used: pods=1, limited: pods=1.")


def test_missing_rights_are_granted_by_the_pasted_commands(plane, chart, no_operator, namespace, tmp_path):
    create_cluster(plane, namespace)
    kubeconfig = kubeconfig_with(plane, namespace, "blind", [])
    lmcache = Commands(plane, namespace, kubeconfig)
    checks = json.loads(lmcache("doctor", "-o", "json", *PATIENCE).stdout)["checks"]
    (rights,) = [each for each in checks if each["check"] == "userRights"]
    Repairs(plane, tmp_path, namespace=namespace).paste(rights["command"])
    plane.wait(lambda: f"ok      {namespace} userRights" in lmcache("doctor", *PATIENCE).stdout)


def is_about_definitions(path):
    return "customresourcedefinitions" in path


@pytest.mark.parametrize(
    ("fault", "options", "reason", "shown"),
    [
        ((4, 0), ("--timeout", "5"), "no answer within 3 s", "ok      "),
        ((0, 500), PATIENCE, "HTTP 500: not today", "check passed"),
    ],
)
def test_api_server_that_lacks_answers_is_one_failure(
    plane, chart, no_operator, namespace, tmp_path, fault, options, reason, shown
):
    faults = {True: fault, False: (0, 0)}
    with faulty_api(plane, lambda path: faults[is_about_definitions(path)], tmp_path) as kubeconfig:
        doctor = Repairs(plane, tmp_path, kubeconfig, namespace)
        (failure,) = doctor.failures(*options)
        assert failure["check"] == "apiServer"
        assert re.search(f": {reason}. Not checked: .*crd:lmcacheclusters", failure["statement"])
        assert shown in doctor.paste(failure["command"])


def test_api_server_that_is_too_busy_is_asked_again(plane, chart, no_operator, namespace, tmp_path):
    asked = Counter()

    def fault(path):
        asked[path] += is_about_definitions(path)
        return 0, 429 if asked[path] == 1 else 0

    with faulty_api(plane, fault, tmp_path) as kubeconfig:
        assert Repairs(plane, tmp_path, kubeconfig, namespace).failures() == []
    assert sorted(asked.values())[-2:] == [2, 2]


def test_api_server_that_hangs_ends_in_one_line(plane, chart, no_operator, namespace, tmp_path, caplog):
    began = itertools.count()

    def fault(path):
        return (0 if next(began) < 2 else 4), 0

    with faulty_api(plane, fault, tmp_path) as kubeconfig:
        shown = Commands(plane, namespace, kubeconfig)("doctor")
    gc.collect()
    assert (shown.returncode, shown.stderr, caplog.records) == (1, "", [])
    assert shown.stdout.count("FAILURE") == 1
