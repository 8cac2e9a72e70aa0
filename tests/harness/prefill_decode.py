"""A prefill engine and a decode engine on one node or on two, and vLLM's router in front of them."""

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from testing.child_process import free_ports
from testing.engine.process import EngineProcess, ServedEngine, connector_config, patient_config
from testing.peers import PeerSidecars
from testing.processes import SidecarProcess
from testing.router import RouterProcess
from tests.harness import real_engine
from tests.harness.real_engine import CHUNK, wait_hit

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

    def compute(self, prompt: list[int]) -> real_engine.Generated:
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


class RoutedPools:
    """Two engines with HTTP servers and a router."""

    def __init__(
        self,
        sidecars: list[SidecarProcess],
        prefill: ServedEngine,
        decode: ServedEngine,
        router: RouterProcess,
    ) -> None:
        self.sidecars, self.prefill, self.decode, self.router = sidecars, prefill, decode, router

    def ask(self, prompt: list[int], max_tokens: int = 8, **options: Any) -> list[dict[str, Any]]:
        """Send a prompt to the router. Returns the answer, as parts if it is a stream."""
        return _ask(self.request(prompt, max_tokens, **options))

    def compute(self, prompt: list[int]) -> list[dict[str, Any]]:
        """Answer a prompt by one engine that finds no KV, because another tenant stores it."""
        return _ask(self.request(prompt, url=self.decode.url, cache_salt="reference"))

    def request(
        self, prompt: list[int], max_tokens: int = 8, *, url: str = "", **options: Any
    ) -> urllib.request.Request:
        """Return a request for the router, or for the engine with this URL."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True, **options}
        headers = {"Content-Type": "application/json"}
        url = url or self.router.url
        return urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)


def _ask(request: urllib.request.Request) -> list[dict[str, Any]]:
    with urllib.request.urlopen(request, timeout=300) as answer:
        lines = answer.read().splitlines()
    if len(lines) == 1:
        return [json.loads(lines[0])]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]


@contextlib.contextmanager
def routed_pools(folder: Path) -> Iterator[RoutedPools]:
    """Start engines on two nodes and the router, and wait until the engines are attached."""
    with contextlib.ExitStack() as running:
        sidecars = running.enter_context(sidecars_on(2, folder))
        engines = [
            running.enter_context(
                ServedEngine(folder / f"{port}.log", port, patient_config(sidecar.socket_path))
            )
            for sidecar, port in zip(sidecars, free_ports(2), strict=True)
        ]
        for engine, sidecar in zip(engines, sidecars, strict=True):
            wait_hit(engine.wait_ready(), sidecar)
        router = RouterProcess(
            (),
            *("--vllm-pd-disaggregation", "--policy=round_robin"),
            *("--prefill", engines[0].url, "--decode", engines[1].url),
        )
        yield RoutedPools(sidecars, *engines, running.enter_context(router))
