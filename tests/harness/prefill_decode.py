"""A prefill engine and a decode engine on one node or on two, and vLLM's router in front of them."""

from __future__ import annotations

import contextlib
import json
import random
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from testing.child_process import free_ports, wait_until
from testing.engine.process import EngineProcess, ServedEngine, connector_config
from testing.peers import PeerSidecars
from testing.processes import SidecarProcess
from testing.router import RouterProcess

CHUNK, BLOCK = 256, 32
NUM_CHUNKS, TAIL = 8, 43
ANSWER_SECONDS = 30.0
"""Seconds until an engine computes an unanswered request. A busy machine must not turn hits into misses."""

TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
"""Parameters that a router sends to the prefill engine."""


def make_prompt(seed: str, num_chunks: int = NUM_CHUNKS) -> list[int]:
    return random.Random(seed).choices(range(4, 260), k=num_chunks * CHUNK + TAIL)


@contextlib.contextmanager
def sidecars_on(num_nodes: int, folder: Path, **options: Any) -> Iterator[list[SidecarProcess]]:
    """The sidecars of a prefill engine and of a decode engine: one, or two that are peers."""
    options = {"memory_size": "64Mi"} | options
    if num_nodes == 1:
        with SidecarProcess(**options) as sidecar:
            yield [sidecar, sidecar]
    else:
        with PeerSidecars(folder, **options) as pods:
            yield pods.sidecars


def assert_nothing_leaks(sidecar: SidecarProcess) -> None:
    """No lease, quarantined slot or client, and no row that is read or written, is left."""

    def is_clean(stats: dict[str, Any]) -> bool:
        memory = stats["memory"]
        is_held = memory["leased_rows"] or memory["quarantined_slots"] or stats["num_clients"]["quarantined"]
        return not is_held and not stats["num_unwritten_rows"]

    sidecar.wait_until(is_clean)


class Pools:
    """Two engines that this process steps. Ready and attached in the context."""

    def __init__(
        self, folder: Path, num_nodes: int, answer_seconds: float = ANSWER_SECONDS, **options: Any
    ) -> None:
        """``options`` are those of the sidecars."""
        self._folder, self._num_nodes, self._options = folder, num_nodes, options
        self._answer_seconds = answer_seconds
        self._running = contextlib.ExitStack()

    sidecars: list[SidecarProcess]
    prefill: EngineProcess
    decode: EngineProcess

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as running:
            sidecars = sidecars_on(self._num_nodes, self._folder, **self._options)
            self.sidecars = running.enter_context(sidecars)
            self.prefill, self.decode = (
                running.enter_context(self.engine(name, sidecar))
                for name, sidecar in zip(("prefill", "decode"), self.sidecars, strict=True)
            )
            for engine in (self.prefill, self.decode):
                wait_attached(engine)
            for sidecar in self.sidecars:
                sidecar.wait_usable()
            self._running = running.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.__exit__(kind, error, trace)

    def engine(self, name: str, sidecar: SidecarProcess) -> EngineProcess:
        """Start another engine over this sidecar. A context manager."""
        config = connector_config(sidecar.socket_path, answer_seconds=self._answer_seconds)
        return EngineProcess(self._folder / f"{name}.log", config)

    def num_loaded_tokens(self, source: str) -> int:
        """Prompt tokens that the decode engine's sidecar has had from ``source`` so far."""
        return int(self.sidecars[1].stats()["causes"]["cause_tokens"].get(source, 0))


def wait_attached(engine: EngineProcess) -> None:
    """Wait until the engine hits a prompt of its own. Its sidecar knows of it before the engine does."""
    small = make_prompt(f"attached {engine.pid}", 1)
    wait_until(lambda: engine.generate(small, max_tokens=1)[0].num_cached_tokens, what="a hit")


class RoutedPools:
    """Two engines with HTTP servers and a router, and an engine without a cache, to compare with."""

    def __init__(
        self,
        sidecars: list[SidecarProcess],
        prefill: ServedEngine,
        decode: ServedEngine,
        alone: ServedEngine,
        router: RouterProcess,
    ) -> None:
        self.sidecars, self.prefill, self.decode = sidecars, prefill, decode
        self.alone, self.router = alone, router

    def num_loaded_tokens(self, source: str) -> int:
        """Prompt tokens that the decode engine's sidecar has had from ``source`` so far."""
        return int(self.sidecars[1].stats()["causes"]["cause_tokens"].get(source, 0))

    def ask(self, prompt: list[int], max_tokens: int = 8, *, stream: bool = False) -> list[dict[str, Any]]:
        """Send a prompt to the router. Returns the answer, as parts if it is a stream."""
        with urllib.request.urlopen(self.request(prompt, max_tokens, stream=stream), timeout=300) as answer:
            if not stream:
                return [json.load(answer)]
            lines = [line.removeprefix(b"data: ") for line in answer if line.startswith(b"data: {")]
        return [json.loads(line) for line in lines]

    def request(
        self, prompt: list[int], max_tokens: int = 8, *, stream: bool = False
    ) -> urllib.request.Request:
        """Return a request for the router."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True, "stream": stream}
        headers = {"Content-Type": "application/json"}
        return urllib.request.Request(f"{self.router.url}/v1/completions", json.dumps(body).encode(), headers)


@contextlib.contextmanager
def routed_pools(folder: Path, num_nodes: int) -> Iterator[RoutedPools]:
    """Start the engines and the router, and wait until the engines are attached."""
    with contextlib.ExitStack() as running:
        sidecars = running.enter_context(sidecars_on(num_nodes, folder, memory_size="128Mi"))
        configs = [
            connector_config(sidecar.socket_path, answer_seconds=ANSWER_SECONDS) for sidecar in sidecars
        ]
        engines = [
            running.enter_context(ServedEngine(folder / f"{name}.log", port, config))
            for name, port, config in zip(
                ("prefill", "decode", "alone"), free_ports(3), (*configs, None), strict=True
            )
        ]
        for engine in engines:
            engine.wait_ready()
        for number, engine in enumerate(engines[:2]):
            small = make_prompt(f"attached {number}", 1)
            wait_until(lambda: num_cached(engine.complete(small, 1)), what="a hit")  # noqa: B023
        for sidecar in sidecars:
            sidecar.wait_usable()
        router = RouterProcess(
            (),
            *("--vllm-pd-disaggregation", "--policy=round_robin"),
            *("--prefill", engines[0].url, "--decode", engines[1].url),
        )
        yield RoutedPools(sidecars, *engines, running.enter_context(router))


def num_cached(answer: dict[str, Any]) -> int:
    """Prompt tokens that the engine did not compute."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0)
