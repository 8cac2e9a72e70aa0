"""Measure the throughput of new prompts on SGLang: without HiCache, with HiCache alone, and with the cache.

Each engine runs on one core with one computing thread, sidecar and Redis on the other core: the layout
"apart" of ``new_prompts``. All engines run a batch in turn, in random order, and start several times.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks import cores, new_prompts, sglang_engines
from benchmarks.new_prompts import BATCH, BATCH_TOKENS, Layout, random_tokens
from benchmarks.report import Figure, at_least, of, paired, spread
from benchmarks.sglang_engines import BUFFER, NO_HICACHE, Seconds, Stores
from testing.processes import RedisProcess, SidecarProcess
from testing.sglang.engine import PAGE_TOKENS, SGLangEngine, lmcache_storage

ROUNDS = 5
NO_CACHE, ALONE = "no HiCache", "HiCache alone"
WAYS = {"memory": "memory tier", "Redis": "written through to Redis"}
DEVICE_TOKENS = 16384


class Pod(NamedTuple):
    """An engine and its cache, if it has one."""

    engine: SGLangEngine
    sidecar: SidecarProcess | None = None
    redis: RedisProcess | None = None

    @property
    def caches(self) -> list[int]:
        """Processes of the cache."""
        return [process.pid for process in (self.sidecar, self.redis) if process is not None]


class Measured(NamedTuple):
    """Seconds per round, by pod."""

    wall: Seconds
    engine_cpu: Seconds

    @classmethod
    def empty(cls) -> Measured:
        samples: list[Seconds] = [{name: [] for name in (NO_CACHE, ALONE, *WAYS)} for _ in cls._fields]
        return cls(*samples)


def layout() -> Layout:
    """Return the layout in which the engine has a core of its own."""
    return next(layout for layout in new_prompts.layouts() if layout.name == "apart")


@contextmanager
def pods(folder: Path) -> Iterator[dict[str, Pod]]:
    """Start all engines and their caches."""
    threads = layout().environment
    with ExitStack() as stack:
        redis = stack.enter_context(RedisProcess())
        written = stack.enter_context(SidecarProcess(memory_size="512Mi", remote_url=redis.unix_url))
        memory = stack.enter_context(SidecarProcess(memory_size="512Mi"))

        def start(name: str, sidecar: SidecarProcess | None, **arguments: object) -> SGLangEngine:
            storage = lmcache_storage(sidecar.socket_path) if sidecar is not None else None
            options = {"environment": threads, "max_total_tokens": DEVICE_TOKENS, **arguments}
            return stack.enter_context(sglang_engines.engine(folder / name, storage, **options))

        started = {
            NO_CACHE: Pod(start("none", None, **NO_HICACHE)),
            ALONE: Pod(start("alone", None)),
            "memory": Pod(start("memory", memory, **BUFFER), memory),
            "Redis": Pod(start("redis", written, **BUFFER), written, redis),
        }
        for pod in started.values():
            sglang_engines.warm_up(pod.engine)
            if pod.sidecar is not None:
                sglang_engines.wait_attached(pod.engine)
        yield started


def measure(started: Mapping[str, Pod], measured: Measured) -> None:
    """Run new prompts on each engine in turn, on the layout's cores, and add the samples to ``measured``."""
    seeds, where = itertools.count(10_000), layout()
    for pod in started.values():  # starts all threads that a round uses
        _round(pod, seeds)
    for pod in started.values():
        cores.pin([pod.engine.pid], where.engine_cores)
        cores.pin(pod.caches, where.cache_cores)
    for _ in range(ROUNDS):
        for name in random.sample(list(started), len(started)):
            for samples, seconds in zip(measured, _round(started[name], seeds), strict=True):
                samples[name].append(seconds)
    for pod in started.values():
        cores.check_pinned([pod.engine.pid], where.engine_cores)
        cores.check_pinned(pod.caches, where.cache_cores)


def conditions(measured: Measured) -> str:
    """Describe the run, with median and range of each sample."""
    lines = [
        f"{BATCH} new prompts of {BATCH_TOKENS} tokens at once; the engine has one core, the cache the other:"
    ]
    for name, seconds in measured.wall.items():
        lines.append(f"  {name:<14}  {spread(seconds)}; engine's CPU {spread(measured.engine_cpu[name])}")
    return "\n".join(lines)


def figures(measured: Measured) -> Iterator[Figure]:
    """Yield throughput and processor time, as shares of those of engines without this cache."""
    for way, what in WAYS.items():
        for reference in (ALONE, NO_CACHE):
            speed = paired(measured.wall[reference], measured.wall[way])
            label = f"throughput of new prompts, {what}, of {reference}"
            yield at_least(label, speed, "%", 97) if reference == ALONE else of(label, speed, "%")
        cpu = paired(measured.engine_cpu[way], measured.engine_cpu[ALONE])
        yield of(f"    CPU seconds of the engine, of {ALONE}", cpu, "%")


def _round(pod: Pod, seeds: Iterator[int]) -> tuple[float, float]:
    """Return seconds of a batch, and of the engine's processor time until all is stored."""
    prompts = [random_tokens(next(seeds), BATCH_TOKENS) for _ in range(BATCH)]
    stores = Stores.begin(pod.engine, pod.sidecar) if pod.sidecar is not None else None
    cpu, start = cores.cpu_seconds([pod.engine.pid]), time.perf_counter()
    answers = pod.engine.generate_all(*prompts, max_new_tokens=1)
    wall = time.perf_counter() - start
    if any(answer.num_cached_tokens for answer in answers):
        raise RuntimeError("a new prompt had hits, so this is no figure of 0 % hits")
    if stores is not None:
        stores.wait(BATCH * (BATCH_TOKENS // PAGE_TOKENS))
    return wall, cores.cpu_seconds([pod.engine.pid]) - cpu
