"""Measure hits on a busy engine: queued requests, a hot prefix, and a new engine.

The benchmark compares each case with a reference run in the same minute:

- **queue**: 16 requests arrive at once at an engine that runs two at a time. No chunk is in memory. The
  figure is their cached tokens, as a share of those when the same requests arrive one by one at the idle
  engine.
- **hot**: 50 requests with one prefix of 8,192 tokens arrive at once. The figures are the time to the end of
  the last request, and how often the engine computed the prefix. The reference is an engine without a
  connector. Both engines use vLLM's prefix caching.
- **new**: a new engine gets a prompt of 4,096 tokens that another engine has stored in Redis. The figures are
  the share of full chunks that it loads, and the time to first token, compared with a new prompt.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import Figure, Ratio, Report, at_least, at_most, of, paired, spread
from benchmarks.vllm import forget_memory, prompt
from testing.child_process import wait_until
from testing.engine.process import EngineProcess, connector_config
from testing.processes import RedisProcess, SidecarProcess

CHUNK_TOKENS = 256
QUEUED, QUEUED_TOKENS, AT_A_TIME, QUEUE_REPEATS = 16, 8 * CHUNK_TOKENS + 50, 2, 3
SHARING, HOT_TOKENS, SUFFIX_TOKENS, HOT_REPEATS = 50, 8192, 50, 9
NEW_TOKENS, NEW_REPEATS = 16 * CHUNK_TOKENS + 50, 6
SHORT_TOKENS = 200
"""Tokens of a warm-up prompt, too few for the engine's measurement of its prefill rate."""

_SEEDS = itertools.count(1_000_000)


class Queue(NamedTuple):
    """Cached tokens of the same requests, per repeat."""

    at_once: list[int]
    one_by_one: list[int]


class New(NamedTuple):
    """Results of new engines, one value per engine."""

    num_cached: list[int]
    hit: list[float]  # seconds
    cold: list[float]


def new_prompt(num_tokens: int) -> list[int]:
    """Return a prompt that no engine has computed."""
    return prompt(next(_SEEDS), num_tokens)


def wait_hit(engine: EngineProcess) -> None:
    """Wait until the engine hits its own stored prompt, which proves that it is attached."""
    tokens = new_prompt(CHUNK_TOKENS + 50)
    wait_until(lambda: engine.generate(tokens, max_tokens=1)[0].num_cached_tokens, timeout=60, what="a hit")


def store(engine: EngineProcess, sidecar: SidecarProcess, tier: str, prompts: list[list[int]]) -> None:
    """Compute prompts, and wait until all of their full chunks are in a lower tier."""
    before = sidecar.stats()[tier]["written"]
    engine.generate(*prompts, max_tokens=1)
    want = before + sum(len(tokens) // CHUNK_TOKENS for tokens in prompts)
    sidecar.wait_until(lambda stats: stats[tier]["written"] >= want, timeout=60)


def queue(folder: Path, tier: str, **options: Any) -> Queue:
    cached = Queue([], [])
    with (
        SidecarProcess(memory_size="512Mi", **options) as sidecar,
        EngineProcess(
            folder / f"queue-{tier}", connector_config(sidecar.socket_path), max_num_seqs=AT_A_TIME
        ) as engine,
    ):
        engine.wait_ready()
        wait_hit(engine)
        for _ in range(QUEUE_REPEATS):
            prompts = [new_prompt(QUEUED_TOKENS) for _ in range(QUEUED)]
            store(engine, sidecar, tier, prompts)
            for name in random.sample(Queue._fields, 2):
                forget_memory(engine, sidecar)
                batches = [prompts] if name == "at_once" else [[tokens] for tokens in prompts]
                answers = [answer for batch in batches for answer in engine.generate(*batch, max_tokens=1)]
                getattr(cached, name).append(sum(answer.num_cached_tokens for answer in answers))
    return cached


def hot(folder: Path) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return seconds, and how often each engine computed the prefix, with and without a connector."""
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    computed: dict[str, list[float]] = {"with": [], "without": []}
    with (
        SidecarProcess(memory_size="1Gi") as sidecar,
        EngineProcess(
            folder / "with", connector_config(sidecar.socket_path), enable_prefix_caching=True
        ) as engine,
        EngineProcess(folder / "without", enable_prefix_caching=True) as reference,
    ):
        engines = {"with": engine.wait_ready(), "without": reference.wait_ready()}
        for each in engines.values():
            each.stop_hashing_kv()
            each.generate(new_prompt(HOT_TOKENS), max_tokens=1)
        for _ in range(HOT_REPEATS):
            prefix = new_prompt(HOT_TOKENS)
            prompts = [prefix + new_prompt(SUFFIX_TOKENS) for _ in range(SHARING)]
            for name in random.sample(list(engines), 2):
                answers = engines[name].generate(*prompts, max_tokens=1)
                seconds[name].append(max(answer.ended for answer in answers))
                missed = sum(max(0, HOT_TOKENS - answer.num_cached_tokens) for answer in answers)
                computed[name].append(missed / HOT_TOKENS)
    return seconds, computed


def new(folder: Path) -> New:
    measured = New([], [], [])
    prompts = [new_prompt(NEW_TOKENS) for _ in range(NEW_REPEATS)]
    with RedisProcess() as redis:
        with (
            SidecarProcess(memory_size="512Mi", remote_url=redis.unix_url) as sidecar,
            EngineProcess(folder / "first", connector_config(sidecar.socket_path)) as first,
        ):
            first.wait_ready()
            wait_hit(first)
            store(first, sidecar, "remote", prompts)
        for number, tokens in enumerate(prompts):
            with ExitStack() as pod:
                sidecar = pod.enter_context(SidecarProcess(memory_size="512Mi", remote_url=redis.unix_url))
                engine = pod.enter_context(
                    EngineProcess(folder / f"new-{number}", connector_config(sidecar.socket_path))
                )
                engine.wait_ready().stop_hashing_kv()
                wait_attached(engine, sidecar)
                (hit,) = engine.generate(tokens, max_tokens=1)
                colds = [engine.generate(new_prompt(NEW_TOKENS), max_tokens=1)[0] for _ in range(2)]
                measured.num_cached.append(hit.num_cached_tokens)
                measured.hit.append(hit.ttft)
                measured.cold.append(min(cold.ttft for cold in colds))  # the first prompt touches new pages
    return measured


def wait_attached(engine: EngineProcess, sidecar: SidecarProcess) -> None:
    """Wait until both clients are attached, then run a few short warm-up prompts."""
    sidecar.wait_attached(engine.run_short_request)
    for _ in range(3):
        engine.generate(new_prompt(SHORT_TOKENS), max_tokens=1)


def run() -> Report:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        disk = queue(folder, "disk", disk_path=_made(folder / "disk"), disk_size="2Gi")
        with RedisProcess() as redis:
            remote = queue(folder, "remote", remote_url=redis.unix_url)
        seconds, computed = hot(folder)
        new_engines = new(folder)
    figures = [
        *_queue_figures("on disk", disk),
        *_queue_figures("in Redis", remote),
        at_most("hot: time, of vLLM's own prefix caching", _ratio(seconds), "x", 1.05),
        at_most("hot: the prefix was computed, times, at most", max(computed["with"]), "", 1),
        of("    with vLLM's own prefix caching alone", max(computed["without"]), ""),
        at_least("new: full chunks loaded, at least", _least_share(new_engines), "%", 100),
        at_most("new: time to first token, of cold", paired(new_engines.hit, new_engines.cold), "%", 40),
    ]
    return Report("load", _conditions(seconds, new_engines), figures)


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def _ratio(seconds: dict[str, list[float]]) -> Ratio:
    return paired(seconds["with"], seconds["without"])


def _queue_figures(where: str, cached: Queue) -> list[Figure]:
    possible = QUEUED * (QUEUED_TOKENS // CHUNK_TOKENS) * CHUNK_TOKENS * QUEUE_REPEATS
    at_once, one_by_one = sum(cached.at_once), sum(cached.one_by_one)
    return [
        at_least(
            f"queue, {where}: cached tokens, of the idle engine's", _share(at_once, one_by_one), "%", 95
        ),
        of("    the idle engine's, of all full chunks", _share(one_by_one, possible), "%"),
    ]


def _share(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0


def _least_share(new_engines: New) -> float:
    return _share(min(new_engines.num_cached), NEW_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS)


def _conditions(seconds: dict[str, list[float]], new_engines: New) -> str:
    times = seconds | {"new, hit": new_engines.hit, "new, cold": new_engines.cold}
    shown = "\n".join(f"  {name:<10}  {spread(samples)}" for name, samples in times.items())
    return (
        "vLLM on the CPU, a tiny Llama (fp32, 4 KiB of KV per token), Redis over a UNIX socket.\n"
        f"queue: {QUEUED} requests of {QUEUED_TOKENS} tokens, max_num_seqs {AT_A_TIME},"
        f" {QUEUE_REPEATS} times. hot: {SHARING} requests, {HOT_REPEATS} times.\n"
        f"new: {NEW_REPEATS} engines, each with a separate sidecar; cold is the faster of two prompts.\n"
        "Median (min-max):\n" + shown
    )
