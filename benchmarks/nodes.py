"""Measure a hit of an engine whose two ranks are on two nodes, compared with both ranks on one node.

A node is a network namespace with a sidecar of its own, so this needs root. The connector's time is that of a
hit's lookup and wait on the scheduler side, and of the load on a rank. vLLM's own steps between nodes take
longer, whatever the connector does, so they count separately. Both engines run each prompt in turn, in random
order, so that other load on the machine affects both alike.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cores import two_cores
from benchmarks.new_prompts import random_tokens
from benchmarks.report import Report, at_most, of, paired
from testing.child_process import free_port, wait_until
from testing.engine import fork_server
from testing.engine.process import ServedEngine, connector_config
from testing.engine.two_nodes import TwoNodeEngine, TwoNodes, are_allowed
from testing.processes import SidecarProcess

STARTS, PROMPTS, HITS = 2, 5, 12
"""Number of starts of both engines, prompts per start, and hits per prompt."""
HIT_TOKENS = 2048
PROMPT_TOKENS = HIT_TOKENS + 16
LAYERS, KV_HEADS = 32, 4
KV_BYTES_PER_TOKEN = LAYERS * KV_HEADS * 2 * 64 * 4  # keys and values, of 64 floats each
ARGUMENTS = (
    "--tensor-parallel-size=2",
    "--load-format=dummy",
    f"--hf-overrides={json.dumps({'num_hidden_layers': LAYERS, 'num_key_value_heads': KV_HEADS})}",
    f"--kv-cache-memory-bytes={512 << 20}",
)
"""Random weights with KV as large as that of real models, on which the time of a load depends."""

METRICS = "vllm:lmcache_load"
LOAD_SECONDS, LOADS = f"{METRICS}_seconds_total", f"{METRICS}s_total"

Complete = Callable[[list[int]], dict[str, Any]]
Metrics = Callable[[str], dict[str, float]]


class Hits(NamedTuple):
    """Mean seconds of the hits of one prompt."""

    lookup: float
    wait: float
    load: float
    """Time from the step that begins the load to the step that ends it on all ranks."""
    rank_load: float
    """The load on one rank, without the engine's steps."""
    longest_wait: float

    @property
    def connector(self) -> float:
        """The connector's time."""
        return self.lookup + self.wait + self.rank_load

    @property
    def whole(self) -> float:
        """The connector's time, and the steps of the engine around the load."""
        return self.lookup + self.wait + self.load


class Way:
    """An engine, and the sidecar to which its scheduler reports."""

    def __init__(self, complete: Complete, metrics: Metrics, sidecar: SidecarProcess) -> None:
        self._complete, self._metrics, self._sidecar = complete, metrics, sidecar
        self._prompt: list[int] = []
        self._before: dict[str, float] = {}
        self._seconds: list[tuple[float, float, float]] = []

    def begin(self, prompt: list[int]) -> None:
        """Store a prompt, of which the next hits are measured."""
        self._prompt, self._seconds = prompt, []
        wait_until(self._hit, what="a whole hit")
        self._before = self._metrics(METRICS)

    def measure(self) -> None:
        """Measure a hit."""
        request = self._hit()
        if request is None:
            raise RuntimeError("a prompt did not hit as a whole; is the machine busy?")
        load = sum(request["load_seconds"].values())
        self._seconds.append((request["lookup_seconds"], request["wait_seconds"], load))

    def end(self) -> Hits:
        """Return the figures of the hits since ``begin``."""
        after = self._metrics(METRICS)
        seconds, loads = (after[name] - self._before[name] for name in (LOAD_SECONDS, LOADS))
        lookups, waits, whole_loads = zip(*self._seconds, strict=True)
        lookup, wait, load = map(statistics.mean, (lookups, waits, whole_loads))
        return Hits(lookup, wait, load, seconds / loads, longest_wait=max(waits))

    def _hit(self) -> dict[str, Any] | None:
        """Run the prompt. Returns the request on the sidecar's page, or None if it was no whole hit."""
        answer = self._complete(self._prompt)
        if (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") != HIT_TOKENS:
            return None

        def ended() -> dict[str, Any] | None:
            page = json.loads(self._sidecar.get(f"/requests?id={answer['id']}"))["requests"]
            return page[0] if page and page[0]["first_token_seconds"] is not None else None

        request: dict[str, Any] = wait_until(ended, what="the times of a request")
        return request


@contextmanager
def ways(folder: Path) -> Iterator[dict[str, Way]]:
    """Start an engine on two nodes, and one on one node."""
    with ExitStack() as stack:
        leader, follower, single = (stack.enter_context(SidecarProcess(memory_size="1Gi")) for _ in range(3))
        stack.enter_context(fork_server.allowed())
        nodes = stack.enter_context(TwoNodes(folder, [leader.folder, follower.folder]))
        configs = [connector_config(sidecar.socket_path) for sidecar in (leader, follower)]
        cores = [str(core) for core in two_cores()]  # ranks on one node, too, have a core each
        binding = [{"VLLM_CPU_OMP_THREADS_BIND": each} for each in (*cores, "|".join(cores))]
        both = TwoNodeEngine(nodes, folder, configs, *ARGUMENTS, environments=binding[:2])
        stack.callback(both.close)
        config, log = connector_config(single.socket_path), folder / "alone.log"
        alone = stack.enter_context(
            ServedEngine(log, free_port(), config, *ARGUMENTS, environment=binding[2])
        )
        both.wait_ready()
        alone.wait_ready()

        def complete(prompt: list[int]) -> dict[str, Any]:
            return nodes.submit(both.leader.complete, prompt, 1).result()

        def metrics(prefix: str) -> dict[str, float]:
            return nodes.submit(both.leader.metrics, prefix).result()

        yield {
            "two nodes": Way(complete, metrics, leader),
            "one node": Way(lambda prompt: alone.complete(prompt, 1), alone.metrics, single),
        }


def run() -> Report:
    if not are_allowed():
        return Report("nodes", "not measured: this machine allows no network namespaces", [])
    measured: dict[str, list[Hits]] = {"two nodes": [], "one node": []}
    for start in range(STARTS):
        with tempfile.TemporaryDirectory() as folder, ways(Path(folder)) as started:
            for number in range(PROMPTS):
                prompt = random_tokens(100 * start + number, PROMPT_TOKENS)
                for way in started.values():
                    way.begin(prompt)
                for _ in range(HITS):
                    for name in random.sample([*started], len(started)):
                        started[name].measure()
                for name, way in started.items():
                    measured[name].append(way.end())
    rows = "\n".join(
        f"  {name:<10}  "
        + ", ".join(
            f"{part} {statistics.median(getattr(each, part) for each in hits) * 1e3:.2f} ms"
            for part in Hits._fields
        )
        for name, hits in measured.items()
    )
    conditions = (
        f"vLLM on the CPU with two tensor-parallel ranks, a Llama of {LAYERS} small layers\n"
        f"(fp32, {KV_BYTES_PER_TOKEN >> 10} KiB of KV per token);\n"
        f"hits of {HIT_TOKENS} tokens; {STARTS} starts of both engines, each with {PROMPTS} prompts and"
        f" {HITS} hits of each. Medians:\n{rows}"
    )
    both, alone = measured.values()
    connector = paired([hits.connector for hits in both], [hits.connector for hits in alone])
    whole = paired([hits.whole for hits in both], [hits.whole for hits in alone])
    what = "a hit over two nodes, compared with one node"
    return Report(
        "nodes",
        conditions,
        [
            at_most(f"connector's time of {what}", connector, "x", 1.1),
            of(f"the same with the engine's steps, {what}", whole, "x"),
            at_most(
                "longest wait of a hit over two nodes", max(hits.longest_wait for hits in both), "s", 0.25
            ),
        ],
    )
