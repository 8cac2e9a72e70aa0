"""Replay traces on engines of one and of two parts: hits, waits, failed loads and bytes of relays.

Each part evicts by itself. The reference is the same engine with one part, whose hits need the rows of one
tier only. The figures differ by up to one point between runs, because Python's hashes of texts do.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from benchmarks.parted_engine import (
    HELLO,
    ROW_BYTES,
    Calls,
    Prompt,
    Replay,
    Tier,
    Totals,
    Way,
    of_second_part,
)
from benchmarks.report import Figure, Report, at_least, at_most, of
from benchmarks.sizing import TRACES
from lmcache_client.core.lookups import LookupThread
from lmcache_client.core.parts import PartedIdentity, PartedStep
from lmcache_client.core.scheduler import SchedulerSide
from lmcache_store.kv_groups import KVGroup
from testing.workloads.requests import Workload, agents, mooncake

MOONCAKE = TRACES / "mooncake_conversation_trace.jsonl.gz"
WORKLOADS: dict[str, tuple[Callable[[], Workload], tuple[int, ...]]] = {
    "Mooncake": (lambda: mooncake(MOONCAKE, share=0.15), (1_500, 6_000)),
    "agents": (lambda: agents(4, 0.03), (1_000, 4_000)),
}
"""Requests, and rows of each tier. All of these tiers evict rows."""


WAYS = {
    "same order": Way(),
    "engine restarts": Way(restarts=True),
    "30 % of stores late": Way(store_steps=lambda rng: rng.randint(1, 4) if rng.random() < 0.3 else 0),
    "calls late by a step": Way(call_steps=lambda _: 1),
}


def relays_of_long_prompt(num_groups: int) -> list[int]:
    """Return the pickled bytes of the relays in each step that announces a prompt of 128k tokens."""
    groups = tuple(KVGroup(number, 16, ROW_BYTES) for number in range(num_groups))
    hello = replace(HELLO, chunk_tokens=256, groups=groups)
    tier = Tier(1)
    side = SchedulerSide(lambda _: cast("Any", tier), lambda *_: None)
    side.adopt([PartedIdentity(hello, 16), of_second_part(hello, 16)])
    Calls().serve(cast("LookupThread", side._lookups))
    hashes = [number.to_bytes(32, "little") for number in range((128 << 10) // 16)]
    side.add(cast("Any", Prompt("long", hashes, (128 << 10) + 1)))
    sizes = []
    while isinstance(meta := side.end_step(1), PartedStep) and meta.relays:
        sizes.append(len(pickle.dumps((meta.relays, meta.salts))))
    return sizes


def run() -> Report:
    figures = []
    for name, (make, sizes) in WORKLOADS.items():
        workload = make()
        for num_rows in sizes:
            case = f"{name}, {num_rows:,} rows"
            leader = Replay(workload, num_rows).run()
            figures.append(of(f"{case}: hits of one part alone", _share(leader.hit_rows, leader.rows), "%"))
            replays = {way: Replay(workload, num_rows, settings).run() for way, settings in WAYS.items()}
            for way, joint in replays.items():
                figures += _figures(f"{case}, {way}", joint, leader)
            figures += _relays(case, replays["same order"].relay_bytes)
            num_in_engine, ways = num_rows // 4, (None, WAYS["same order"])
            leader, joint = (Replay(workload, num_rows, way, num_in_engine).run() for way in ways)
            figures += _figures(f"{case}, {num_in_engine:,} rows of the engine's own", joint, leader)
    for num_groups in 1, 3:
        relays = relays_of_long_prompt(num_groups)
        what = f"relays of a prompt of 128k tokens, {num_groups} KV groups, in {len(relays)} steps, largest"
        figures.append(at_most(what, max(relays) / 1024, "KiB", 64))
    return Report("parts", "two parts of one rank each; chunks of 512 tokens, one KV group", figures)


def _figures(case: str, joint: Totals, leader: Totals) -> list[Figure]:
    hits, num_waits = joint.hit_rows, len(joint.waits)
    return [
        at_least(f"{case}: joint hits, of part 0's", _share(hits, joint.first_part_rows), "%", 99.5),
        of(f"{case}: joint hits, of one part alone", _share(hits, leader.hit_rows), "%"),
        of(f"{case}: failed loads", _share(joint.failed_loads, joint.loads), "%"),
        of(f"{case}: requests that waited", _share(num_waits, joint.requests), "%"),
        at_most(f"{case}: longest wait", max(joint.waits, default=0), "steps", 1),
    ]


def _relays(case: str, sizes: list[int]) -> list[Figure]:
    """Return figures of the pickled bytes of relays per step."""
    largest = sorted(sizes)[-1 - len(sizes) // 100]
    return [
        of(f"{case}: relays of a step, p99", largest / 1024, "KiB"),
        at_most(f"{case}: relays of a step, largest", max(sizes) / 1024, "KiB", 64),
    ]


def _share(number: int, total: int) -> float:
    return 100 * number / max(1, total)
