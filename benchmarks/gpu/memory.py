"""Measure the cost of contexts and mappings."""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.gpu.copies import MIB
from benchmarks.gpu.results import Results
from benchmarks.gpu.scale import Scale
from lmcache_client.cuda import ipc
from lmcache_client.cuda.driver import GpuContext
from testing.cuda_peers import open_context, peer


def measure(results: Results, context: GpuContext, scale: Scale) -> None:
    section = results.section(
        "Contexts and mappings",
        ("cost", "measured"),
        "Each reader of the sidecar has a context on the GPU of its engine, and opens the engine's memory.",
    )
    address = int(context.call("cuMemAlloc", scale.copy_bytes))
    before = _free_bytes(context)
    with peer() as reader:
        reader.call(open_context)
        cost = (before - _free_bytes(context)) / MIB
        section.add("a second process's context", f"{cost:.0f} MiB of the GPU's memory")
        opened, closed = reader.call(open_and_close, ipc.export(context, address).handle)
        section.add("opening an IPC handle, closing it", f"{opened * 1e6:.0f} us, {closed * 1e6:.0f} us")
    context.call("cuMemFree", address)


def _free_bytes(context: GpuContext) -> int:
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
