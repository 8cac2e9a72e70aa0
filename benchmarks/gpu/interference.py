"""Measure the effect of copies on kernels that read the GPU's memory, as decoding does."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.copies import KIB, MIB, Buffers, attach, background, copy_once, read_while
from benchmarks.gpu.kernel import Kernel
from benchmarks.gpu.results import Results, held
from benchmarks.gpu.scale import Scale, size
from lmcache_client.cuda import ipc
from lmcache_client.cuda.driver import GpuContext
from testing.cuda_peers import Peer, open_context, peer

ALLOWED = 1.05


def measure(results: Results, context: GpuContext, scale: Scale) -> None:
    section = results.section(
        "Kernels during copies",
        ("background work", "p50", "p99", "p99 / alone", "bar"),
        f"Times of {scale.kernel_runs} runs of a kernel that reads {size(scale.kernel_bytes)}. The sidecar's"
        " copies come from another process, with its own context, the engine's from another stream.",
    )
    kernel = Kernel(context, scale.kernel_bytes)
    address = int(context.call("cuMemAlloc", scale.copy_bytes))
    kernel.times(scale.kernel_runs // 10)
    alone = 0.0

    def add(what: str, *, has_bar: bool = False) -> None:
        nonlocal alone
        times = kernel.times(scale.kernel_runs)
        p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
        alone = alone or p99
        bar = held(p99 / alone, ALLOWED) if has_bar else ""
        section.add(what, f"{p50 * 1e6:.1f} us", f"{p99 * 1e6:.1f} us", f"{p99 / alone:.3f}", bar)

    add("nothing")
    with peer() as reader:
        reader.call(open_context)
        reader.call(attach, ipc.export(context, address).handle, scale)
        add("an idle second context")
        for piece_bytes in (2 * MIB, 32 * KIB):
            with reading(reader, piece_bytes):
                add(f"stores by the sidecar, pieces of {size(piece_bytes)}", has_bar=piece_bytes == 2 * MIB)
    ours = Buffers(context, address, scale)
    for what, is_store in (("stores", True), ("loads", False)):
        for piece_bytes in (2 * MIB, 32 * KIB):
            batch = ours.batch(piece_bytes, is_store=is_store)
            with background(lambda batch=batch: copy_once(ours, batch)):  # type: ignore[misc]
                add(f"{what} by the engine, pieces of {size(piece_bytes)}")
    ours.close()
    kernel.close()
    context.call("cuMemFree", address)


@contextlib.contextmanager
def reading(reader: Peer, piece_bytes: int) -> Iterator[None]:
    """Let the peer read during the context."""
    with tempfile.NamedTemporaryFile() as flag:
        reader.start(read_while, Path(flag.name), piece_bytes)
        yield
    reader.result()
