"""Measure the Python time of a batch of copies, and the time from an attach to the first copy.

The benchmark runs on a GPU, or else on the simulated driver. The Python code is the same, and the time of the
driver is subtracted. ``make gpu-check`` measures the speed of the copies on a GPU.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.report import Report, at_most, of, paired
from lmcache.cuda.copies import CopyBatch, Words
from lmcache.cuda.driver import Context, Device, Stream
from lmcache.cuda.errors import CudaUnavailableError
from lmcache.cuda.pins import Pins
from testing import cuda

CHUNKS, LAYERS, BLOCKS = 8, 32, 16
PIECES = CHUNKS * LAYERS * BLOCKS
PAGE_BYTES = 4096
"""Size of a page; small, because the duration of copies is not measured."""
ROUNDS = 31
ALLOWED_MICROSECONDS = 0.3

ARENA_BYTES = 64 << 30
PIN_RATE = 10 << 30
"""Bytes per second of the simulated registration, a typical value of hosts."""
ALLOWED_SECONDS = 1.0


class Chunks:
    """A device's paged KV, an arena's slots, and random blocks of ``CHUNKS`` chunks."""

    def __init__(self, context: Context) -> None:
        self.context = context
        num_blocks = 2 * CHUNKS * BLOCKS
        layer_bytes = num_blocks * PAGE_BYTES
        self.kv = int(context.call("cuMemAlloc", LAYERS * layer_bytes))
        self.arena = np.frombuffer(mmap.mmap(-1, PIECES * PAGE_BYTES), np.uint8)
        self.pins = Pins(context, self.arena.ctypes.data, self.arena.nbytes)
        self.pins.set_ready(self.arena.nbytes)
        assert self.pins.wait(60)
        self.blocks = np.random.default_rng(0).permutation(num_blocks)[: CHUNKS * BLOCKS]
        self.layers = np.uint64(self.kv) + np.arange(LAYERS, dtype=np.uint64) * np.uint64(layer_bytes)
        self.sizes = np.full(PIECES, PAGE_BYTES, np.uint64)

    def places(self) -> tuple[Words, Words, Words]:
        """Compute the address of each page in the slots and in the KV, block by block, as the copiers do."""
        page = np.uint64(PAGE_BYTES)
        in_kv = self.layers + page * self.blocks.astype(np.uint64)[:, None]
        in_slots = np.uint64(self.arena.ctypes.data) + page * np.arange(PIECES, dtype=np.uint64)
        return in_slots, in_kv.ravel(), self.sizes


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the processor time of the calling thread. The simulated driver copies in other threads."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def measure_batches(context: Context) -> dict[str, list[float]]:
    """Return the CPU time per piece of each round, by way of copying."""
    chunks, stream, driver = Chunks(context), Stream(context), context.driver
    bindings = driver.bindings
    batch = CopyBatch(*chunks.places(), chunks.pins.edges)
    attributes, first = bindings.CUmemcpyAttributes(), [0]
    attributes.srcAccessOrder = bindings.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

    def bare() -> None:
        CopyBatch.submit(batch, stream)

    def with_lists() -> None:
        to, from_, sizes = (words.tolist() for words in chunks.places())
        pointers = [[bindings.CUdeviceptr(address) for address in side] for side in (to, from_)]
        context.call("cuMemcpyBatchAsync", *pointers, sizes, PIECES, [attributes], first, 1, stream.raw)

    def one_by_one() -> None:
        to, from_, sizes = (words.tolist() for words in chunks.places())
        with context:
            for piece in zip(to, from_, sizes, strict=True):
                driver.call("cuMemcpyAsync", *piece, stream.raw)

    ways: dict[str, Callable[[], None]] = {
        "whole": lambda: CopyBatch(*chunks.places(), chunks.pins.edges).submit(stream),
        "driver": bare,
        "lists": with_lists,
        "one by one": one_by_one,
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS + 2):
        for name, work in ways.items():
            stream.synchronize()
            each = cpu_seconds(work) / PIECES
            if turn >= 2:
                taken[name].append(each)
    stream.synchronize()
    chunks.pins.close()
    stream.close()
    return taken


def measure_attach(context: Context) -> tuple[float, float]:
    """Return the seconds from mapping a large arena to the first copied slot, and to the last pinned page."""
    stream, page = Stream(context), int(context.call("cuMemAlloc", PAGE_BYTES))
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(ARENA_BYTES)
        start = time.perf_counter()
        arena = np.frombuffer(mmap.mmap(file.fileno(), ARENA_BYTES), np.uint8)
        pins = Pins(context, arena.ctypes.data, arena.nbytes)
        pins.set_ready(arena.nbytes)
        places = ([arena.ctypes.data], [page], [PAGE_BYTES])
        to, from_, sizes = (np.array(words, np.uint64) for words in places)
        CopyBatch(to, from_, sizes, pins.edges).submit(stream, is_pinned=False)
        stream.synchronize()
        first = time.perf_counter() - start
        assert pins.wait(600)
        whole = time.perf_counter() - start
        pins.close()
    stream.close()
    return first, whole


def child() -> None:
    device = Device.visible()[0]
    context = device.primary_context()
    is_simulated = "CUDASIM_NODE" in os.environ
    result = {
        "device": f"the simulated driver, pinning {PIN_RATE >> 30} GiB/s" if is_simulated else device.uuid,
        "batches": measure_batches(context),
        # On a real GPU, pinning an arena of this size would populate all of its memory.
        "attach": measure_attach(context) if is_simulated else None,
    }
    context.close()
    print(json.dumps(result))


def run() -> Report:
    try:
        Device.visible()
        result = _run_child({})
    except CudaUnavailableError:
        with cuda.node() as node:
            result = _run_child(node.environment(orders=f"pin_rate {PIN_RATE}", memory=32 << 30))
    batches = result["batches"]
    python = [whole - driver for whole, driver in zip(batches["whole"], batches["driver"], strict=True)]
    figures = [
        at_most("Python per piece", 1e6 * sorted(python)[ROUNDS // 2], "us", ALLOWED_MICROSECONDS),
        of("built and submitted, per piece", 1e6 * sorted(batches["whole"])[ROUNDS // 2], "us"),
        of("lists of cuda-bindings / ours", paired(batches["lists"], batches["whole"]), "x"),
        of("a call for each piece / ours", paired(batches["one by one"], batches["whole"]), "x"),
    ]
    if result["attach"] is not None:
        first, whole = result["attach"]
        what = f"from mapping {ARENA_BYTES >> 30} GiB"
        figures.append(at_most(f"{what} to the first slot", first, "s", ALLOWED_SECONDS))
        figures.append(of(f"{what} to all pinned", whole, "s"))
    pieces = f"{CHUNKS} chunks x {LAYERS * BLOCKS} pieces, no two adjacent in the KV"
    return Report("cuda", f"{pieces}; {ROUNDS} rounds; {result['device']}", figures)


def _run_child(environment: dict[str, str]) -> Any:
    argv = [sys.executable, "-c", "from benchmarks.cuda import child; child()"]
    done = subprocess.run(argv, env=os.environ | environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)
