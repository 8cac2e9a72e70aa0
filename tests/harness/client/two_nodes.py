"""A real engine over two nodes with a real sidecar on each, for tests of both together."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from testing import workers
from testing.child_process import wait_until
from testing.engine.environment import LOAD_GATE, STORE_GATE
from testing.engine.process import connector_config
from testing.engine.tiny_kinds import TinyKind
from testing.engine.two_nodes import TwoNodeEngine, TwoNodes, are_allowed
from testing.processes import SidecarProcess
from tests.harness.client.real_engine import BLOCK, CHUNK, make_prompt, num_cached

LEADER, FOLLOWER = 0, 1
ROWS = 4
"""Rows of a prompt of ``new_prompt`` on each node."""
WHOLE = ROWS * CHUNK
"""Tokens of a whole hit of such a prompt."""
ANSWER_TOKENS = 8
METRICS = "vllm:lmcache_"


class TwoNodeWorld:
    """The engine, its nodes and their sidecars.

    Each request must get the same tokens as the first one with its prompt, which must find nothing.
    """

    def __init__(
        self,
        folder: Path,
        *args: str,
        kind: TinyKind | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``args``, ``environment``: of ``TwoNodeEngine``. ``kind``: another model than the tiny one.

        A hit of another model may be computed by other kernels than a whole prompt, so its tokens must equal
        those of the first hit of the same length.
        """
        self._folder, self._args, self._kind = folder, args, kind
        self._environment = environment
        self._resources = contextlib.ExitStack()
        self._engine: TwoNodeEngine | None = None
        self._expected: dict[tuple[int, ...], list[int]] = {}
        self._num_prompts = 0
        self.gates = [{name: folder / f"{name}-{node}" for name in ("load", "store")} for node in range(2)]
        """Files that stop loads or stores of a node while they exist."""

    def __enter__(self) -> TwoNodeWorld:
        with contextlib.ExitStack() as stack:
            self.sidecars = [stack.enter_context(SidecarProcess()) for _ in range(2)]
            shared = [sidecar.folder for sidecar in self.sidecars]
            self.nodes = stack.enter_context(TwoNodes(self._folder, shared))
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        # On SIGINT, the ranks occupy two cores until the engine has ended, for nine seconds.
        for part in self._engine.parts if self._engine is not None else ():
            part.kill()
        self.stop()
        self._resources.close()

    @property
    def engine(self) -> TwoNodeEngine:
        assert self._engine is not None
        return self._engine

    def start(self) -> None:
        """Start the engine unless it runs, and wait until it hits, and can use all memory of both nodes."""
        if self._engine is not None and all(part.is_running for part in self._engine.parts):
            return
        self.stop()
        environments = [
            {
                "VLLM_CPU_OMP_THREADS_BIND": str(workers.cores(2)[number]),
                "VLLM_SERVER_DEV_MODE": "1",
                LOAD_GATE: str(gates["load"]),
                STORE_GATE: str(gates["store"]),
                **self._environment,
            }
            for number, gates in enumerate(self.gates)
        ]
        self._engine = TwoNodeEngine(
            self.nodes,
            self._folder,
            [connector_config(sidecar.socket_path) for sidecar in self.sidecars],
            "--tensor-parallel-size=2",
            *self._args,
            environments=environments,
            model=self._kind.path if self._kind else None,
        )
        self._engine.wait_ready()
        self.wait_attached()

    def stop(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def wait_attached(self) -> None:
        """Wait until scheduler and workers are attached, and all memory of both nodes can be used."""

        def run_short_request() -> None:
            self.nodes.submit(self.engine.leader.run_short_request).result()

        for sidecar, num_clients in zip(self.sidecars, (2, 1), strict=True):
            sidecar.wait_attached(run_short_request, num_clients)

    def new_prompt(self, num_tokens: int = WHOLE + BLOCK) -> list[int]:
        """Return a prompt that the engine has not run before."""
        self._num_prompts += 1
        return make_prompt(num_tokens, f"two nodes {self._num_prompts}")

    def submit(self, prompt: list[int]) -> Future[int]:
        """Run a prompt on a thread. The result is the number of cached tokens."""
        return self.nodes.submit(self._complete, prompt)

    def complete(self, prompt: list[int]) -> int:
        """Run a prompt. Returns the number of cached tokens."""
        return self.submit(prompt).result()

    def _complete(self, prompt: list[int]) -> int:
        answer = self.engine.leader.complete(prompt, ANSWER_TOKENS)
        tokens, number = answer["choices"][0]["token_ids"], num_cached(answer)
        key = (number if self._kind else 0, *prompt)
        assert self._kind or number == 0 or key in self._expected, "the first request found something"
        assert tokens == self._expected.setdefault(key, tokens), f"{number} tokens were cached"
        return number

    def wait_hits(self, *prompts: list[int]) -> None:
        """Run each prompt until it hits as a whole."""
        for prompt in prompts:
            whole = (len(prompt) - 1) // CHUNK * CHUNK
            wait_until(lambda prompt=prompt, whole=whole: self.complete(prompt) == whole, what="a whole hit")

    def post(self, path: str, **body: Any) -> None:
        """POST to the leader, which must answer with status 200."""
        data = json.dumps(body).encode() if body else b""
        request = urllib.request.Request(
            self.engine.leader.url + path, data, {"Content-Type": "application/json"}
        )

        def send() -> int:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return int(answer.status)

        assert self.nodes.submit(send).result() == 200

    def metrics(self) -> dict[str, float]:
        """The connector's counters by their names, of all ranks."""
        metrics = self.nodes.submit(self.engine.leader.metrics, METRICS).result()
        return {name.removeprefix(METRICS).removesuffix("_total"): value for name, value in metrics.items()}

    def wipe(self, node: int, **options: Any) -> None:
        """Kill a sidecar, and start it without the arena. ``options`` replace those of the sidecar."""
        sidecar = self.sidecars[node]
        sidecar.kill()
        sidecar.arena_path.unlink()
        sidecar.options |= options
        sidecar.start()

    @contextlib.contextmanager
    def held(self, node: int, name: str) -> Iterator[Callable[[], None]]:
        """Stop the "load" or "store" copies of a node. Yields a function that waits for one to arrive."""
        gate = self.gates[node][name]
        gate.touch()
        try:
            yield lambda: wait_until(lambda: gate.stat().st_size, what=f"a {name} of node {node}")
        finally:
            gate.unlink()


def running(world: TwoNodeWorld) -> Iterator[TwoNodeWorld]:
    """Enter the world of a fixture with module scope. Skips its tests where nodes can't be created."""
    if not are_allowed():
        pytest.skip("this machine allows no network namespaces")
    with world:
        world.start()
        yield world


def results(futures: Sequence[Future[int]]) -> list[int]:
    """Wait for requests."""
    return [future.result() for future in futures]
