"""Compute prompts in one engine and answers in another one: the hand-over, and its effect on other answers.

The engines are real, and serve HTTP. Each pool has one core: the prefill engine the first one, the decode
engine the second one. The sidecar of an engine runs on the core of the engine. One sidecar for both engines
may use both cores. The benchmark itself acts as the router.

- **hand-over**: time from the prefill engine's answer to the decode engine's first token. The reference is
  the same prompt once more at the decode engine, a hit in the memory of its sidecar. Both go over HTTP.
- **other answers**: time between two tokens of four answers while a prompt of 8,192 tokens arrives. The
  reference is the same time without the prompt. With one pool, the prompt goes to the decode engine alone.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks import cores
from benchmarks.new_prompts import random_tokens
from benchmarks.report import Figure, Report, at_most, of, paired, spread
from testing.child_process import free_ports, wait_until
from testing.engine.process import ServedEngine, connector_config
from testing.peers import PeerSidecars
from testing.processes import SidecarProcess

CHUNK_TOKENS, TAIL_TOKENS = 256, 43
PROMPT_TOKENS = 8192 + TAIL_TOKENS
HAND_OVERS, WARM_UP = 15, 3
ARRIVALS, NUM_ANSWERS, WINDOW_SECONDS = 9, 4, 2.0
ONE_NODE, TWO_NODES = "on one node", "through peers"
LIMITS = {ONE_NODE: 1.2, TWO_NODES: 2.0}
"""Largest hand-over, as a ratio to a memory hit."""
WAYS = "two pools", "one pool"
TIMEOUT_SECONDS = 300.0

Percentiles = dict[str, tuple[list[float], list[float]]]
"""99th percentiles of the seconds between two tokens, undisturbed and disturbed, by way."""


class Pools(NamedTuple):
    """Two engines, and the processes of their sidecars."""

    prefill: ServedEngine
    decode: ServedEngine
    sidecars: list[SidecarProcess]


class Samples(NamedTuple):
    """Seconds of all rounds."""

    hand_over: list[float]
    memory_hit: list[float]
    first: list[float]
    """Time from the request to the prefill engine's answer."""

    def described(self) -> list[tuple[str, list[float]]]:
        """Return the samples with their names."""
        return [("prompt", self.first), ("hand-over", self.hand_over), ("memory hit", self.memory_hit)]


class Stream:
    """A running answer of an engine. ``times`` has the time of each token."""

    def __init__(self, engine: ServedEngine, prompt: list[int], max_tokens: int, params: Any = None) -> None:
        self.times: list[float] = []
        self.num_cached = 0
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        body |= {"return_token_ids": True, "kv_transfer_params": params}
        self._connection = http.client.HTTPConnection(urlsplit(engine.url).netloc, timeout=TIMEOUT_SECONDS)
        self.began_at = time.monotonic()
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self._response = self._connection.getresponse()

    def run(self) -> Stream:
        """Read the answer to its end."""
        for line in self._response:
            if line.startswith(b"data: {"):
                part = json.loads(line.removeprefix(b"data: "))
                now = time.monotonic()
                self.times += [now for each in part["choices"] for _ in each["token_ids"] or ()]
                if part.get("usage"):
                    self.num_cached = part["usage"]["prompt_tokens_details"]["cached_tokens"] or 0
        return self

    def close(self) -> None:
        """End the answer."""
        self._connection.close()

    @property
    def first_token_seconds(self) -> float:
        """Seconds from the request to the first token."""
        return self.times[0] - self.began_at


class RunningAnswers:
    """Answers that the engine computes in the background, while the context is open."""

    def __init__(self, engine: ServedEngine, seed: int) -> None:
        prompts = [random_tokens(seed + number, TAIL_TOKENS) for number in range(NUM_ANSWERS)]
        self._streams = [Stream(engine, prompt, 8000) for prompt in prompts]
        self._threads = [threading.Thread(target=self._read, args=(each,)) for each in self._streams]

    def __enter__(self) -> RunningAnswers:
        for thread in self._threads:
            thread.start()
        wait_until(lambda: all(len(stream.times) > 20 for stream in self._streams), what="tokens")
        return self

    def __exit__(self, *error: object) -> None:
        for stream in self._streams:
            stream.close()
        for thread in self._threads:
            thread.join()

    def percentile(self, begin: float, end: float) -> float:
        """Return the 99th percentile of the time between two tokens, from ``begin`` to ``end``."""
        gaps = [
            after - before
            for stream in self._streams
            for before, after in zip(stream.times, stream.times[1:], strict=False)
            if begin <= after and before <= end
        ]
        return statistics.quantiles(gaps, n=100)[-1]

    @staticmethod
    def _read(stream: Stream) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError, http.client.HTTPException):
            stream.run()  # until the other thread closes the connection


@contextlib.contextmanager
def pools(folder: Path, kind: str) -> Iterator[Pools]:
    """Start the engines, and pin them and their sidecars."""
    with ExitStack() as stack:
        if kind == ONE_NODE:
            sidecars = [stack.enter_context(SidecarProcess(memory_size="1Gi"))] * 2
        else:
            peers = PeerSidecars(folder, memory_size="1Gi", peer_answer_seconds=0.005)
            sidecars = stack.enter_context(peers).sidecars
        engines = [
            stack.enter_context(
                ServedEngine(
                    folder / f"{kind} {port}",
                    port,
                    connector_config(sidecar.socket_path),
                    environment={"OMP_NUM_THREADS": "1"},
                )
            )
            for port, sidecar in zip(free_ports(2), sidecars, strict=True)
        ]
        for number, engine in enumerate(engines):
            engine.wait_ready()
            _wait_attached(engine, number)
        both = cores.two_cores()
        for engine, sidecar, core in zip(engines, sidecars, both, strict=True):
            cores.pin([engine.pid], [core])
            cores.pin([sidecar.pid], both if kind == ONE_NODE else [core])
        yield Pools(engines[0], engines[1], sidecars)


def hand_over(pair: Pools, prompt: list[int]) -> tuple[float, Stream]:
    """Send a prompt as a router does. Returns the time of the first engine's answer, and the second answer.

    The second answer has ended.
    """
    params = prefill(pair.prefill, prompt)
    answered_at = time.monotonic()
    return answered_at, Stream(pair.decode, prompt, 4, params).run()


def prefill(engine: ServedEngine, prompt: list[int]) -> Any:
    """Compute a prompt. Returns what the engine announces."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    body["kv_transfer_params"] = {"do_remote_decode": True}
    connection = http.client.HTTPConnection(urlsplit(engine.url).netloc, timeout=TIMEOUT_SECONDS)
    headers = {"Content-Type": "application/json"}
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        return json.load(connection.getresponse())["kv_transfer_params"]


def measure_hand_overs(pair: Pools, seeds: Sequence[int]) -> Samples:
    """Hand prompts over, and repeat each at the decode engine."""
    samples = Samples([], [], [])
    for number, seed in enumerate(seeds):
        prompt = random_tokens(seed, PROMPT_TOKENS)
        began_at = time.monotonic()
        answered_at, answer = hand_over(pair, prompt)
        _check_hit(answer)
        for sidecar in pair.sidecars:
            sidecar.wait_until(lambda stats: not stats["num_unwritten_rows"])
        hit = Stream(pair.decode, prompt, 4).run()
        _check_hit(hit)
        if number >= WARM_UP:
            samples.hand_over.append(answer.times[0] - answered_at)
            samples.memory_hit.append(hit.first_token_seconds)
            samples.first.append(answered_at - began_at)
    return samples


def measure_answers(pair: Pools) -> Percentiles:
    """Let prompts arrive while the decode engine computes answers."""
    percentiles: Percentiles = {way: ([], []) for way in WAYS}
    for number in range(ARRIVALS):
        for way in random.sample(WAYS, len(WAYS)):
            prompt = random_tokens(time.time_ns(), PROMPT_TOKENS)
            with RunningAnswers(pair.decode, 10 * number) as answers:
                began_at = time.monotonic()
                time.sleep(WINDOW_SECONDS)
                arrived_at = time.monotonic()
                if way == WAYS[0]:
                    hand_over(pair, prompt)
                else:
                    Stream(pair.decode, prompt, 4).run()
                undisturbed = answers.percentile(began_at, arrived_at)
                disturbed = answers.percentile(arrived_at, time.monotonic())
            percentiles[way][0].append(undisturbed)
            percentiles[way][1].append(disturbed)
    return percentiles


def run() -> Report:
    """Measure, and return the figures."""
    with contextlib.suppress(PermissionError):  # the clock of a client that waits for a core is late
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    figures: list[Figure] = []
    conditions: list[str] = []
    for number, (kind, limit) in enumerate(LIMITS.items(), 1):
        with tempfile.TemporaryDirectory() as folder, pools(Path(folder), kind) as pair:
            first_seed = 1000 * number
            samples = measure_hand_overs(pair, range(first_seed, first_seed + WARM_UP + HAND_OVERS))
            ratio = paired(samples.hand_over, samples.memory_hit)
            figures.append(at_most(f"hand-over {kind}, of a memory hit", ratio, "x", limit))
            conditions += [f"{kind}, {what}: {spread(seconds)}" for what, seconds in samples.described()]
            if kind == TWO_NODES:
                percentiles = measure_answers(pair)
                figures += _answer_figures(percentiles)
                conditions += _answer_conditions(percentiles)
    return Report("prefill_decode", "\n".join([_CONDITIONS, *conditions]), figures)


_CONDITIONS = (
    f"{PROMPT_TOKENS} prompt tokens, {HAND_OVERS} hand-overs, {ARRIVALS} arrivals, {NUM_ANSWERS} answers,"
    " one core for each pool. Median (min-max):"
)


def _answer_figures(percentiles: Percentiles) -> list[Figure]:
    what = "time between tokens while a prompt arrives, p99, of undisturbed, {}".format
    ratios = {way: paired(after, before) for way, (before, after) in percentiles.items()}
    apart, together = WAYS
    return [at_most(what(apart), ratios[apart], "x", 1.2), of(what(together), ratios[together], "x")]


def _answer_conditions(percentiles: Percentiles) -> list[str]:
    return [
        f"time between tokens, p99, {way}: undisturbed {spread(before)}, disturbed {spread(after)}"
        for way, (before, after) in percentiles.items()
    ]


def _check_hit(answer: Stream) -> None:
    """Raise RuntimeError if the engine computed full chunks."""
    if answer.num_cached != PROMPT_TOKENS - TAIL_TOKENS:
        raise RuntimeError(f"only {answer.num_cached} tokens were loaded; is the machine busy?")


def _wait_attached(engine: ServedEngine, seed: int) -> None:
    small = random_tokens(seed, CHUNK_TOKENS + 1)
    wait_until(lambda: Stream(engine, small, 1).run().num_cached, what="a hit")
