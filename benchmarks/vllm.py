"""Time to first token on a real engine at 8,192 prompt tokens, and the speed of prompts that hit nothing.

Beside it the same engine with no connector: cold (``bare``), and a hit in its own prefix cache (``own hit``),
which copies nothing: no cache outside the engine can be faster. Each prompt meets all ways in turn, the two
engines first by chance, so that what else the machine does falls out of the ratios.
"""

from __future__ import annotations

import itertools
import os
import random
import tempfile
import time
from pathlib import Path

from benchmarks.report import Figure, Report, at_least, at_most, of, paired, spread
from testing.child_process import ChildProcess, wait_until
from testing.engine.process import EngineProcess, connector_config
from testing.processes import RedisProcess, SidecarProcess

PROMPT_TOKENS, CHUNK_TOKENS, REPEATS = 8192, 256, 15
ROWS = PROMPT_TOKENS // CHUNK_TOKENS
BATCH, BATCH_TOKENS, BATCH_REPEATS = 6, 2048, 31
NICENESS = (
    10  # of sidecar and Redis under new prompts: a pod's engine asks for far more CPU, and Redis is elsewhere
)

Seconds = dict[str, list[float]]


def prompt(seed: int, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(4, 320) for _ in range(num_tokens)]


def ttft(engine: EngineProcess, tokens: list[int], *, is_hit: bool = False) -> float:
    """Seconds. Raises RuntimeError when the cache did not do what is measured: then there is no figure."""
    (answer,) = engine.generate(tokens, max_tokens=1)
    if (answer.num_cached_tokens > 0) is not is_hit:
        raise RuntimeError(f"{answer.num_cached_tokens} tokens came from the cache; is the machine busy?")
    return answer.ttft


def batch_seconds(engine: EngineProcess, seeds: itertools.count[int]) -> float:
    """Seconds for a batch of prompts that nobody has seen, to its last answer."""
    prompts = [prompt(next(seeds), BATCH_TOKENS) for _ in range(BATCH)]
    answers = engine.generate(*prompts, max_tokens=1)
    if any(answer.num_cached_tokens for answer in answers):
        raise RuntimeError("a new prompt was hit: the figure would not be that of 0 % hits")
    return max(answer.ended for answer in answers)


def forget_memory(engine: EngineProcess, sidecar: SidecarProcess) -> None:
    """Only the remote tier is left: another sidecar, an empty arena. The engine attaches again by itself, and
    knows it a moment after the sidecar does: when its own small prompt is hit.
    """
    sidecar.terminate()
    sidecar.arena_path.unlink()
    sidecar.start()
    small = prompt(time.time_ns(), CHUNK_TOKENS + 1)
    wait_until(lambda: engine.generate(small, max_tokens=1)[0].num_cached_tokens, what="attached again")


def settle(sidecar: SidecarProcess, rows: int) -> None:
    """Until so many rows are written through: what follows is not measured beside it."""
    sidecar.wait_until(lambda stats: stats["remote"]["written"] >= rows, timeout=60)


def first_tokens(engine: EngineProcess, bare: EngineProcess, sidecar: SidecarProcess) -> Seconds:
    seconds: Seconds = {name: [] for name in ("bare", "own hit", "cold", "memory hit", "remote hit")}

    def measure(name: str, engine: EngineProcess, tokens: list[int], *, is_hit: bool = False) -> None:
        seconds[name].append(ttft(engine, tokens, is_hit=is_hit))

    for repeat in range(REPEATS):
        tokens = prompt(repeat)
        written = sidecar.stats()["remote"]["written"]
        colds = [("bare", bare), ("cold", engine)]
        for name, which in random.sample(colds, 2):
            measure(name, which, tokens)
        settle(sidecar, written + ROWS)
        hits = [("own hit", bare), ("memory hit", engine)]
        for name, which in random.sample(hits, 2):
            measure(name, which, tokens, is_hit=True)
        forget_memory(engine, sidecar)
        measure("remote hit", engine, tokens, is_hit=True)
    return seconds


def give_way(*processes: ChildProcess) -> None:
    """Let engines go before these processes and all their threads."""
    for process in processes:
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), NICENESS)


def batches(engines: dict[str, tuple[EngineProcess, SidecarProcess | None]]) -> Seconds:
    """New prompts at once, on each engine in turn; what is written through is waited for in between."""
    seconds: Seconds = {name: [] for name in engines}
    seeds = itertools.count(10_000)
    for _ in range(BATCH_REPEATS):
        for name in random.sample(list(engines), len(engines)):
            engine, sidecar = engines[name]
            seconds[name].append(batch_seconds(engine, seeds))
            if sidecar is not None:
                sidecar.wait_until(lambda stats: not stats["num_unwritten_rows"], timeout=60)
    return seconds


def run() -> Report:
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisProcess() as redis,
        SidecarProcess(memory_size="512Mi", remote_url=redis.unix_url) as sidecar,
        SidecarProcess(memory_size="512Mi") as memory_alone,
        EngineProcess(Path(folder) / "engine", connector_config(sidecar.socket_path)) as engine,
        EngineProcess(Path(folder) / "memory", connector_config(memory_alone.socket_path)) as small,
        EngineProcess(Path(folder) / "bare", enable_prefix_caching=True) as bare,
    ):
        for warm in (engine.wait_ready(), small.wait_ready(), bare.wait_ready()):
            warm.stop_hashing_kv()
            ttft(warm, prompt(REPEATS))
            batch_seconds(warm, itertools.count(1_000))
        seconds = first_tokens(engine, bare, sidecar)
        give_way(sidecar, memory_alone, redis)
        throughput = batches(
            {"with": (small, memory_alone), "with Redis": (engine, sidecar), "without": (bare, None)}
        )
    return Report("vllm", _conditions(seconds | throughput), _figures(seconds, throughput))


def _conditions(seconds: Seconds) -> str:
    shown = "\n".join(f"  {name:<10}  {spread(samples)}" for name, samples in seconds.items())
    return (
        "vLLM on the CPU, a tiny Llama (fp32, 4 KiB of KV per token), Redis over a UNIX socket;\n"
        f"{PROMPT_TOKENS} prompt tokens, 1 answer token, {REPEATS} prompts; with / with Redis / without:"
        f" {BATCH} new prompts of {BATCH_TOKENS} at once, {BATCH_REPEATS} times,"
        f" sidecar and Redis at nice {NICENESS}.\n"
        "Ratios are medians of neighbours' with 95 % intervals. Median (min-max):\n" + shown
    )


def _figures(seconds: Seconds, throughput: Seconds) -> list[Figure]:
    cold, own, hit = seconds["cold"], seconds["own hit"], seconds["memory hit"]
    speed = paired(throughput["without"], throughput["with"])
    written = paired(throughput["without"], throughput["with Redis"])
    return [
        at_most("memory hit, share of cold", paired(hit, cold), "%", 8),
        at_most("remote hit, share of cold", paired(seconds["remote hit"], cold), "%", 25),
        at_most("memory hit, of a hit in the engine's own cache", paired(hit, own), "x", 1.3),
        of("speed of one cold prompt, of an engine with no connector", paired(seconds["bare"], cold), "%"),
        at_least("throughput of new prompts, of an engine with no connector", speed, "%", 97),
        at_least("    its interval's lower end", 100 * speed.low, "%", 95),
        at_least("    the same, written through to Redis on the same cores", written, "%", 97),
    ]
