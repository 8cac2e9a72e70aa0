"""Measure store and load of 2,048 tokens of an 8B model's KV between blocks and arena, on 1 and 2 threads.

The references are written in C, so that they have no overhead: memcpy of the same pieces, the same with
stores that bypass the caches, and memcpy of large pieces, which paged KV never has.
"""

from __future__ import annotations

import mmap
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import yardstick
from benchmarks.report import Figure, Report, at_least, of, paired
from lmcache_client.core.copier import CpuCopier, RowLoad
from lmcache_client.core.layout import Layout

LAYERS, PAGE_BYTES, BLOCKS_PER_CHUNK, CHUNKS, BLOCKS = 32, 64 << 10, 16, 8, 160
CHUNK_BYTES = LAYERS * BLOCKS_PER_CHUNK * PAGE_BYTES
TOTAL_BYTES = CHUNKS * CHUNK_BYTES
LARGE_PIECE_BYTES = 4 << 20
REPEATS = 15
THREADS = (1, 2)
BARS = {"load": 80, "store": 50}  # per cent of memcpy of the same pieces, on one thread

Bytes = npt.NDArray[np.uint8]
Ways = dict[str, Callable[[], None]]


def make_kv() -> Layout:
    """Return paged KV of 32 layers in one storage, as in the engine."""
    storage = torch.randint(0, 255, (LAYERS, BLOCKS, PAGE_BYTES), dtype=torch.uint8)
    return Layout(tuple(storage), BLOCKS_PER_CHUNK)


def piece_addresses(kv: Layout, slots: Bytes, tables: list[list[int]]) -> Iterator[tuple[int, int]]:
    """Yield the addresses of each piece in its slot and in the paged KV, in the order of the copies."""
    for slot, blocks in zip(slots, tables, strict=True):
        address = slot.ctypes.data
        for layer in kv.pages:
            for block in blocks:
                yield address, layer.data_ptr() + block * PAGE_BYTES
                address += PAGE_BYTES


def large_pieces(kv: Layout, slots: Bytes) -> Iterator[tuple[int, int]]:
    start, page = slots.ctypes.data, kv.pages[0].data_ptr()
    for offset in range(0, TOTAL_BYTES, LARGE_PIECE_BYTES):
        yield start + offset, page + offset


def yardsticks(kv: Layout, slots: Bytes, tables: list[list[int]]) -> Ways:
    ways: Ways = {}
    kinds = {
        "memcpy of the same pieces": (list(piece_addresses(kv, slots, tables)), PAGE_BYTES, False),
        "the same, past the caches": (list(piece_addresses(kv, slots, tables)), PAGE_BYTES, True),
        "memcpy of large pieces": (list(large_pieces(kv, slots)), LARGE_PIECE_BYTES, False),
    }
    for kind, (pairs, size, streaming) in kinds.items():
        back = [(page, slot) for slot, page in pairs]
        for threads in THREADS:
            for what, ends in (("load", back), ("store", pairs)):
                copy = yardstick.copy(ends, size, threads, streaming=streaming)
                ways[f"{what}, {threads}: {kind}"] = copy
    return ways


def copies(kv: Layout, slots: Bytes, tables: list[list[int]]) -> Ways:
    """Return the copies of this project. Stores use one thread, because the engine computes at that time."""

    def load(copier: CpuCopier) -> None:
        todo = iter(list(zip(slots, tables, strict=True)))

        def work() -> None:
            for slot, blocks in todo:
                copier.load([RowLoad(0, slot, 0, blocks)], None)

        copier.share(work)

    def store(copier: CpuCopier) -> None:
        for slot, blocks in zip(slots, tables, strict=True):
            copier.store(0, slot, blocks, None)

    single, double = CpuCopier({0: kv}, 1), CpuCopier({0: kv}, 2)
    return {
        "load, 1": lambda: load(single),
        "store, 1": lambda: store(single),
        "load, 2": lambda: load(double),
    }


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
        ways = copies(kv, slots, tables) | yardsticks(kv, slots, tables)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for repeat in range(REPEATS + 1):
            for name in random.sample(list(ways), len(ways)):
                took = timed(ways[name])
                if repeat:  # the first round faults the pages in
                    seconds[name].append(took)
    return Report("transfer", _conditions(), list(_figures(seconds)))


def _conditions() -> str:
    shape = f"{LAYERS} layers x {BLOCKS_PER_CHUNK}-token blocks of {PAGE_BYTES >> 10} KiB, {CHUNKS} chunks"
    return (
        f"{TOTAL_BYTES >> 20} MiB as {shape}, scattered; {REPEATS} rounds in random order; medians of the\n"
        "rounds' ratios with 95 % intervals; the yardsticks are C"
    )


def _figures(seconds: dict[str, list[float]]) -> Iterator[Figure]:
    for threads in THREADS:
        for what, bar in BARS.items():
            ours = f"{what}, {threads}"
            if ours not in seconds:
                continue
            for name in seconds:
                if not name.startswith(f"{ours}: "):
                    continue
                kind = name.partition(": ")[2]
                share = paired(seconds[name], seconds[ours])
                label = f"{what}, {threads} thread{'s'[: threads - 1]}, of {kind}"
                has_bar = threads == 1 and kind == "memcpy of the same pieces"
                yield at_least(label, share, "%", bar) if has_bar else of(label, share, "%")
            yield Figure("    rate", TOTAL_BYTES / statistics.median(seconds[ours]) / 1e9, "GB/s")
    yield of("load, gain of the second thread", paired(seconds["load, 1"], seconds["load, 2"]), "x")
