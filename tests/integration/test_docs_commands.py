"""The commands of Get started, of the how-to pages and of guides, run page by page on a real API server.

The chart is installed by Helm, and the operator runs as a process. Pods are on fake nodes. Commands that need
a container therefore only check their arguments (``tests.harness.commands.kubectl_stand_in``).
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from testing.kube.api import Object
from testing.kube.cluster import Cluster
from testing.kube.operator import CHART, CLUSTERS, ROOT, SERVICE_ACCOUNT, SYSTEM_NAMESPACE, Operator
from testing.processes import RedisProcess, SidecarProcess
from tests.harness.commands.json_server import JsonHandler, serving
from tests.harness.commands.terminal import Terminal, facts
from tests.harness.fences import COMMANDS, DOCS, PAGES, Fence, fences
from tests.harness.kube import alone, new_namespace
from tests.harness.operator.devices import published

pytestmark = [pytest.mark.kube, pytest.mark.rotating("file")]

EXAMPLES = ROOT / "examples"
VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
CRD = ROOT / "crds" / "lmcacheclusters.lmcache.io.yaml"
LOGS = "Changed passwords or certificate: done"  # of a shard
ON_CLUSTER = DOCS / "get-started" / "cluster.md"
UNINSTALL = DOCS / "how-to" / "uninstall.md"


class _Engine(JsonHandler):
    """Stands for vLLM's API: takes what it would take, and answers nothing of use."""

    def do_POST(self) -> None:
        is_right = self.path == "/v1/completions" and self.body().keys() >= {"model", "prompt", "max_tokens"}
        self.answer({"choices": []}, 200 if is_right else 400)


@dataclass
class Page:
    """Values for the placeholders of a page."""

    example: str = ""
    """File of ``examples`` that is applied first."""
    name: str = ""
    """The LMCacheCluster that the page calls NAME."""
    words: dict[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    """Commands of kubectl that come first."""
    changes: Object = field(default_factory=dict)
    """Changes of the example's spec."""
    objects: tuple[tuple[str, Object], ...] = ()
    """Objects without a namespace that the page presupposes, each with its kind."""
    gpus: str = ""
    """Device class of GPUs that a DRA driver publishes."""
    num_absent: int = 0
    """Commands that find nothing on this cluster. A wrong name or label finds nothing, too."""


_DISK_CLASS = {
    "metadata": {"name": "local-nvme"},
    "provisioner": "kubernetes.io/no-provisioner",
    "volumeBindingMode": "WaitForFirstConsumer",
}
_DISK = {
    "metadata": {"name": "nvme"},
    "spec": {
        "storageClassName": "local-nvme",
        "capacity": {"storage": "500Gi"},
        "accessModes": ["ReadWriteOnce"],
        "hostPath": {"path": "/nvme"},
    },
}
_WEIGHTS = {
    "metadata": {"name": "weights"},
    "spec": {
        "capacity": {"storage": "1Ti"},
        "accessModes": ["ReadWriteMany"],
        "hostPath": {"path": "/weights"},
    },
}
HOW_TO = {
    "add-a-disk-tier": Page(
        "disk-tier.yaml",
        "qwen3-8b-disk",
        objects=(("storage.k8s.io/v1/storageclasses", _DISK_CLASS), ("v1/persistentvolumes", _DISK)),
    ),
    "bring-your-own-pods": Page(
        "injection.yaml",
        "settings",
        {
            # The newest: a pod of the rollout before may end meanwhile.
            "POD": "$(kubectl get pods -l app=vllm --sort-by=.metadata.creationTimestamp"
            " -o custom-columns=:.metadata.name | tail -1)",
            "deployment.yaml": "examples/injection.yaml",
        },
    ),
    "encrypt-rows": Page("remote-redis/cluster.yaml", "qwen3-8b-remote"),
    "find-out-why-a-prompt-was-computed": Page("qwen3-8b.yaml", "qwen3-8b"),
    "read-the-dashboard": Page(before=("create namespace monitoring",)),
    "rotate-a-password": Page(
        "managed-remote.yaml",
        "qwen3-8b-shards",
        before=("create secret generic redis-auth --from-literal=password=OLD",),
        changes={"tiers": {"peers": {}}},
    ),
    "require-tokens-for-metrics": Page(
        "qwen3-8b.yaml",
        "qwen3-8b",
        {"UID": "$(kubectl get lmcluster qwen3-8b -o jsonpath='{.metadata.uid}')"},
    ),
    "run-on-openshift": Page("qwen3-8b.yaml", "qwen3-8b"),
    "run-over-several-nodes": Page(objects=(("v1/persistentvolumes", _WEIGHTS),)),
    "run-with-gpu-claims": Page(
        "gpu-claims.yaml",
        "qwen3-8b-claims",
        {"FILE": "examples/gpu-claims.yaml"},
        changes={"engine": {"gpu": {"deviceClassName": None}}},
        gpus="gpu.nvidia.com",
    ),
    "run-without-a-gpu": Page(),
    "see-whether-the-cache-helps": Page("qwen3-8b.yaml", "qwen3-8b"),
    "share-redis": Page("remote-redis/cluster.yaml", "qwen3-8b-remote"),
    "size-tiers": Page("autoscaled-tiers.yaml", "qwen3-8b-autoscaled"),
    "upgrade": Page("injection.yaml", "settings", num_absent=1),  # the operator is alone: it has no Lease
    "trace-requests": Page("qwen3-8b.yaml", "qwen3-8b"),
    "uninstall": Page("cpu.yaml", "qwen3-cpu", {"RELEASE": "other"}),
}
GUIDES = {
    "add-tiers": Page("qwen3-8b.yaml", "qwen3-8b"),
    "autoscaling": Page("autoscaled-tiers.yaml", "qwen3-8b-autoscaled"),
    "blend": Page(),
    "engines": Page("qwen3-8b.yaml", "qwen3-8b"),
    "gpus": Page("qwen3-8b.yaml", "qwen3-8b"),
    "install": Page("qwen3-8b.yaml", "qwen3-8b"),
    "monitor": Page("qwen3-8b.yaml", "qwen3-8b"),
    "own-pods": Page("injection.yaml", "settings", {"deployment.yaml": "examples/injection.yaml"}),
    "prefill-decode": Page("prefill-decode.yaml", "qwen3-8b-split"),
    "routing": Page("router.yaml", "qwen3-8b-routed"),
    "scale": Page("qwen3-8b.yaml", "qwen3-8b"),
    "tenants": Page("qwen3-8b.yaml", "qwen3-8b"),
}
OFF_CLUSTER = {"library", "peers", "sglang", "sidecar"}
"""Guides whose commands need a sidecar, an engine or traffic."""
_POINT = {"size": "64Gi", "hit": "0.32", "low": "0.30", "high": "0.34", "netPerHour": "-0.4"}
_WHY = {"reason": "It saves more than it costs.", "limitedBy": "None", "curve": [_POINT]}
_MEMORY = {"current": "64Gi", "recommended": "108Gi", **_WHY}
_REMOTE = {"current": 2, "recommended": 3, **_WHY}
SIZED = {"autoscaling": {"samples": 400_000, "window": "24h", "memory": _MEMORY, "remote": _REMOTE}}
"""A status as after some hours of traffic."""


@pytest.fixture(scope="module")
def plane() -> Iterator[Cluster]:
    """A cluster of its own, without CRDs: the pages install and remove everything."""
    with Cluster() as started:
        yield started


@pytest.fixture(scope="module")
def chart(plane, tmp_path_factory) -> Path:
    """The chart as a package, which stands for the one in a registry."""
    folder = tmp_path_factory.mktemp("chart")
    plane.helm("package", CHART, "--destination", folder)
    return folder / f"lmcache-operator-{VERSION}.tgz"


@dataclass(frozen=True)
class Machine:
    """Programs that all terminals share, and the ports of a sidecar and of an engine."""

    programs: Path
    facts: Path
    sidecar_port: int
    api_port: int


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("machine")
    known = folder / "facts.json"
    known.write_text(facts(CRD, LOGS))
    programs = folder / "bin"
    programs.mkdir()
    with RedisProcess() as redis, SidecarProcess() as sidecar, serving(_Engine) as api:
        redis.client.execute_command("ACL", "SETUSER", "lmcache", "on", ">OLD")  # for rotate-a-password
        client = programs / "redis-cli"  # a file and no function: xargs calls it, too
        client.write_text(f'#!/bin/sh\nPATH=${{PATH#*:}}\nexec redis-cli -e -s {redis.socket_path} "$@"\n')
        client.chmod(0o755)
        yield Machine(programs, known, sidecar.http_port, api.server_port)


@pytest.fixture
def namespace(plane, request) -> Iterator[str]:
    """The namespace of kubectl's context."""
    name = request.node.callspec.params["name"] if hasattr(request.node, "callspec") else "last"
    with new_namespace(plane, name) as made:
        yield made


@pytest.fixture
def terminal(plane, chart, machine, namespace, tmp_path) -> Iterator[Terminal]:
    """A terminal with kubectl, Helm and redis-cli, whose ports lead to a sidecar and an engine."""
    context = json.loads(plane.kubeconfig().read_text())
    context["contexts"][0]["context"]["namespace"] = namespace
    (tmp_path / "kubeconfig").write_text(json.dumps(context))
    environment = {
        "KUBECONFIG": str(tmp_path / "kubeconfig"),
        "KUBECTL_FACTS": str(machine.facts),
        "REAL_KUBECTL": str(plane.bin / "kubectl"),
    }
    with Terminal(tmp_path, [machine.programs, plane.bin], environment) as shell:
        registry = "oci://ghcr.io/YOU/charts/lmcache-operator"
        shell.words |= {
            f"{registry} --version {VERSION}": str(chart),
            "CHART": str(chart),
            "NAMESPACE": namespace,
            "localhost:8000": f"localhost:{machine.api_port}",
            "localhost:9464": f"localhost:{machine.sidecar_port}",
            "--timeout=1h": "--timeout=60s",
        }
        yield shell


@pytest.fixture(scope="module")
def operator(plane, chart, tmp_path_factory) -> Iterator[Operator]:
    """The operator, as the chart installs it."""
    plane.helm("upgrade", "--install", "lmcache", chart, "-n", SYSTEM_NAMESPACE, "--create-namespace")
    with alone(
        plane, f"{SYSTEM_NAMESPACE}/{SERVICE_ACCOUNT}", tmp_path_factory.mktemp("operator")
    ) as process:
        process.start()
        yield process


def run(terminal: Terminal, page: Path, after: Callable[[Fence], None] = lambda fence: None) -> str:
    """Run a page's commands; returns what they print. The page shows the output of each that prints."""
    printed = []
    for fence in fences(page, *COMMANDS):
        if not fence.reason:
            printed.append(terminal.run(fence))
            assert fence.output or not printed[-1].strip(), f"{fence} prints:\n{printed[-1]}"
            after(fence)
    return "".join(printed)


def test_every_page_has_its_test():
    on_laptop = "laptop"  # test_docs_laptop.py
    in_release_tests = "verify-a-release"  # tests/release
    on_gpu = "check-your-gpu"  # test_gpu_bundle.py
    assert {page.stem for page in PAGES} == {*HOW_TO, on_laptop, ON_CLUSTER.stem, in_release_tests, on_gpu}
    runnable = {
        page.stem
        for page in DOCS.glob("guides/*.md")
        if not all(fence.reason for fence in fences(page, *COMMANDS))
    }
    assert runnable == {*GUIDES, *OFF_CLUSTER}


def test_get_started_on_a_cluster(plane, terminal, tmp_path):
    with ExitStack() as stack:

        def start_operator(fence: Fence) -> None:
            if "helm install" in fence.text:
                account = f"{SYSTEM_NAMESPACE}/{SERVICE_ACCOUNT}"
                stack.enter_context(alone(plane, account, tmp_path)).start()

        printed = run(terminal, ON_CLUSTER, start_operator)
    assert "lmcachecluster.lmcache.io/qwen3-cpu condition met" in printed
    assert plane.helm("list", "--all-namespaces", "--short") == ""


@pytest.mark.parametrize("name", sorted(HOW_TO.keys() - {"uninstall"}))
def test_how_to(plane, operator, terminal, namespace, name):
    page = HOW_TO[name]
    with published(plane, 8, page.gpus) if page.gpus else nullcontext():
        prepare(plane, terminal, namespace, page)
        printed = run(terminal, DOCS / "how-to" / f"{name}.md", waits(plane, namespace, page))
    assert printed.count("No resources found") == page.num_absent, printed


@pytest.mark.parametrize("name", sorted(GUIDES))
def test_guide(plane, operator, terminal, namespace, name):
    page = GUIDES[name]
    prepare(plane, terminal, namespace, page)
    run(terminal, DOCS / "guides" / f"{name}.md", waits(plane, namespace, page))


def test_uninstall(plane, operator, terminal, namespace):
    """The last page: it removes what the others need."""
    prepare(plane, terminal, namespace, HOW_TO["uninstall"])

    def after(fence: Fence) -> None:
        if "kubectl delete lmcluster" in fence.text:
            operator.kill()
            # Pods of this test and of earlier ones may end later.
            labels = "app.kubernetes.io/managed-by=lmcache-operator"
            plane.wait(lambda: not plane.kubectl("get", "pods", "-A", "-l", labels, "-o", "name"))
        if "kubectl get crd" in fence.text:  # the check of the page
            assert "lmcache.io" not in plane.kubectl("get", "crd")
            assert "lmcache" not in plane.kubectl("get", "clusterrole,clusterrolebinding")

    run(terminal, UNINSTALL, after)


def waits(plane: Cluster, namespace: str, page: Page) -> Callable[[Fence], None]:
    """A function that waits until the operator has processed the page's changes of its LMCacheCluster."""

    def has_processed() -> bool:
        cluster = plane.api.find(CLUSTERS, page.name, namespace) if page.name else None
        if cluster is None:
            return True
        generation: int = cluster["metadata"]["generation"]
        return cluster["status"]["observedGeneration"] == generation

    def after(_: Fence) -> None:
        plane.wait(has_processed)

    return after


def prepare(plane: Cluster, terminal: Terminal, namespace: str, page: Page) -> None:
    """Apply the page's objects, and put the files where the reader has them."""
    for command in page.before:
        plane.kubectl("--namespace", namespace, *command.split())
    for kind, obj in page.objects:
        plane.api.create(kind, obj)
    if page.example:
        plane.kubectl("apply", "--namespace", namespace, "--filename", EXAMPLES / page.example)
        plane.api.patch(CLUSTERS, page.name, {"spec": page.changes}, namespace)
        # The cluster of a reader is older than a minute, so it has a heartbeat, too.
        for state in ("condition=Ready", "jsonpath={.status.lastHeartbeatTime}"):
            wait = ("--namespace", namespace, f"lmcluster/{page.name}", f"--for={state}", "--timeout=60s")
            plane.kubectl("wait", *wait)
        plane.api.patch(CLUSTERS, f"{page.name}/status", {"status": SIZED}, namespace)
    (terminal.folder / "values.yaml").write_text("replicas: 1\n")
    (terminal.folder / "request.json").write_text(json.dumps({"model": "m", "prompt": "p", "max_tokens": 1}))
    (terminal.folder / "settings.yaml").write_text((EXAMPLES / "injection.yaml").read_text().split("---")[0])
    terminal.words |= {"NAME": page.name, **page.words}
