"""Measure the throughput of prompts without hits, with and without the connector, in two layouts of cores.

- **apart**: the engine and all its threads run on one core, sidecar and Redis on the other one. The engine
  computes with one thread. This layout shows what the connector costs the engine.
- **shared**: the engine computes with two threads on both cores. Sidecar and Redis run on the same cores and
  take processor time from the engine, at a lower priority.

Three engines run a batch of new prompts in turn, in random order, so that other load on the machine affects
all of them alike. The throughput counts up to a batch's last answer. The engine's processor time counts until
the batch is also stored and written through.

Two processes with the same settings may differ by a few per cent for as long as they run: two runs with one
start each gave 95 % and 100 %, with intervals of 2 % and 4 %. Therefore all engines start several times, and
the samples of all starts count together.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks import cores
from benchmarks.report import Figure, at_least, of, paired, spread
from testing.child_process import ChildProcess
from testing.engine.process import EngineProcess, connector_config
from testing.processes import RedisProcess, SidecarProcess

BATCH, BATCH_TOKENS, ROUNDS = 6, 2048, 5
NICENESS = 10
"""Priority of sidecar and Redis in the layout "shared". In a cluster, a pod's engine requests far more
processor time, and Redis runs on another node."""

WAYS = {"memory": "memory tier", "Redis": "written through to Redis"}
NO_CONNECTOR = "no connector"

Seconds = dict[str, list[float]]


class Layout(NamedTuple):
    """Cores of the engine, and those of sidecar and Redis."""

    name: str
    engine_cores: frozenset[int]
    cache_cores: frozenset[int]
    niceness: int

    @property
    def environment(self) -> dict[str, str]:
        """Environment of an engine: as many compute threads as cores."""
        return {"OMP_NUM_THREADS": str(len(self.engine_cores))}


def layouts() -> tuple[Layout, Layout]:
    """Return "shared" and "apart", on two of this machine's cores."""
    first, second = cores.two_cores()
    both = frozenset((first, second))
    return (
        Layout("shared", both, both, NICENESS),
        Layout("apart", frozenset([first]), frozenset([second]), 0),
    )


class Pod(NamedTuple):
    """An engine and its cache, if it has one."""

    engine: EngineProcess
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
    """Processor time of the engine during the whole round."""
    cache_cpu: Seconds
    """Processor time of sidecar and Redis during the batch."""

    @classmethod
    def empty(cls) -> Measured:
        samples: list[Seconds] = [{name: [] for name in (NO_CONNECTOR, *WAYS)} for _ in cls._fields]
        return cls(*samples)


def random_tokens(seed: int, num_tokens: int) -> list[int]:
    """Return a different prompt for each seed. No two prompts share their first block."""
    generator = random.Random(seed)
    return [generator.randrange(4, 320) for _ in range(num_tokens)]


def batch_seconds(engine: EngineProcess, seeds: Iterator[int]) -> float:
    """Return the seconds that a batch of new prompts takes, to its last answer."""
    prompts = [random_tokens(next(seeds), BATCH_TOKENS) for _ in range(BATCH)]
    answers = engine.generate(*prompts, max_tokens=1)
    if any(answer.num_cached_tokens for answer in answers):
        raise RuntimeError("a new prompt had hits, so this is no figure of 0 % hits")
    return max(answer.ended for answer in answers)


@contextmanager
def pods(folder: Path, layout: Layout) -> Iterator[dict[str, Pod]]:
    """Start the engines with memory, with Redis, and without a connector."""
    with ExitStack() as stack:
        redis = stack.enter_context(RedisProcess())
        written = stack.enter_context(SidecarProcess(memory_size="512Mi", remote_url=redis.unix_url))
        memory = stack.enter_context(SidecarProcess(memory_size="512Mi"))

        def engine(name: str, sidecar: SidecarProcess | None) -> EngineProcess:
            config = connector_config(sidecar.socket_path) if sidecar is not None else None
            log = folder / f"{layout.name}-{name}"
            is_bare = sidecar is None
            process = EngineProcess(log, config, layout.environment, enable_prefix_caching=is_bare)
            return stack.enter_context(process)

        started = {
            NO_CONNECTOR: Pod(engine("bare", None)),
            "memory": Pod(engine("memory", memory), memory),
            "Redis": Pod(engine("redis", written), written, redis),
        }
        for pod in started.values():
            pod.engine.wait_ready().stop_hashing_kv()
        yield started


def measure(layout: Layout, started: Mapping[str, Pod], measured: Measured) -> None:
    """Run new prompts on each engine in turn, on the layout's cores, and add the samples to ``measured``."""
    seeds = itertools.count(10_000)
    for pod in started.values():  # starts all threads that a round uses
        _round(pod, seeds)
    for pod in started.values():
        cores.pin([pod.engine.pid], layout.engine_cores)
        cores.pin(pod.caches, layout.cache_cores)
        _lower_priority(pod, layout.niceness)
    for _ in range(ROUNDS):
        for name in random.sample(list(started), len(started)):
            for samples, seconds in zip(measured, _round(started[name], seeds), strict=True):
                samples[name].append(seconds)
    for pod in started.values():
        cores.check_pinned([pod.engine.pid], layout.engine_cores)
        cores.check_pinned(pod.caches, layout.cache_cores)


def conditions(layout: Layout, measured: Measured) -> str:
    """Describe the run, with median and range of each sample."""
    engine, cache = _listed(layout.engine_cores), _listed(layout.cache_cores)
    lines = [f"cores {layout.name}: engine on {engine}, sidecar and Redis on {cache}"]
    for name, seconds in measured.wall.items():
        lines.append(f"  {name:<12}  {spread(seconds)}; engine's CPU {spread(measured.engine_cpu[name])}")
        if name in WAYS:
            lines.append(f"  {'':<12}  CPU of sidecar and Redis during it {spread(measured.cache_cpu[name])}")
    return "\n".join(lines)


def figures(layout: Layout, measured: Measured) -> Iterator[Figure]:
    """Yield throughput and processor time, as shares of those of an engine with no connector."""
    for way, what in WAYS.items():
        speed = paired(measured.wall[NO_CONNECTOR], measured.wall[way])
        label = f"throughput of new prompts, cores {layout.name}, {what}"
        yield at_least(label, speed, "%", 97) if layout.name == "apart" else of(label, speed, "%")
        yield of(
            "    CPU seconds of the engine",
            paired(measured.engine_cpu[way], measured.engine_cpu[NO_CONNECTOR]),
            "%",
        )


def _listed(numbers: frozenset[int]) -> str:
    return " and ".join(map(str, sorted(numbers)))


def _round(pod: Pod, seeds: Iterator[int]) -> tuple[float, float, float]:
    """Return seconds of the batch, of the engine's processor time, and of the cache's during the batch."""
    engine_cpu, cache_cpu = cores.cpu_seconds([pod.engine.pid]), cores.cpu_seconds(pod.caches)
    wall = batch_seconds(pod.engine, seeds)
    cache_cpu = cores.cpu_seconds(pod.caches) - cache_cpu
    if pod.sidecar is not None:
        pod.sidecar.wait_until(lambda stats: not stats["num_unwritten_rows"], timeout=60)
    return wall, cores.cpu_seconds([pod.engine.pid]) - engine_cpu, cache_cpu


def _lower_priority(pod: Pod, niceness: int) -> None:
    """Lower the priority of all threads of the cache below that of the engines."""
    processes: list[ChildProcess] = [process for process in (pod.sidecar, pod.redis) if process is not None]
    for process in processes:
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)
