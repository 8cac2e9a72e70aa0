"""SGLang in pods, from an image without LMCache: the operator's engine, and a user's Deployment.

The tests depend on their order: each continues with the pods as the previous test left them.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from lmcache_operator.components.injection.pods import OUTCOME
from testing.kube.operator import CLUSTERS
from testing.node import sglang
from testing.node.app import NAMESPACE, App
from testing.node.pods import SIDECAR_PORT, Completion, Pod
from testing.sglang import environment
from tests.harness.commands.plugin import Plugin
from tests.harness.operator.injected import InjectedPods
from tests.harness.operator.pods import prompt, retained, termination_states

NAME = "sglang"
PROMPT = prompt(71, 2048)
NUM_PAGES = len(PROMPT) // sglang.PAGE_TOKENS
NUM_LOADED = len(PROMPT) - sglang.PAGE_TOKENS
"""SGLang always computes the last page of a prompt."""
NUM_TOKENS = 100
UNFINISHED = re.compile("Gracefully exiting.* number of requests [1-9]")
"""Line that SGLang logs after SIGTERM, if it waits for requests."""
ATTACHED = "Attached to the sidecar"


class Engines(NamedTuple):
    """Two engines with one cache."""

    rendered: App
    injected: InjectedPods


@pytest.fixture(scope="module")
def engines(installed, references) -> Iterator[Engines]:
    """Both engines, which start at the same time."""
    cluster = sglang.cluster(NAME, references["sglang"])
    args = ["--model-path=/models", "--host=0.0.0.0", "--port=8000", "--enable-cache-report", *sglang.ARGS]
    server = {"name": "server", "command": ["python3", "-m", "sglang.launch_server"], "args": args}
    engines = Engines(App(installed, cluster), InjectedPods(installed, "llm", cluster, server))
    sglang.prepare(installed)
    engines.rendered.apply()
    engines.injected.create()
    yield engines
    installed.api.delete(CLUSTERS, NAME, NAMESPACE)  # both engines end at the same time
    engines.injected.delete()
    installed.wait(lambda: not engines.rendered.pods(), 180)


@pytest.fixture(scope="module")
def engine(engines) -> App:
    """The LMCacheCluster, whose engine uses its sidecar. SGLang may be ready earlier."""
    engines.rendered.ready_pod()
    engines.rendered.node.reached("SGLang's pod ready")
    engines.rendered.wait_condition("Ready")
    engines.rendered.wait_condition("SidecarAttached")
    return engines.rendered


@pytest.fixture(scope="module")
def cold(engine) -> Completion:
    """The answer without any cache. Afterwards its pages are in memory and in Redis."""
    pod = engine.ready_pod()
    answer = pod.complete(PROMPT)
    engine.node.wait(lambda: pod.stats()["memory"]["used_rows"] >= NUM_PAGES, 120)
    engine.node.wait(lambda: pod.stats()["num_unwritten_rows"] == 0, 120)
    return answer


def ask_again(pod: Pod, cold: Completion) -> None:
    """Ask for the answer without SGLang's own caches. All pages but the last must come from the sidecar.

    A request waits for Redis only while that is faster than computing, and only within SGLang's own limit. On
    a busy machine, a later request finds the rest.
    """

    def ask() -> bool:
        sglang.flush_cache(pod)
        cached = sglang.num_cached(pod, PROMPT)
        assert (cached["device"], cached["host"]) == (0, 0)
        return cached["storage"] == NUM_LOADED

    pod.node.wait(ask, 180)
    assert pod.complete(PROMPT).tokens == cold.tokens


def test_stock_image_gets_the_connector_without_rights(engine):
    pod = engine.ready_pod()
    where = ("python3", "-c", "import lmcache_client; print(lmcache_client.__file__)")
    assert pod.exec("engine", *where).startswith("/opt/lmcache/client/")
    with pytest.raises(subprocess.CalledProcessError) as missing:
        pod.exec("engine", "env", "-u", "PYTHONPATH", *where)
    assert "No module named 'lmcache_client'" in missing.value.stderr
    lines = pod.exec("engine", "cat", "/proc/1/status").splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert set(status["Uid"].split()) == {"2000"}
    assert (int(status["CapBnd"], 16), status["NoNewPrivs"], status["Seccomp"]) == (0, "1", "2")


def test_status_shows_that_the_engine_uses_its_sidecar(engine):
    engine.wait_condition("Degraded", "False")
    conditions = engine.conditions()
    assert conditions["EngineAvailable"]["reason"] == "EnginesReady"
    assert conditions["SidecarAttached"]["reason"] == "Attached"
    (client,) = engine.ready_pod().stats()["clients"]
    assert (client["uid"], client["model"], client["chunk_tokens"]) == (2000, "tiny", sglang.PAGE_TOKENS)


def test_second_request_hits_in_memory(engine, cold):
    assert cold.num_cached == 0
    pod = engine.ready_pod()
    ask_again(pod, cold)
    assert pod.stats()["remote"]["hits"] == 0


def test_probes_are_not_counted_as_requests(engine, cold):
    """SGLang computes a prompt of one token to answer a probe."""
    requests = json.loads(engine.ready_pod().get(SIDECAR_PORT, "/requests"))["requests"]
    sizes = [sum(request["tokens"].values()) for request in requests]
    assert len(PROMPT) in sizes
    assert 1 not in sizes


def test_commands_report_no_problem(engine, cold, installed, tmp_path):
    kubectl = Plugin(installed, tmp_path, NAMESPACE)
    shown = kubectl("status", NAME)
    assert (shown.returncode, shown.stderr) == (0, "")
    (row,) = [line for line in shown.stdout.splitlines() if line.startswith(engine.pod().name)]
    assert "in use" in row
    examined = kubectl("doctor", NAME, "-o", "json")
    checks = {check["check"]: check for check in json.loads(examined.stdout)["checks"]}
    problems = {name: check for name, check in checks.items() if check["level"] != "ok"}
    problems.pop("remoteLatency", None)  # Redis is slow if the machine is busy
    assert problems == {}
    assert (examined.returncode, examined.stderr) == (0, "")
    assert checks["engineVersion"]["statement"] == f"The engines run SGLang {environment.version()}."
    assert "HiCache is on" in checks["engineSettings"]["statement"]


def test_labelled_deployment_shares_the_cache(engines, cold):
    pod = engines.injected.ready_pod()
    assert pod.object["metadata"]["annotations"][OUTCOME] == "injected"
    ask_again(pod, cold)
    assert pod.stats()["remote"]["hits"] > 0


def test_deleted_pod_finishes_its_request_and_its_successor_hits(engine, cold):
    """The scheduler is stopped until SGLang has seen SIGTERM, so that the request cannot end before."""
    node, before = engine.node, engine.ready_pod()
    with retained(before), ThreadPoolExecutor(1) as threads:
        with before.stopped_during(threads, prompt(72, 64), NUM_TOKENS, but_first=True) as request:
            node.api.delete("v1/pods", before.name, NAMESPACE)
            node.wait(lambda: UNFINISHED.search(before.logs("engine")), 60)
        assert len(request.result().tokens) == NUM_TOKENS
        ended = node.wait(lambda: termination_states(engine.pod()), 180)
    assert [container["exitCode"] for container in ended] == [0, 0]
    after = engine.ready_pod(instead_of=before)
    # SGLang may be ready before its cache. It would then compute the prompt, and find it in memory.
    node.wait(lambda: ATTACHED in after.logs("engine"), 60)
    ask_again(after, cold)
    assert after.stats()["remote"]["hits"] > 0
    engine.wait_condition("SidecarAttached")
