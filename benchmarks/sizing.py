"""What autoscaled tiers cost, compared with the best size that never changes, in a loop with exact tiers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.report import Figure, Report, at_most
from testing.workloads import requests
from testing.workloads.closed_loop import Run, Setup, scattered, simulate
from testing.workloads.remote_loop import RemoteSetup, simulate_remote
from testing.workloads.requests import HOUR, chat, together

TRACES = Path(__file__).parent / "traces"

MEMORY: dict[str, Callable[[], Setup]] = {
    "chat, 48 h": lambda: Setup(chat(48, 0.2, scale=2, systems=20)),
    "chat, a quarter of the keys sampled": lambda: Setup(chat(24, 0.2, scale=1, systems=40), rate=0.25),
    "days and nights, 72 h": lambda: Setup(chat(72, 0.15, scale=2, seed=2, diurnal=0.7, systems=20)),
    "days and nights, engine cache 48 GiB": lambda: Setup(
        chat(72, 0.15, scale=2, seed=2, diurnal=0.7, systems=20), engine_gib=48
    ),
    "flash crowd": lambda: Setup(
        together(chat(48, 0.15, scale=2, seed=4), requests.documents(20 * HOUR, HOUR, 150, 2400, scale=2))
    ),
    "agents, 48 h": lambda: Setup(requests.agents(48, 0.01)),
    "loop of 150 GiB a pod, 24 h": lambda: Setup(requests.loop(24, 300)),
    "all unique, 24 h": lambda: Setup(requests.unique(24)),
}


def run() -> Report:
    figures = [figure for name, setup in MEMORY.items() for figure in _memory(name, setup())]
    figures += _remote()
    return Report(
        "sizing", "2 pods, 16-512 GiB each, from 64; 4 pods and 1-8 shards of 64 GiB, from 2", figures
    )


def _memory(name: str, setup: Setup) -> Iterator[Figure]:
    best, cost = setup.best_constant()
    yield from _figures(f"{name} (best {best:.0f} GiB)", simulate(setup), cost)


def _remote() -> Iterator[Figure]:
    setup = RemoteSetup(chat(48, 0.4, scale=8), num_pods=4, route=scattered, start=32.0)
    costs = {count: setup.with_shards(count) for count in setup.counts}
    best = min(costs, key=costs.__getitem__)
    yield from _figures(f"remote tier, chat, 48 h (best {best} shards)", simulate_remote(setup), costs[best])


def _figures(name: str, run: Run, cost: float) -> Iterator[Figure]:
    yield at_most(f"{name}: cost over the best constant", 100 * (run.usd_per_hour / cost - 1), "%", 15)
    yield Figure(f"{name}: changes", len(run.resizes), "")
    if run.surprises:
        yield at_most(f"{name}: hits, curve to measured", 100 * statistics.mean(run.surprises), "points", 2)
