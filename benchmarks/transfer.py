"""Store and load of 2,048 tokens of an 8B model's KV between paged blocks and the arena, one copy thread."""

from __future__ import annotations

import ctypes
import mmap
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.report import Figure, Report, at_least
from lmcache.engines.vllm.copier import CpuCopier
from lmcache.engines.vllm.layouts import Layout

LAYERS, PAGE_BYTES, BLOCKS_PER_CHUNK, CHUNKS, BLOCKS = 32, 64 << 10, 16, 8, 160
CHUNK_BYTES = LAYERS * BLOCKS_PER_CHUNK * PAGE_BYTES
TOTAL_BYTES = CHUNKS * CHUNK_BYTES
REPEATS = 9

Bytes = npt.NDArray[np.uint8]


def make_kv() -> Layout:
    """Paged KV of 32 layers in one storage, as the engine has it."""
    storage = torch.randint(0, 255, (LAYERS, BLOCKS, PAGE_BYTES), dtype=torch.uint8)
    return Layout(tuple(storage), BLOCKS_PER_CHUNK)


def memmove_pieces(kv: Layout, slots: Bytes, tables: list[list[int]], load: bool) -> Callable[[], None]:
    """The yardstick: memcpy of the same pieces in the same order, one call each."""
    pairs = []
    for slot, blocks in zip(slots, tables, strict=True):
        address = slot.ctypes.data
        for layer in kv.pages:
            for block in blocks:
                page = layer.data_ptr() + block * PAGE_BYTES
                pairs.append((page, address) if load else (address, page))
                address += PAGE_BYTES

    def move() -> None:
        for target, source in pairs:
            ctypes.memmove(target, source, PAGE_BYTES)

    return move


def timed(what: Callable[[], None]) -> float:
    start = time.perf_counter()
    what()
    return time.perf_counter() - start


def run() -> Report:
    kv, generator = make_kv(), np.random.default_rng(0)
    blocks = generator.permutation(BLOCKS)[: CHUNKS * BLOCKS_PER_CHUNK]
    tables = [list(map(int, part)) for part in blocks.reshape(CHUNKS, BLOCKS_PER_CHUNK)]
    shm = Path("/dev/shm")
    with tempfile.TemporaryFile(dir=shm if shm.is_dir() else None) as file:
        file.truncate(TOTAL_BYTES)
        slots = np.frombuffer(mmap.mmap(file.fileno(), TOTAL_BYTES), np.uint8).reshape(CHUNKS, CHUNK_BYTES)
        copier = CpuCopier(kv)
        seconds: dict[str, list[float]] = {name: [] for name in ("load", "store", "memcpy in", "memcpy out")}
        ways: dict[str, Callable[[], None]] = {
            "store": lambda: [copier.store(s, t, None) for s, t in zip(slots, tables, strict=True)] and None,
            "memcpy out": memmove_pieces(kv, slots, tables, load=False),
            "load": lambda: [copier.load(s, 0, t, None) for s, t in zip(slots, tables, strict=True)] and None,
            "memcpy in": memmove_pieces(kv, slots, tables, load=True),
        }
        for repeat in range(REPEATS + 1):
            for name, way in ways.items():
                took = timed(way)
                if repeat:  # the first round faults the pages in
                    seconds[name].append(took)
    return Report("transfer", _conditions(), _figures(seconds))


def _conditions() -> str:
    shape = f"{LAYERS} layers x {BLOCKS_PER_CHUNK}-token blocks of {PAGE_BYTES >> 10} KiB, {CHUNKS} chunks"
    return (
        f"{TOTAL_BYTES >> 20} MiB as {shape}, scattered; one thread; median of {REPEATS} interleaved rounds"
    )


def _figures(seconds: dict[str, list[float]]) -> list[Figure]:
    def ratio(way: str, yardstick: str) -> float:
        pairs = zip(seconds[yardstick], seconds[way], strict=True)
        return 100 * statistics.median(base / took for base, took in pairs)

    rate = {name: TOTAL_BYTES / statistics.median(took) / 1e9 for name, took in seconds.items()}
    return [
        at_least("load, of memcpy of the same pieces", ratio("load", "memcpy in"), "%", 80),
        at_least("store, of memcpy of the same pieces", ratio("store", "memcpy out"), "%", 50),
        *(Figure(f"{name}, rate", value, "GB/s") for name, value in rate.items()),
    ]
