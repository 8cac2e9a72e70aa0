"""Measure the stalls of a thread while another one checksums, stores, loads or populates memory."""

from __future__ import annotations

import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.context import ForkProcess as Process

import numpy as np

from benchmarks.report import Figure, Report, at_most
from lmcache.tiers.base import ObjectId
from lmcache.tiers.header import checksum
from lmcache.tiers.memory.kernel_pages import populate
from lmcache.tiers.remote.address import Address
from lmcache.tiers.remote.tier import RemoteTier
from testing.processes import RedisProcess

TICK_SECONDS = 0.5e-3
SLOT_BYTES = 64 << 20
ROUNDS = 9
ROUND_SECONDS = 0.5
ALLOWED_MILLISECONDS = 1.0
HOLDS_GIL = "for comparison, slice assignment"
KEY = b"n" * 32 + b"k" * 32


def longest_stall(work: Callable[[], object], kind: type[threading.Thread] | type[Process]) -> float:
    """Return the longest delay of a ticking thread during the work of a worker, in seconds."""

    def repeat() -> None:
        end = time.perf_counter() + ROUND_SECONDS
        while time.perf_counter() < end:
            work()

    worker = kind(target=repeat)
    worker.start()
    longest, last = 0.0, time.perf_counter()
    while worker.is_alive():
        time.sleep(TICK_SECONDS)
        now = time.perf_counter()
        longest, last = max(longest, now - last - TICK_SECONDS), now
    worker.join()
    return longest


def populate_fresh() -> None:
    with mmap.mmap(-1, SLOT_BYTES) as fresh:
        memory = np.frombuffer(fresh, np.uint8)
        populate(memory)
        del memory


def run() -> Report:
    payload, slot = memoryview(bytearray(os.urandom(SLOT_BYTES))), memoryview(bytearray(SLOT_BYTES))
    with RedisProcess() as server:
        remote = RemoteTier(Address.parse(server.unix_url), timeout_seconds=10)

        remote.store(ObjectId(KEY, 0), payload)
        names = server.client.keys()

        def store() -> None:
            server.client.delete(*names)
            remote.store(ObjectId(KEY, 0), payload)

        ways: dict[str, Callable[[], object]] = {
            "idle": lambda: time.sleep(ROUND_SECONDS),
            "checksum": lambda: checksum(payload),
            "store": store,
            "load": lambda: remote.load(ObjectId(KEY, 0), slot),
            "populate": populate_fresh,
            HOLDS_GIL: lambda: slot.__setitem__(slice(None), payload),
        }
        here: dict[str, list[float]] = {name: [] for name in ways}
        apart: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, work in ways.items():
                here[name].append(longest_stall(work, threading.Thread))
                apart[name].append(longest_stall(work, Process))
        remote.close()
    return Report("gil", _conditions(), [_figure(name, here[name], apart[name]) for name in ways])


def _conditions() -> str:
    return (
        f"{SLOT_BYTES >> 20} MiB over and over for {ROUND_SECONDS} s; a thread ticks every {TICK_SECONDS} s;"
        f" median of {ROUNDS} rounds' longest stalls, with the work in another thread of its process;"
        " bar: with the work in another process (what the kernel's scheduler costs), and 1 ms"
    )


def _figure(name: str, here: list[float], apart: list[float]) -> Figure:
    value, control = statistics.median(here) * 1e3, statistics.median(apart) * 1e3
    what = f"{name} (worst {max(here) * 1e3:.2f}; apart {control:.2f}, worst {max(apart) * 1e3:.2f})"
    if name in ("idle", HOLDS_GIL):
        return Figure(what, value, "ms")
    return at_most(what, value, "ms", round(control + ALLOWED_MILLISECONDS, 2))
