"""Measure how long tokens of one data-parallel rank take while another rank loads hits.

Ranks of a mixture-of-experts model run each step together, so a token takes as long as the slowest rank. The
two ranks are two processes. Each step is 10 ms of sleep, like that of a device, which leaves the cores free.
The copies of the loads are real. The reference is the same two ranks without loads. The ways run in random
order in each round.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import random
import statistics
import time
from typing import Any, cast

import numpy as np

from benchmarks.report import Figure, Report, at_most, of, paired
from benchmarks.transfer import BLOCKS_PER_CHUNK, CHUNK_BYTES, CHUNKS, make_kv
from lmcache_client.core.copier import CpuCopier
from lmcache_client.core.jobs import GroupLoad, LoadJob, StepMeta
from lmcache_client.core.worker import WorkerSide
from lmcache_store.tiers.memory.contracts import Found

STEP_SECONDS, STEPS, ROUNDS = 0.010, 40, 15
WAYS = {"alone": None, "with waits": True, "without waits": False}
"""For each way: whether the connector of the rank that loads can wait; None: the rank loads nothing."""


class Rows:
    """A session whose arena is ordinary memory, and whose rows are never evicted."""

    def __init__(self) -> None:
        self.session = self
        self.slots = np.random.default_rng(0).integers(0, 255, (CHUNKS, CHUNK_BYTES), np.uint8)

    def copying(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def holds(self, slot: object) -> bool:
        return True

    def view(self, row: int, num_bytes: int) -> Any:
        return self.slots[row, :num_bytes]

    def close(self) -> None:
        """Do nothing: the memory needs no release."""


def busy_rank(barrier: Any) -> None:
    """Compute a token in each step, in a process of its own."""
    while True:
        time.sleep(STEP_SECONDS)
        barrier.wait()


def token_seconds(worker: WorkerSide, barrier: Any, *, is_loading: bool) -> float:
    """Return the mean seconds of a token while this rank loads 256 MiB again and again, or nothing."""
    names, num_loading, began = itertools.count(), 0, time.perf_counter()
    for _ in range(STEPS):
        step = StepMeta(is_idle=True)
        if is_loading and not num_loading:
            step.loads, num_loading = [_load(f"{next(names)}")], 1
        worker.start_loads(step)
        num_loading -= len(worker.collect(step)[1])
        time.sleep(STEP_SECONDS)  # an idle rank computes as long as the others
        barrier.wait()
    seconds = (time.perf_counter() - began) / STEPS
    while num_loading:
        num_loading -= len(worker.collect(StepMeta(is_idle=True))[1])
    return seconds


def _load(name: str) -> LoadJob:
    blocks = tuple(range(CHUNKS * BLOCKS_PER_CHUNK))
    rows = Found(np.arange(CHUNKS), np.ones(CHUNKS, np.int64))
    return LoadJob(name, (GroupLoad(0, blocks, rows, blocks_per_row=BLOCKS_PER_CHUNK),))


def _worker(rows: Rows, *, can_wait: bool) -> WorkerSide:
    parts = cast("Any", (rows, CpuCopier({0: make_kv()}, 1), None))
    worker = WorkerSide(lambda _: parts, can_wait=can_wait)
    worker.register_kv_caches({})
    return worker


def run() -> Report:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    process = context.Process(target=busy_rank, args=(barrier,), daemon=True)
    process.start()
    rows = Rows()
    workers = {can_wait: _worker(rows, can_wait=can_wait) for can_wait in (True, False)}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way in random.sample(list(WAYS), len(WAYS)):
            can_wait = WAYS[way]
            worker = workers[bool(can_wait)]
            seconds[way].append(token_seconds(worker, barrier, is_loading=can_wait is not None))
    process.kill()
    for worker in workers.values():
        worker.close()
    figures: list[Figure] = [of("token of a rank, alone", 1e3 * statistics.median(seconds["alone"]), "ms")]
    for way in "with waits", "without waits":
        ratio = paired(seconds[way], seconds["alone"])
        what = f"token of a rank while another rank loads, {way}, of alone"
        figures.append(at_most(what, ratio, "x", 1.05) if way == "without waits" else of(what, ratio, "x"))
    return Report("lockstep", f"{ROUNDS} rounds of {STEPS} steps of 10 ms; loads of 256 MiB", figures)
