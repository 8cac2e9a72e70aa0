"""``vllm serve`` with two data-parallel ranks on one sidecar.

The tests share an engine with two API servers, which is vLLM's default. A test kills one of its ranks. The
tests after it share an engine with the operator's arguments, which a test ends.
"""

import itertools
import json
import os
import shlex
import signal
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lmcache_operator.api.parse import parse
from lmcache_operator.components.engine.kinds.vllm import VLLM
from lmcache_operator.specs.names import EVENTS_PORT
from testing import workers
from testing.child_process import REPOSITORY, free_port, wait_until
from testing.engine.environment import LOAD_GATE
from testing.engine.process import ServedEngine, patient_config
from testing.processes import SidecarProcess
from testing.router import RouterProcess
from tests.harness.client.blended import num_rows
from tests.harness.client.real_engine import BLOCK, CHUNK, make_prompt, num_cached
from tests.harness.commands.sidecar_command import explain
from tests.harness.fences import DOCS, difference, fences, output
from tests.harness.operator.model import cluster

pytestmark = pytest.mark.vllm

RANKS = 0, 1
NUM_TOKENS = 100
METRICS, CHANGED = "vllm:lmcache_", "vLLM's weights may have changed"
PROMPT_TOKENS, HIT_TOKENS = 2000, 1792
NUM_ROWS = HIT_TOKENS // CHUNK
BLEND_COUNTERS = (
    "blends", "failed_blends", "blend_reused_tokens", "blend_recomputed_tokens", "blend_missing_tokens"
)  # fmt: skip
SHARED = make_prompt(PROMPT_TOKENS, "shared")
"""A prompt that the first engine stores before its weights change."""
SEEDS = map("data parallel {}".format, itertools.count())
LOCAL = ("--port=", "--kv-transfer-config=", "--prefix-caching-hash-algo=", "--served-model-name=")
"""Arguments of a pod that ``ServedEngine`` sets itself."""


def rendered_arguments(events_port: int) -> list[str]:
    """Arguments of the operator for a cluster with a router, with another port of KV events."""
    rendered = parse(cluster(engine={"gpu": {"count": 2}, "parallelism": {"data": 2}}, router={}))
    arguments = VLLM().args(rendered, 60)[1:]
    here = [argument for argument in arguments if not argument.startswith(LOCAL)]
    return [argument.replace(f"*:{EVENTS_PORT}", f"*:{events_port}") for argument in here]


class World:
    """The engine and its sidecar."""

    def __init__(self, sidecar: SidecarProcess, folder: Path) -> None:
        self.sidecar, self.folder = sidecar, folder
        self.gate = folder / "gate"
        self.events_port = free_port()
        self._engine: ServedEngine | None = None

    @property
    def engine(self) -> ServedEngine:
        assert self._engine is not None
        return self._engine

    def start(self) -> None:
        """Start an engine unless one runs, and wait until both ranks can hit."""
        if self._engine is not None and self._engine.is_running:
            return
        default = ["--api-server-count=2"] if self._engine is None else []
        self.close()
        self._engine = ServedEngine(
            self.folder / "log",
            free_port(),
            patient_config(self.sidecar.socket_path, blend="request"),
            *rendered_arguments(self.events_port),
            *default,
            environment={
                "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, workers.cores(2))),
                "VLLM_SERVER_DEV_MODE": "1",
                LOAD_GATE: str(self.gate),
            },
        )
        self._engine.wait_ready()
        for rank in RANKS:
            self.wait_hit(rank, make_prompt(CHUNK + BLOCK, next(SEEDS)))
        self.sidecar.wait_usable()

    def complete(self, rank: int, prompt: list[int], max_tokens: int = 4) -> tuple[int, list[int]]:
        """Run a prompt on a rank. Returns the number of cached tokens, and the answer."""
        answer = self.engine.complete(prompt, max_tokens, **header(rank))
        return num_cached(answer), answer["choices"][0]["token_ids"]

    def wait_hit(self, rank: int, prompt: list[int]) -> None:
        wait_until(lambda: self.complete(rank, prompt)[0] > 0, what=f"a hit of rank {rank}")

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.engine.url + path, timeout=300) as answer:
            return json.load(answer)

    def post(self, path: str, **body: Any) -> None:
        data = json.dumps(body).encode() if body else b""
        request = urllib.request.Request(self.engine.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            assert answer.status == 200

    def metrics(self, rank: int) -> dict[str, float]:
        """The connector's counters of a rank by their names, except seconds and numbers of stores.

        A store may cover the chunks of several steps.
        """
        metrics = self.engine.metrics(METRICS, f'engine="{rank}"').items()
        counters = {name.removeprefix(METRICS).removesuffix("_total"): value for name, value in metrics}
        return {name: value for name, value in counters.items() if not name.endswith(("_seconds", "stores"))}

    def stream(self, rank: int, has_begun: threading.Barrier) -> list[str]:
        """Stream an answer of a rank. Returns its events. Waits at the barrier after the first one."""
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": NUM_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        headers = {"Content-Type": "application/json", **header(rank)}
        request = urllib.request.Request(
            f"{self.engine.url}/v1/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            events = (line.removeprefix(b"data: ").decode().strip() for line in answer if line.strip())
            first = next(events)
            has_begun.wait()
            return [first, *events]

    def assert_released(self) -> None:
        """Check that the sidecar holds nothing for engines that have ended."""
        self.sidecar.wait_until(lambda stats: not any(stats["num_clients"].values()))
        memory = self.sidecar.settled()["memory"]
        assert (memory["leased_rows"], memory["quarantined_slots"]) == (0, 0)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


def header(rank: int) -> dict[str, str]:
    return {"X-data-parallel-rank": str(rank)}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with SidecarProcess(memory_size="128Mi") as sidecar:
        world = World(sidecar, tmp_path_factory.mktemp("ranks"))
        yield world
        world.close()


@pytest.fixture
def world(shared: World) -> World:
    shared.start()
    return shared


def test_ranks_share_rows_and_count_under_labels_of_their_own(world: World) -> None:
    """Each rank has hit a prompt of its own before."""
    num_stored = 1 + NUM_ROWS, 1
    computed = world.complete(0, SHARED)
    assert computed[0] == 0
    # A worker counts a row when it has sent the commit.
    wait_until(lambda: world.metrics(0)["stored_rows"] == num_stored[0], what="stored rows")
    for rank in (1, 0):
        assert world.complete(rank, SHARED) == (HIT_TOKENS, computed[1])
    wait_until(lambda: [world.metrics(rank)["loads"] for rank in RANKS] == [2, 2], what="loads")
    copied = {"loads": 2, "failed_loads": 0, "loaded_blocks": (CHUNK + HIT_TOKENS) // BLOCK, "lost_rows": 0}
    copied |= dict.fromkeys(BLEND_COUNTERS, 0)
    expected = [copied | {"stored_rows": number} for number in num_stored]
    for _ in range(16):
        assert [world.metrics(rank) for rank in RANKS] == expected, "the same from each API server"
    clients = world.sidecar.stats()["clients"]
    assert len({client["engine"] for client in clients}) == 2
    assert sorted(client["role"] for client in clients) == ["scheduler", "scheduler", "worker", "worker"]


def test_router_takes_events_of_both_ranks(world: World) -> None:
    sources, names = set(), set()
    for _ in range(32):  # each connection may reach another API server
        publishers = world.get("/kv_event_sources")
        sources.add(tuple(publishers[str(rank)]["endpoint"] for rank in RANKS))
        names.add(world.get("/get_server_info")["instance_id"])
    assert sources == {tuple(f"tcp://*:{world.events_port + rank}" for rank in RANKS)}
    assert len(names) == 1, "the router would take the engine for several engines"
    (name,) = names
    with RouterProcess([world.engine.url], "--policy=kv_aware") as router:
        for rank in RANKS:

            def has_taken(rank: int = rank) -> bool:
                world.complete(rank, make_prompt(CHUNK + BLOCK, next(SEEDS)))
                return router.last_event(name, rank) >= 0

            wait_until(has_taken, what=f"the router takes events of rank {rank}")


def test_client_of_the_guide_reuses_documents_of_another_rank(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 computes the documents, and rank 1 answers. The outputs are those that the page shows."""
    page = "guides/blend.md"
    (client,) = fences(DOCS / page, "python")
    program = client.text.replace("http://localhost:8000", world.engine.url)
    commands = [fence for fence in fences(DOCS / page, "sh") if "rag.py" in fence.text]
    printed, request_ids = "", []
    monkeypatch.chdir(REPOSITORY)
    for fence, rank in zip(commands, (0, 1, 1, 1), strict=True):
        opener = urllib.request.build_opener()
        opener.addheaders += header(rank).items()
        monkeypatch.setattr(urllib.request, "_opener", opener)
        monkeypatch.setattr(sys, "argv", shlex.split(fence.text.replace("\\\n", ""))[1:])
        rows_before = world.sidecar.settled()["memory"]["used_rows"]
        exec(compile(program, str(client), "exec"), {})
        printed = capsys.readouterr().out
        request_ids.append(printed.splitlines()[-1].split(":")[0])
        assert fence.output is not None
        assert not difference(fence.output.text, printed), printed
        if rank == 0:
            rows = rows_before + sum(num_rows(int(line.split()[-2])) for line in printed.splitlines())
            world.sidecar.wait_until(lambda stats, rows=rows: stats["memory"]["used_rows"] >= rows)
    wait_until(lambda: world.metrics(1)["blends"] == 3, what="the counts of rank 1")
    assert world.metrics(1)["failed_blends"] == world.metrics(0)["blends"] == 0
    status, explained = explain(world.sidecar, "--request-id", request_ids[2])
    assert status == 0
    shown = difference(output(page, "--request-id"), f"Pod qwen3-8b-rag-engine-0.\n{explained}")
    assert not shown, shown


def test_change_of_weights_reaches_both_ranks(world: World) -> None:
    """The test after this one ends the engine, whose KV is private from now on."""
    prompt = make_prompt(PROMPT_TOKENS, next(SEEDS))
    tokens = world.complete(0, prompt)[1]
    for rank in RANKS:
        world.wait_hit(rank, prompt)
    world.post("/reset_prefix_cache?reset_external=true")
    assert [world.complete(rank, prompt) for rank in RANKS] == [(HIT_TOKENS, tokens)] * 2, "the same weights"
    world.post("/collective_rpc", method="reload_weights")
    assert [world.complete(rank, prompt)[0] for rank in RANKS] == [0, 0]

    def are_private(stats: dict[str, Any]) -> bool:
        reasons = [each["private_reason"] for each in stats["clients"] if each["role"] == "scheduler"]
        return [reason[: len(CHANGED)] for reason in reasons] == [CHANGED] * len(RANKS)

    world.sidecar.wait_until(are_private)
    for rank in RANKS:
        world.wait_hit(rank, prompt)


def test_engine_ends_when_a_rank_is_killed_and_the_sidecar_releases_both(world: World) -> None:
    prompt = make_prompt(PROMPT_TOKENS, next(SEEDS))
    for rank in RANKS:
        world.wait_hit(rank, prompt)
    schedulers = [each for each in world.sidecar.stats()["clients"] if each["role"] == "scheduler"]
    world.gate.touch()
    with ThreadPoolExecutor(len(RANKS)) as pool:
        answers = [pool.submit(world.complete, rank, prompt) for rank in RANKS]
        world.sidecar.wait_until(lambda stats: stats["memory"]["leased_rows"] >= NUM_ROWS)
        wait_until(lambda: world.gate.stat().st_size, what="a load")
        os.kill(schedulers[0]["pid"], signal.SIGKILL)
        world.gate.unlink()
        assert world.engine.wait() == 1, "the kubelet starts it again"
        assert any(answer.exception() for answer in answers)
    world.assert_released()


def test_both_ranks_of_a_restarted_engine_hit(world: World) -> None:
    first, second = (world.complete(rank, SHARED) for rank in RANKS)
    assert (first[0], second) == (HIT_TOKENS, first)


def test_terminated_engine_finishes_the_streams_of_both_ranks(world: World) -> None:
    has_begun = threading.Barrier(len(RANKS) + 1)
    with ThreadPoolExecutor(len(RANKS)) as pool:
        streams = [pool.submit(world.stream, rank, has_begun) for rank in RANKS]
        has_begun.wait()
        os.kill(world.engine.pid, signal.SIGTERM)
        for stream in streams:
            *_, usage, end = stream.result()
            assert end == "[DONE]"
            assert json.loads(usage)["usage"]["completion_tokens"] == NUM_TOKENS
    assert world.engine.wait() == 0
    world.assert_released()
