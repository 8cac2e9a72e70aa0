"""Measure the speed of batches of copies, by piece size, also from memory of another process."""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.results import Results, held
from benchmarks.gpu.scale import Scale, size
from lmcache_client.cuda import ipc
from lmcache_client.cuda.copies import CopyBatch
from lmcache_client.cuda.driver import GpuContext, GpuStream
from lmcache_client.cuda.errors import CudaError
from testing.cuda_memory import pages
from testing.cuda_peers import open_context, peer

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, 8 * KIB, 16 * KIB, 28 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, 2 * MIB, 32 * MIB]
BAR_GBYTES = 45.0
LEAST_SHARE = 0.9
"""Bar for 2 MiB, the size of an 8B model's block in all layers, as a share of the best batch."""


class Buffers:
    """Device memory, host memory of the same size, and a stream."""

    def __init__(self, context: GpuContext, address: int, scale: Scale, *, is_pinned: bool = True) -> None:
        self.context, self.address, self.scale = context, address, scale
        self.host = pages(scale.copy_bytes)
        self.host.fill(0)
        self._is_pinned = is_pinned
        if is_pinned:
            context.call("cuMemHostRegister", self.host.ctypes.data, self.host.nbytes, 0)
        self.stream = GpuStream(context)

    def batch(self, piece_bytes: int, *, is_store: bool) -> CopyBatch:
        """Create a batch whose pieces are in random order on the device, as blocks of an engine's KV are."""
        piece_bytes = min(piece_bytes, self.scale.copy_bytes)
        number = min(self.scale.max_pieces, self.scale.copy_bytes // piece_bytes)
        offsets = np.arange(number, dtype=np.uint64) * np.uint64(piece_bytes)
        there = np.uint64(self.address) + np.random.default_rng(0).permutation(offsets)
        here = np.uint64(self.host.ctypes.data) + offsets
        to, from_ = (here, there) if is_store else (there, here)
        return CopyBatch(to, from_, np.full(number, piece_bytes, np.uint64))

    def gbytes(
        self, batch: CopyBatch, submit: Callable[[CopyBatch, GpuStream], object] | None = None
    ) -> float:
        """Return 10^9 bytes per second, including the submission: the median of the rounds."""
        taken = []
        for _ in range(self.scale.rounds + 1):  # the first is not counted
            start = time.perf_counter()
            (submit or CopyBatch.submit)(batch, self.stream)
            self.stream.synchronize()
            taken.append(time.perf_counter() - start)
        return float(batch.sizes.sum()) / statistics.median(taken[1:]) / 1e9

    def close(self) -> None:
        self.stream.close()
        if self._is_pinned:
            self.context.call("cuMemHostUnregister", self.host.ctypes.data)


def singly(batch: CopyBatch, stream: GpuStream) -> None:
    """Copy with one call per piece."""
    types = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    copy: Any = stream.context.driver.function("cuMemcpyAsync", 4000, *types)
    with stream.context:
        for piece in zip(batch.to.tolist(), batch.from_.tolist(), batch.sizes.tolist(), strict=True):
            if code := copy(*piece, int(stream.raw)):
                raise stream.context.driver.error("cuMemcpyAsync", code)


def measure(results: Results, context: GpuContext, scale: Scale) -> None:
    address = int(context.call("cuMemAlloc", scale.copy_bytes))
    _by_size(results, context, address, scale)
    _other_ways(results, context, address, scale)
    context.call("cuMemFree", address)


def _by_size(results: Results, context: GpuContext, address: int, scale: Scale) -> None:
    section = results.section(
        "Copies by the size of their pieces",
        ("piece size", "to the host", "to the GPU", "read by another process over IPC", "bar"),
        "GB/s of one batch, pinned memory, pieces at random addresses of the GPU. A gather kernel is needed"
        " only if batches miss the bar at the piece size of the engine's layout.",
    )
    ours = Buffers(context, address, scale)
    exported = ipc.export(context, address)
    with peer() as reader:
        reader.call(open_context)
        reader.call(attach, exported.handle, scale)
        speeds: dict[int, tuple[float, float, float]] = {}
        for piece_bytes in SIZES:
            to_host, to_gpu = (ours.gbytes(ours.batch(piece_bytes, is_store=way)) for way in (True, False))
            read = reader.call(speed, piece_bytes)
            speeds[piece_bytes] = to_host, to_gpu, read
            bar = held(min(to_host, read), BAR_GBYTES, is_least=True) if piece_bytes == 2 * MIB else ""
            section.add(size(piece_bytes), f"{to_host:.1f}", f"{to_gpu:.1f}", f"{read:.1f}", bar)
    ours.close()
    shares = [
        of_block / max(speeds_of_way)
        for of_block, *speeds_of_way in zip(speeds[2 * MIB], *speeds.values(), strict=True)
    ]
    bar = held(min(shares), LEAST_SHARE, is_least=True)
    section.add("2 MiB / the best", *(f"{share:.2f}" for share in shares), bar)


def _other_ways(results: Results, context: GpuContext, address: int, scale: Scale) -> None:
    section = results.section(
        "Other ways to copy",
        ("way", "piece size", "to the host", "to the GPU"),
        "GB/s. Both directions: at the same time, on separate streams.",
    )
    ours = Buffers(context, address, scale)

    def add(what: str, piece_bytes: int, gbytes: Callable[[CopyBatch], float]) -> None:
        both = (gbytes(ours.batch(piece_bytes, is_store=way)) for way in (True, False))
        section.add(what, size(piece_bytes), *(f"{speed:.1f}" for speed in both))

    for piece_bytes in (32 * KIB, 2 * MIB):
        add("a call for each piece", piece_bytes, lambda batch: ours.gbytes(batch, singly))
    other = Buffers(context, address, scale)
    with background(lambda: copy_once(other, other.batch(2 * MIB, is_store=False))):
        to_host = ours.gbytes(ours.batch(2 * MIB, is_store=True))
    with background(lambda: copy_once(other, other.batch(2 * MIB, is_store=True))):
        to_gpu = ours.gbytes(ours.batch(2 * MIB, is_store=False))
    section.add("both directions", size(2 * MIB), f"{to_host:.1f}", f"{to_gpu:.1f}")
    for buffers in (ours, other):
        buffers.close()


def measure_pageable(results: Results, context: GpuContext, scale: Scale) -> None:
    """Measure copies of memory that is not pinned. An error becomes the cell of its row."""
    section = results.section(
        "Copies of memory that is not pinned",
        ("way", "piece size", "to the host", "to the GPU"),
        "GB/s, with a call for each piece, as engines copy memory that is not pinned yet.",
    )
    with contextlib.suppress(CudaError):  # after an error, the context may refuse the calls of the cleanup
        address = int(context.call("cuMemAlloc", scale.copy_bytes))
        pageable = Buffers(context, address, scale, is_pinned=False)
        for piece_bytes in (32 * KIB, 2 * MIB):
            cells = (_pageable_speed(pageable, piece_bytes, is_store=way) for way in (True, False))
            section.add("not pinned", size(piece_bytes), *cells)
        pageable.close()
        context.call("cuMemFree", address)


def _pageable_speed(buffers: Buffers, piece_bytes: int, *, is_store: bool) -> str:
    """Return GB/s, or the error."""
    batch = buffers.batch(piece_bytes, is_store=is_store)
    try:
        return f"{buffers.gbytes(batch, lambda batch, stream: batch.submit(stream, is_pinned=False)):.1f}"
    except CudaError as error:
        return str(error)


def copy_once(buffers: Buffers, batch: CopyBatch) -> None:
    """Copy a batch, and return when the copy is complete."""
    batch.submit(buffers.stream)
    buffers.stream.synchronize()


@contextlib.contextmanager
def background(work: Callable[[], object]) -> Any:
    """Repeat ``work`` in another thread during the context."""
    is_over = threading.Event()
    errors: list[Exception] = []

    def repeat() -> None:
        try:
            while not is_over.is_set():
                work()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    if errors:
        raise errors[0]


# ---- functions for the peer process, which has the role of the sidecar ----


def attach(state: dict[str, Any], handle: bytes, scale: Scale) -> None:
    mapping = state["mappings"].open(handle)
    state["buffers"] = Buffers(state["context"], mapping.base, scale)


def speed(state: dict[str, Any], piece_bytes: int) -> float:
    buffers: Buffers = state["buffers"]
    return buffers.gbytes(buffers.batch(piece_bytes, is_store=True))


def read_while(state: dict[str, Any], flag: Path, piece_bytes: int) -> float:
    """Read until a file is deleted. Returns GB/s."""
    buffers: Buffers = state["buffers"]
    batch = buffers.batch(piece_bytes, is_store=True)
    start, number = time.perf_counter(), 0
    while flag.exists():
        copy_once(buffers, batch)
        number += 1
    return number * float(batch.sizes.sum()) / (time.perf_counter() - start) / 1e9
