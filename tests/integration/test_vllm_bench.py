"""``bench`` on a real engine with a real sidecar, from the pod and through port-forwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

from testing.child_process import REPOSITORY, free_port, wait_until
from testing.engine.process import ServedEngine, connector_config
from testing.processes import SidecarProcess
from tests.harness.forwarding_api import NAME, ForwardingApi, pod, served

pytestmark = pytest.mark.vllm

PATIENCE = {"answer_seconds": 30, "prefill_tokens_per_second": 1}
SMALL = ("--vocabulary", "256", "--requests", "12", "--prompt-tokens", "2048", "--output-tokens", "4")


class World(NamedTuple):
    engine: ServedEngine
    sidecar: SidecarProcess

    @property
    def urls(self) -> list[str]:
        return ["--url", self.engine.url, "--sidecar-url", f"http://127.0.0.1:{self.sidecar.http_port}"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    log = tmp_path_factory.mktemp("engine") / "log"
    with SidecarProcess(memory_size="512Mi") as sidecar:
        config = connector_config(sidecar.socket_path, **PATIENCE)
        with ServedEngine(log, free_port(), config) as engine:
            engine.wait_ready()
            sidecar.wait_attached(engine.run_short_request)
            yield World(engine, sidecar)


def command(module: str, *arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", module, *map(str, arguments)]


def started(words: list[str]) -> subprocess.Popen[str]:
    paths = f"{REPOSITORY}:{REPOSITORY / 'operator'}:{REPOSITORY / 'sidecar'}"
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, env={**os.environ, "PYTHONPATH": paths}, text=True, **streams)


def run(module: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    with started(command(module, *arguments)) as process:
        out, error = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


def hit_share(phase: dict[str, Any]) -> float:
    tokens = phase["causeTokens"]
    return float(tokens.get("memory", 0) / sum(tokens.values()))


def test_warm_prompts_hit_and_runs_can_be_compared(world, tmp_path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        done = run("lmcache_sidecar", "bench", *world.urls, *SMALL, "--yes", "-o", file,
                   "--picture", tmp_path / "run.svg")  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(files[0].read_text())
    assert (document["version"], document["model"], document["problem"]) == (1, "tiny", "")
    phases = {(phase["workload"], phase["phase"]): phase for phase in document["phases"]}
    assert len(phases) == 6
    for (workload, name), phase in phases.items():
        assert phase["requests"] == 12
        assert phase["outputTokens"] == 12 * 4
        assert sum(phase["causeTokens"].values()) == phase["promptTokens"], "each prompt token has one cause"
        assert 0 < phase["ttftSeconds"]["p50"] <= phase["ttftSeconds"]["p95"] <= phase["seconds"]
        assert phase["promptTokensPerSecond"] > phase["outputTokensPerSecond"] > 0
        if name == "warm":
            # The tail of a prompt, less than a chunk of 256 tokens, is always computed.
            assert hit_share(phase) > (0.6 if workload == "agents" else 0.9)
            assert hit_share(phase) > hit_share(phases[workload, "cold"])
    assert ElementTree.parse(tmp_path / "run.svg").getroot().tag.endswith("svg")

    compared = run("lmcache_sidecar", "bench", "--compare", *files)
    assert (compared.returncode, compared.stderr) == (0, "")
    assert compared.stdout.count("TTFT P50") == 6
    assert "chat warm:" in compared.stdout


def test_sidecar_knows_the_requests_of_a_benchmark(world) -> None:
    """A second benchmark does not take the requests of the first for those of others."""
    done = run("lmcache_sidecar", "bench", *world.urls, *SMALL, "--workload", "chat", "--yes")
    assert done.returncode == 0
    again = run("lmcache_sidecar", "bench", *world.urls, *SMALL, "--workload", "chat")
    assert again.returncode == 1
    assert "Send 24 requests to" in again.stderr


def test_engine_that_serves_others_is_left_alone(world) -> None:
    prompt = list(range(10, 250)) * 3
    end = world.sidecar.stats()["causes"]["prompt_tokens"] + len(prompt)
    world.engine.complete(prompt)
    # The engine's report of a request arrives after its answer.
    world.sidecar.wait_until(lambda stats: stats["causes"]["prompt_tokens"] >= end)
    number = world.sidecar.stats()["lookups"]["num_lookups"]
    done = run("lmcache_sidecar", "bench", *world.urls, *SMALL)
    assert done.returncode == 1
    assert "served requests of others in the last five minutes" in done.stderr
    assert world.sidecar.stats()["lookups"]["num_lookups"] == number


def test_token_that_the_model_lacks_is_an_error_with_the_reason(world) -> None:
    done = run("lmcache_sidecar", "bench", *world.urls, "--requests", "2", "--yes")
    assert done.returncode == 1
    assert "the engine refused a request: Token id" in done.stderr
    assert "Set --vocabulary to the size of the model's vocabulary" in done.stderr


def test_pods_are_reached_through_port_forwards(world, tmp_path) -> None:
    api = ForwardingApi([pod(0, world.sidecar.http_port), pod(1, 1, is_ready=False)])
    port = world.engine.url.rpartition(":")[2]
    file = tmp_path / "run.json"
    with served(api, tmp_path) as kubeconfig:
        options = ["--kubeconfig", kubeconfig, "--engine-port", port, "--workload", "documents", *SMALL]
        done = run("lmcache_operator", "bench", NAME, *options, "--yes", "-o", file)
        assert (done.returncode, done.stderr) == (0, "")
        api.is_forbidden = True
        refused = run("lmcache_operator", "bench", NAME, *options, "--yes")
    cold, warm = json.loads(file.read_text())["phases"]
    assert hit_share(warm) > hit_share(cold) > 0
    assert sum(warm["causeTokens"].values()) == warm["promptTokens"]
    assert api.num_forwards > 24
    assert refused.returncode == 2
    assert 'your user needs the right "get and create pods/portforward"' in refused.stderr


def test_cluster_without_a_ready_pod_is_an_error(world, tmp_path) -> None:
    with served(ForwardingApi([pod(0, 1, is_ready=False)]), tmp_path) as kubeconfig:
        done = run("lmcache_operator", "bench", NAME, "--kubeconfig", kubeconfig, "--yes")
    assert done.returncode == 2
    assert f"{NAME} has no ready pod: `kubectl lmcache status {NAME}` shows why" in done.stderr


@pytest.mark.parametrize("is_kubectl", [False, True], ids=["sidecar", "kubectl"])
def test_interrupted_benchmark_shows_partial_results(world, tmp_path, is_kubectl) -> None:
    file = tmp_path / "run.json"
    many = ["--vocabulary", "256", "--requests", "5000", "--prompt-tokens", "1024", "--yes", "-o", file]
    port = world.engine.url.rpartition(":")[2]
    before = world.sidecar.stats()["lookups"]["num_lookups"]
    with served(ForwardingApi([pod(0, world.sidecar.http_port)]), tmp_path) as kubeconfig:
        words = command("lmcache_sidecar", "bench", *world.urls, *many)
        if is_kubectl:
            options = ["--kubeconfig", kubeconfig, "--engine-port", port, *many]
            words = command("lmcache_operator", "bench", NAME, *options)
        with started(words) as bench:
            wait_until(lambda: world.sidecar.stats()["lookups"]["num_lookups"] > before + 10, timeout=120)
            bench.send_signal(signal.SIGINT)
            out, error = bench.communicate(timeout=60)
    assert bench.returncode == 1
    assert "The results are not complete: it was interrupted." in out
    assert error == "error: it was interrupted\n"
    assert json.loads(file.read_text())["phases"][0]["requests"] >= 5


def test_engine_killed_in_the_middle_leaves_partial_results(world, tmp_path) -> None:
    """The last test of the module, because the engine ends."""
    file = tmp_path / "run.json"
    words = [*world.urls, *SMALL[:2], "--requests", "5000", "--prompt-tokens", "1024", "--yes", "-o", file]
    before = world.sidecar.stats()["lookups"]["num_lookups"]
    with started(command("lmcache_sidecar", "bench", *words)) as bench:
        wait_until(lambda: world.sidecar.stats()["lookups"]["num_lookups"] > before + 10, timeout=120)
        os.killpg(world.engine.pid, signal.SIGKILL)
        out, error = bench.communicate(timeout=120)
    assert bench.returncode == 1
    assert "the engine at" in error
    assert "The results are not complete" in out
    document = json.loads(file.read_text())
    assert document["problem"]
    assert document["phases"][0]["requests"] >= 5
