"""Measure the cost of contexts, mappings and pinned memory."""

from __future__ import annotations

import mmap
import statistics
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.gpu.copies import MIB, Buffers
from benchmarks.gpu.section import Scale, Section
from lmcache.cuda import ipc
from lmcache.cuda.driver import Context
from lmcache.cuda.pins import Pins
from lmcache.tiers.memory.kernel_pages import populate
from testing.cuda_peers import open_context, peer


def measure(context: Context, scale: Scale) -> list[Section]:
    section = Section(
        "Other costs in time and memory",
        ("cost", "measured"),
        "The copies are 2 MiB from pinned memory. Copies during pinning show the delay of the first loads of"
        " a new engine.",
    )
    address = int(context.call("cuMemAlloc", scale.copy_bytes))
    before = _free_bytes(context)
    with peer() as reader:
        reader.call(open_context)
        cost = (before - _free_bytes(context)) / MIB
        section.rows.append(("a second process's context", f"{cost:.0f} MiB of the GPU's memory"))
        opened, closed = reader.call(open_and_close, ipc.export(context, address).handle)
        section.rows.append(
            ("opening an IPC handle, closing it", f"{opened * 1e6:.0f} us, {closed * 1e6:.0f} us")
        )
    section.rows += _pinning(context, address, scale)
    context.call("cuMemFree", address)
    return [section]


def _free_bytes(context: Context) -> int:
    return int(context.call("cuMemGetInfo")[0])


def open_and_close(state: dict[str, Any], handle: bytes) -> tuple[float, float]:
    """Return the median seconds of opening and of closing a handle."""
    opened, closed = [], []
    for _ in range(20):
        start = time.perf_counter()
        mapping = state["mappings"].open(handle)
        middle = time.perf_counter()
        mapping.close()
        opened.append(middle - start)
        closed.append(time.perf_counter() - middle)
    return statistics.median(opened), statistics.median(closed)


def _pinning(context: Context, address: int, scale: Scale) -> list[tuple[str, str]]:
    gib = scale.pin_bytes / (1 << 30)
    ours = Buffers(context, address, scale)
    batch = ours.batch(2 * MIB, is_store=False)
    single = type(batch)(batch.to[:1], batch.from_[:1], batch.sizes[:1])

    def latency() -> float:
        start = time.perf_counter()
        single.submit(ours.stream)
        ours.stream.synchronize()
        return time.perf_counter() - start

    idle = sorted(latency() for _ in range(200))
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(scale.pin_bytes)
        arena = np.frombuffer(mmap.mmap(file.fileno(), scale.pin_bytes), np.uint8)
        start = time.perf_counter()
        populate(arena)
        populated = time.perf_counter() - start
        pins = Pins(context, arena.ctypes.data, arena.nbytes)
        start = time.perf_counter()
        pins.set_ready(arena.nbytes)
        busy = [latency()]
        while not pins.wait(0):
            busy.append(latency())
        pinned = time.perf_counter() - start
        failures = pins.failures
        pins.close()
    ours.close()
    busy.sort()
    return [
        ("populating memory", f"{populated / gib:.2f} s per GiB"),
        ("pinning it", f"{pinned / gib:.2f} s per GiB, {failures} extents refused"),
        ("a copy without pinning: p50, worst", f"{idle[100] * 1e6:.0f} us, {idle[-1] * 1e6:.0f} us"),
        (
            "a copy during pinning: p50, worst",
            f"{busy[len(busy) // 2] * 1e6:.0f} us, {busy[-1] * 1e6:.0f} us",
        ),
    ]
