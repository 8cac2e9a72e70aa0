"""Compare the cost of autoscaled tiers with the best fixed size, in a loop with exact tiers.

CASES=rows runs only the cases with rows of a real engine, and CASES=others the other cases.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.report import Figure, Report, at_least, at_most
from lmcache_operator.autoscaling.sizing import SHARD_USABLE
from lmcache_operator.policy.tier import Prices
from testing.workloads import requests
from testing.workloads.closed_loop import Run, Setup, scattered, simulate, sticky
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


POD_NUMBERS = (2, 4, 8)
PAID, FREE = Prices(2.50, 0.004, 0.004), Prices(2.50, 0.0, 0.004)
PAYLOAD = 0.8 * 0.98
"""Payload of a shard, as a share of its memory. ``maxmemory`` is 80 % of the memory, and 97-99.8 % of
``maxmemory`` is payload (docs/reference/benchmarks.md)."""


def run() -> Report:
    cases, figures = os.environ.get("CASES", "all"), list[Figure]()
    if cases != "rows":
        figures += [figure for name, setup in MEMORY.items() for figure in _memory(name, setup())]
        figures += _remote()
    if cases != "others":
        figures += _rows()
    return Report(
        "sizing", "2 pods, 16-512 GiB each, from 64; 4 pods and 1-8 shards of 64 GiB, from 2", figures
    )


def _conversations(num_pods: int) -> requests.Workload:
    """Return 48 hours of chat, with as many sessions for each pod.

    A row is 512 tokens of an 8B model, 64 MiB. With four pods one row stands for two, with eight for four, so
    that the simulation takes no longer.
    """
    return chat(48, 0.02 * num_pods, scale=num_pods / 2, systems=20)


def _rows() -> Iterator[Figure]:
    """Yield figures for rows of real engines, with routing that keeps sessions in their pods."""
    for num_pods in POD_NUMBERS:
        workload = _conversations(num_pods)
        setups = [Setup(workload, num_pods, sticky, prices=prices) for prices in (PAID, FREE)]
        hits = setups[0].constant_hits()
        for setup in setups:
            yield from _worth_memory(f"{num_pods} sticky pods, memory", setup, hits)
        shards = RemoteSetup(
            workload, num_pods, sticky, prices=FREE, usable_share=PAYLOAD, first_guess=SHARD_USABLE,
            counts=(1, 2, 3, 4),
        )  # fmt: skip
        yield from _worth_shards(f"{num_pods} sticky pods, shards behind 64 GiB", shards)


def _worth_memory(name: str, setup: Setup, hits: Callable[[float], float]) -> Iterator[Figure]:
    cost = setup.cost_of(hits)
    best, uncached, run = (
        min(setup.sizes(), key=cost),
        setup.rows_per_hour * setup.usd_per_miss,
        simulate(setup),
    )
    name = f"{name} at {setup.prices.memory_gib_hour:g} USD (best {best:.0f} GiB)"
    yield from _worth(name, run, uncached - cost(best), uncached, cost)


def _worth_shards(name: str, setup: RemoteSetup) -> Iterator[Figure]:
    """Yield the savings of both tiers, minus the price of the shards.

    Shards alone save nearly nothing behind pods that hit their own sessions.
    """
    costs = {count * setup.shard_gib: setup.with_shards(count) for count in setup.counts}
    best = min(costs, key=costs.__getitem__)
    uncached, run = setup.rows_per_hour * setup.usd_per_row, simulate_remote(setup)
    name = f"{name} (best {best / setup.shard_gib:.0f} shards)"
    yield from _worth(name, run, uncached - costs[best], uncached, costs.__getitem__)


def _worth(
    name: str, run: Run, best: float, uncached: float, cost: Callable[[float], float]
) -> Iterator[Figure]:
    end = run.moments[-1].size
    share = 100 * (uncached - cost(end)) / best
    yield at_least(f"{name}: worth at the end, of the best constant", share, "%", 95)
    yield Figure(f"{name}: worth of the 48 h", 100 * (uncached - run.usd_per_hour) / best, "%")
    yield Figure(f"{name}: at the end", end, "GiB")
    yield at_most(f"{name}: changes", len(run.resizes), "", 6)


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
