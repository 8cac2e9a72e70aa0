"""Measure what ``top`` costs a sidecar: processor time of its process for each answer of /stats.

The sidecar has 8 engines, a memory tier full of rows, and rows in a disk tier and in Redis. Rounds of reads
alternate with rounds of the same length without reads, whose processor time is subtracted.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.clients import EngineClients, row_keys
from benchmarks.report import Report, at_most, of
from lmcache.rpc.session import Scheduled
from testing.processes import RedisProcess, SidecarProcess

NUM_ENGINES, CHUNK_BYTES, ARENA = 8, 64 << 10, "320Mi"
NUM_ROWS, ROWS_AT_ONCE = 5_200, 100  # more than fit, so that rows are evicted
NUM_REQUESTS = 500
ROUNDS, READS = 9, 100
SHORTEST_INTERVAL_SECONDS, DEFAULT_INTERVAL_SECONDS = 1.0, 2.0
MAX_PERCENT = 1.0
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def processor_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def run() -> Report:
    with ExitStack() as stack:
        redis = stack.enter_context(RedisProcess(maxmemory="1gb"))
        disk = stack.enter_context(tempfile.TemporaryDirectory())
        options: dict[str, Any] = {"memory_size": ARENA, "remote_url": redis.url}
        options |= {"disk_path": disk, "disk_size": "1Gi"}
        sidecar = stack.enter_context(SidecarProcess(**options))
        engines = [stack.enter_context(EngineClients(sidecar, CHUNK_BYTES)) for _ in range(NUM_ENGINES)]
        _fill(sidecar, engines)
        costs = [_cost(sidecar) for _ in range(ROUNDS)]
        num_bytes = len(sidecar.get("/stats"))
        num_rows = sidecar.stats()["memory"]["used_rows"]
    cost = statistics.median(costs)
    conditions = (
        f"{NUM_ENGINES} engines, {num_rows:,} rows in memory, as many on disk and in Redis; /stats has "
        f"{num_bytes / 1e3:.1f} kB; median of {ROUNDS} rounds of {READS} reads"
    )
    figures = [
        of(f"processor time of one answer (worst round {max(costs) * 1e3:.2f})", cost * 1e3, "ms"),
        of("top, every 2 s", 100 * cost / DEFAULT_INTERVAL_SECONDS, "% of a core"),
        at_most(
            "top, every second, the shortest interval",
            100 * cost / SHORTEST_INTERVAL_SECONDS,
            "% of a core",
            MAX_PERCENT,
        ),
    ]
    return Report("top", conditions, figures)


def _fill(sidecar: SidecarProcess, engines: list[EngineClients]) -> None:
    """Fill all tiers, and count requests with several causes."""
    for number in range(NUM_ROWS // ROWS_AT_ONCE):
        engines[number % NUM_ENGINES].fill(row_keys(number, ROWS_AT_ONCE))
        sidecar.wait_until(lambda stats: stats["num_unwritten_rows"] < 10 * ROWS_AT_ONCE)
    for number in range(NUM_REQUESTS):
        keys = row_keys(number % (NUM_ROWS // ROWS_AT_ONCE), 8)
        scheduled = Scheduled(num_prompt_tokens=8 * 256 + 5)
        scheduler = engines[number % NUM_ENGINES].scheduler
        scheduler.lookup(f"r{number}", [(0, keys)], hint=True, scheduled=scheduled)
    sidecar.wait_until(lambda stats: stats["num_unwritten_rows"] == 0)
    stats = sidecar.stats()
    assert stats["memory"]["removed"], "the memory tier is not full"
    assert all(stats[tier]["written"] for tier in ("disk", "remote")), "a lower tier is empty"


def _cost(sidecar: SidecarProcess) -> float:
    """Return the seconds of processor time of one answer."""
    began, before = time.monotonic(), processor_seconds(sidecar.pid)
    for _ in range(READS):
        with urllib.request.urlopen(sidecar.url + "/stats", timeout=60) as answer:
            answer.read()
    busy, seconds = processor_seconds(sidecar.pid) - before, time.monotonic() - began
    before = processor_seconds(sidecar.pid)
    time.sleep(seconds)  # an idle round of the same length
    return (busy - (processor_seconds(sidecar.pid) - before)) / READS
