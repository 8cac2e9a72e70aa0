"""``bench`` on a real engine with a real sidecar, from the pod and through port-forwards.

Another command that uses the engine's server is tested here, too: ``explain``, which lets it tokenise text.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lmcache.bench.client import REQUEST_ID
from testing.child_process import REPOSITORY, free_port, run_in_process, wait_until
from testing.engine.process import ServedEngine, patient_config
from testing.processes import SidecarProcess
from tests.harness.forwarding_api import NAME, ForwardingApi, pod, served

pytestmark = pytest.mark.vllm

NUM_REQUESTS = 6
SMALL = (
    *("--vocabulary", "256", "--prompt-tokens", "2048", "--output-tokens", "4"),
    *("--requests", str(NUM_REQUESTS)),
)
ENDLESS = ("--vocabulary", "256", "--prompt-tokens", "1024", "--requests", "600", "--yes")
"""A benchmark that is still running when it is interrupted."""


class World:
    """The engine, which restarts if a test has ended it, and its sidecar."""

    def __init__(self, folder: Path, sidecar: SidecarProcess) -> None:
        self.sidecar, self._folder = sidecar, folder
        self._engine: ServedEngine | None = None

    @property
    def engine(self) -> ServedEngine:
        assert self._engine is not None
        return self._engine

    @property
    def urls(self) -> list[str]:
        return ["--url", self.engine.url, "--sidecar-url", self.sidecar.url]

    def start(self) -> None:
        """Start the engine unless it runs, and wait until it is attached."""
        if self._engine is None or not self._engine.is_running:
            self.close()
            config = patient_config(self.sidecar.socket_path)
            self._engine = ServedEngine(self._folder / "log", free_port(), config)
            self._engine.wait_ready()
        self.sidecar.wait_attached(self.engine.run_short_request)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def wait_running(self) -> None:
        """Wait until a benchmark has sent some requests."""
        end = self.sidecar.stats()["lookups"]["num_lookups"] + 10
        self.sidecar.wait_until(lambda stats: stats["lookups"]["num_lookups"] > end)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with SidecarProcess(memory_size="256Mi") as sidecar:
        world = World(tmp_path_factory.mktemp("engine"), sidecar)
        yield world
        world.close()


@pytest.fixture
def world(shared: World) -> World:
    shared.start()
    return shared


def command(module: str, *arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", module, *map(str, arguments)]


def started(words: list[str]) -> subprocess.Popen[str]:
    paths = f"{REPOSITORY}:{REPOSITORY / 'operator'}:{REPOSITORY / 'sidecar'}"
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, env={**os.environ, "PYTHONPATH": paths}, text=True, **streams)


def run(module: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_in_process(import_module(f"{module}.__main__").main, *arguments)


def hit_share(phase: dict[str, Any]) -> float:
    tokens = phase["causeTokens"]
    return float(tokens.get("memory", 0) / sum(tokens.values()))


def test_warm_prompts_hit_and_runs_can_be_compared(world, tmp_path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        done = run("lmcache_sidecar", "bench", *world.urls, *SMALL, "--yes", "-o", file)
        assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(files[0].read_text())
    assert (document["version"], document["model"], document["problem"]) == (1, "tiny", "")
    phases = {(phase["workload"], phase["phase"]): phase for phase in document["phases"]}
    assert len(phases) == 6
    for (workload, name), phase in phases.items():
        assert phase["requests"] == NUM_REQUESTS
        assert phase["outputTokens"] == NUM_REQUESTS * 4
        assert sum(phase["causeTokens"].values()) == phase["promptTokens"], "each prompt token has one cause"
        assert 0 < phase["ttftSeconds"]["p50"] <= phase["ttftSeconds"]["p95"] <= phase["seconds"]
        assert phase["promptTokensPerSecond"] > phase["outputTokensPerSecond"] > 0
        if name == "warm":
            # The tail of a prompt, less than a chunk of 256 tokens, is always computed.
            assert hit_share(phase) > (0.6 if workload == "agents" else 0.9)
            assert hit_share(phase) > hit_share(phases[workload, "cold"])

    compared = run("lmcache_sidecar", "bench", "--compare", *files)
    assert (compared.returncode, compared.stderr) == (0, "")
    assert compared.stdout.count("TTFT P50") == 6
    assert "chat warm:" in compared.stdout


def test_only_requests_of_others_stop_a_benchmark(world) -> None:
    """A second benchmark does not take the requests of the first for those of others."""

    def is_alone() -> bool:
        """Whether the sidecar got no report of a short request, after which engines attach."""
        world.sidecar.restart()  # it forgets the requests of other tests
        world.start()
        done = run("lmcache_sidecar", "bench", *world.urls, *SMALL, "--workload", "chat", "--yes")
        assert done.returncode == 0
        requests = json.loads(world.sidecar.get("/requests"))["requests"]
        return all(REQUEST_ID in request["request_id"] for request in requests)

    wait_until(is_alone)
    again = run("lmcache_sidecar", "bench", *world.urls, *SMALL, "--workload", "chat")
    assert again.returncode == 1
    assert f"Send {2 * NUM_REQUESTS} requests to" in again.stderr
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
    assert api.num_forwards > 2 * NUM_REQUESTS
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
    many = [*ENDLESS, "-o", file]
    port = world.engine.url.rpartition(":")[2]
    with served(ForwardingApi([pod(0, world.sidecar.http_port)]), tmp_path) as kubeconfig:
        words = command("lmcache_sidecar", "bench", *world.urls, *many)
        if is_kubectl:
            options = ["--kubeconfig", kubeconfig, "--engine-port", port, *many]
            words = command("lmcache_operator", "bench", NAME, *options)
        with started(words) as bench:
            world.wait_running()
            bench.send_signal(signal.SIGINT)
            out, error = bench.communicate(timeout=120)
    assert bench.returncode == 1
    assert "The results are not complete: it was interrupted." in out
    assert error == "error: it was interrupted\n"
    assert json.loads(file.read_text())["phases"][0]["requests"] >= 5


def test_engine_killed_in_the_middle_leaves_partial_results(world, tmp_path) -> None:
    file = tmp_path / "run.json"
    with started(command("lmcache_sidecar", "bench", *world.urls, *ENDLESS, "-o", file)) as bench:
        world.wait_running()
        os.killpg(world.engine.pid, signal.SIGKILL)
        out, error = bench.communicate(timeout=120)
    assert bench.returncode == 1
    assert "the engine at" in error
    assert "The results are not complete" in out
    document = json.loads(file.read_text())
    assert document["problem"]
    assert document["phases"][0]["requests"] >= 5


def test_engine_tokenises_text_and_chats_whose_chunks_are_explained(world) -> None:
    def explain(prompt: str) -> dict[str, Any]:
        words = command("lmcache_sidecar", "explain", "--url", world.sidecar.url, "--output", "json")
        words += ["--prompt", "-", "--engine-url", world.engine.url]
        done = subprocess.run(words, input=prompt, capture_output=True, text=True, check=True)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    text = "A prompt for the engine. " * 40
    answer = explain(text)
    first = answer["runs"][0]
    assert (first["place"], first["cause"]) == ("nowhere", "new")
    world.engine.complete(text)
    num_tokens = answer["num_tokens"] // 256 * 256

    def is_stored() -> bool:
        first = explain(text)["runs"][0]
        return (first["num_tokens"], first["place"]) == (num_tokens, "memory")

    wait_until(is_stored, what="the chunks of the prompt")
    answer = explain(json.dumps({"messages": [{"role": "user", "content": text}]}))
    first = answer["runs"][0]
    assert (first["place"], first["cause"]) == ("nowhere", "new")
    assert answer["num_tokens"] > len(text)
