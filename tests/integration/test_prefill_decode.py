"""A prefill engine computes prompts, and a decode engine answers. The KV passes through their sidecars.

All tests share the engines. When an engine or a sidecar fails, the decode engine computes what is missing.
"""

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from testing.child_process import free_ports, wait_until
from testing.deadlines import COPIES, STANDARD, deadlines
from testing.engine.process import EngineProcess, Generated, ServedEngine, connector_config, patient_config
from testing.peers import PeerSidecars
from testing.processes import SidecarProcess
from testing.router import RouterProcess
from tests.harness.client import real_engine
from tests.harness.client.real_engine import CHUNK, assert_hit, wait_hit

DEADLINES = COPIES

pytestmark = pytest.mark.vllm

LONG_CHUNKS = 16
NUM_CHUNKS, TAIL = 8, 43
STEP_CHUNKS = 2
"""Chunks of a step. With several steps, an engine can fail in the middle of a prompt."""

TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
"""Parameters that a router sends to the prefill engine."""


def make_prompt(seed: str, num_chunks: int = NUM_CHUNKS) -> list[int]:
    return real_engine.make_prompt(num_chunks * CHUNK + TAIL, seed)


@contextlib.contextmanager
def sidecars_on(num_nodes: int, folder: Path, **options: Any) -> Iterator[list[SidecarProcess]]:
    """The sidecars of a prefill engine and of a decode engine: one, or two that are peers."""
    options = {"memory_size": "256Mi"} | options
    if num_nodes == 1:
        with SidecarProcess(**options) as sidecar:
            yield [sidecar, sidecar]
    else:
        with PeerSidecars(folder, **options) as pods:
            yield pods.sidecars


def num_loaded_tokens(sidecars: list[SidecarProcess]) -> int:
    """Prompt tokens that the decode engine's sidecar has had from memory, its own or the peer's, so far."""
    source = "memory" if sidecars[0] is sidecars[1] else "peers"
    return int(sidecars[1].stats()["causes"]["cause_tokens"].get(source, 0))


def assert_nothing_leaks(sidecars: list[SidecarProcess]) -> None:
    """No lease, quarantined slot or client, and no row that is read or written, is left."""

    def is_clean(stats: dict[str, Any]) -> bool:
        memory = stats["memory"]
        is_held = memory["leased_rows"] or memory["quarantined_slots"] or stats["num_clients"]["quarantined"]
        return not is_held and not stats["num_unwritten_rows"]

    for sidecar in sidecars:
        sidecar.wait_until(is_clean)


class Pools:
    """Two engines that this process steps, for all tests. ``running`` replaces those that a test killed."""

    def __init__(self, folder: Path, sidecars: list[SidecarProcess], *, is_patient: bool = True) -> None:
        self.sidecars = sidecars
        self._folder, self._config = folder, patient_config if is_patient else connector_config
        self._engines = {name: self._start(name, node) for node, name in enumerate(("prefill", "decode"))}

    @property
    def prefill(self) -> EngineProcess:
        return self._engines["prefill"]

    @property
    def decode(self) -> EngineProcess:
        return self._engines["decode"]

    def running(self) -> Self:
        """Return the pools with two running engines, which are attached."""
        for node, (name, engine) in enumerate(self._engines.items()):
            if not engine.is_running:
                engine.close()
                self._engines[name] = self._start(name, node)
        for engine, sidecar in zip(self._engines.values(), self.sidecars, strict=True):
            wait_hit(engine, sidecar)
        return self

    def compute(self, prompt: list[int]) -> Generated:
        """Run a prompt in the decode engine that finds no KV, because another tenant stores it."""
        (answer,) = self.decode.generate(prompt, cache_salt="reference")
        assert answer.num_cached_tokens == 0
        return answer

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def _start(self, name: str, node: int) -> EngineProcess:
        return EngineProcess(
            self._folder / f"{name}.log",
            self._config(self.sidecars[node].socket_path),
            max_num_batched_tokens=STEP_CHUNKS * CHUNK,
        )


@pytest.fixture(scope="module", params=[1, 2], ids=["one node", "two nodes"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    folder = tmp_path_factory.mktemp("pools")
    with sidecars_on(request.param, folder) as sidecars:
        pools = Pools(folder, sidecars)
        yield pools
        pools.close()


@pytest.fixture
def pools(both: Pools) -> Pools:
    return both.running()


def test_decode_engine_answers_like_one_engine_from_the_prefill_engines_kv(pools: Pools) -> None:
    before = num_loaded_tokens(pools.sidecars)
    prompts = [make_prompt(f"{number}") for number in range(3)]
    for prompt in prompts:
        computed = pools.compute(prompt)
        pools.decode.scrub_kv()
        (first,) = pools.prefill.generate(prompt, max_tokens=1, kv_transfer_params=TO_DECODE)
        (answer,) = pools.decode.generate(prompt, kv_transfer_params=first.kv_transfer_params)
        assert first.num_cached_tokens == 0
        assert first.kv_transfer_params is not None
        assert first.kv_transfer_params["lmcache"]["num_tokens"] == NUM_CHUNKS * CHUNK
        assert first.tokens == computed.tokens[:1]
        assert answer.num_used_cached_tokens == len(prompt) - TAIL, "only the tail is computed twice"
        assert_hit(answer, computed, NUM_CHUNKS * CHUNK)
    wait_loaded(pools.sidecars, before + len(prompts) * NUM_CHUNKS * CHUNK)
    if pools.sidecars[0] is not pools.sidecars[1]:
        served = pools.sidecars[0].stats()["peer_server"]["read_columns"]
        assert served >= len(prompts) * NUM_CHUNKS
    assert_nothing_leaks(pools.sidecars)


def wait_loaded(sidecars: list[SidecarProcess], num_tokens: int) -> None:
    """Wait until this number of tokens was loaded from memory. Engines report loads after their answers."""
    wait_until(lambda: num_loaded_tokens(sidecars) >= num_tokens, what="the KV was loaded")


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_prefill_engine_fails_during_the_prompt(pools: Pools, fault: str) -> None:
    prompt = make_prompt(f"long {fault}", LONG_CHUNKS)
    expected = pools.compute(prompt)
    store = pools.sidecars[0]
    num_rows = store.stats()["memory"]["used_rows"] + STEP_CHUNKS
    pools.prefill.start_generate(prompt, max_tokens=1, kv_transfer_params=TO_DECODE)
    store.wait_until(lambda stats: stats["memory"]["used_rows"] >= num_rows)
    getattr(pools.prefill, fault)()
    (answer,) = pools.decode.generate(prompt)
    assert answer.tokens == expected.tokens
    assert answer.finish_reason == "length"
    if fault == "freeze":
        pools.prefill.thaw()
        (first,) = pools.prefill.finish_generate()
        assert first.tokens == expected.tokens[:1]
    assert_nothing_leaks(pools.sidecars)

    def is_full_hit() -> bool:
        (again,) = pools.decode.generate(prompt)
        assert again.tokens == expected.tokens
        return again.num_used_cached_tokens == LONG_CHUNKS * CHUNK

    wait_until(is_full_hit, what="rows that were reserved can be stored")


def test_sidecar_is_frozen_after_the_hand_over(tmp_path: Path) -> None:
    """All have the usual deadlines: a frozen sidecar must not hold up an answer."""
    with deadlines(STANDARD), sidecars_on(2, tmp_path, peer_answer_seconds=0.005) as sidecars:
        pools = Pools(tmp_path, sidecars, is_patient=False)
        for number, sidecar in enumerate([*sidecars, *sidecars]):
            pools.running()
            prompt = make_prompt(f"frozen {number}")
            expected = pools.compute(prompt)
            (first,) = pools.prefill.generate(prompt, max_tokens=1, kv_transfer_params=TO_DECODE)
            sidecar.freeze()
            (answer,) = pools.decode.generate(prompt, kv_transfer_params=first.kv_transfer_params)
            assert answer.tokens == expected.tokens
            sidecar.thaw()
            assert_nothing_leaks(sidecars)
        pools.close()


def test_decode_engine_is_killed_after_the_hand_over(pools: Pools) -> None:
    prompt = make_prompt("killed")
    expected = pools.compute(prompt)
    (first,) = pools.prefill.generate(prompt, max_tokens=1, kv_transfer_params=TO_DECODE)
    before = num_loaded_tokens(pools.sidecars)
    pools.decode.start_generate(prompt, max_tokens=2000, kv_transfer_params=first.kv_transfer_params)
    wait_loaded(pools.sidecars, before + 1)
    pools.decode.kill()
    assert_nothing_leaks(pools.sidecars)
    (answer,) = pools.running().decode.generate(prompt, kv_transfer_params=first.kv_transfer_params)
    assert answer.tokens == expected.tokens
    assert answer.num_used_cached_tokens == len(prompt) // CHUNK * CHUNK
    for sidecar in dict.fromkeys(pools.sidecars):
        assert_nothing_leaks([sidecar])
        assert sidecar.terminate() == 0, "no reader holds it up"
        sidecar.start()


def test_router_sends_prompts_to_one_pool_and_returns_answers_of_the_other(tmp_path: Path) -> None:
    with contextlib.ExitStack() as running:
        sidecars = running.enter_context(sidecars_on(2, tmp_path))
        engines = []
        for sidecar, port in zip(sidecars, free_ports(2), strict=True):
            engine = ServedEngine(tmp_path / f"{port}.log", port, patient_config(sidecar.socket_path))
            engines.append(running.enter_context(engine))
        for engine, sidecar in zip(engines, sidecars, strict=True):
            wait_hit(engine.wait_ready(), sidecar)
        pools = ("--prefill", engines[0].url, "--decode", engines[1].url)
        checks = ("--health-check-interval-secs=2", "--health-failure-threshold=1")
        router = RouterProcess((), "--vllm-pd-disaggregation", "--policy=round_robin", *checks, *pools)
        running.enter_context(router)
        for is_stream in (False, True):
            prompt = make_prompt(f"routed {is_stream}")
            before = num_loaded_tokens(sidecars)
            tokens = ask(router.url, prompt, stream=is_stream)
            wait_loaded(sidecars, before + NUM_CHUNKS * CHUNK)
            assert tokens == ask(engines[1].url, prompt, cache_salt="reference"), "another tenant finds no KV"
            assert_nothing_leaks(sidecars)
        engines[0].close()
        assert failure(router.url, prompt) in (500, 503), "the router repeats no request on another engine"
        wait_until(lambda: failure(router.url, prompt) == 503, what="the router has checked the dead engine")
        assert ask(engines[1].url, prompt) == tokens, "without the router, the decode engine computes prompts"


def failure(url: str, prompt: list[int]) -> int:
    """Return the status of a request that fails."""
    with pytest.raises(urllib.error.HTTPError) as failed:
        ask(url, prompt)
    with failed.value as answer:
        return answer.code


def ask(url: str, prompt: list[int], **options: Any) -> list[int]:
    """Send a prompt to an engine or the router. Returns the tokens of the answer, which may be a stream."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    data = json.dumps(body | {"return_token_ids": True} | options).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        lines = [line.removeprefix(b"data: ") for line in answer.read().splitlines()]
    parts = [json.loads(line) for line in lines if line.startswith(b"{")]
    return [token for part in parts for choice in part["choices"] for token in choice["token_ids"] or ()]
