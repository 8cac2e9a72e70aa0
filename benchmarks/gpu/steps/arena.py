"""A large arena: time to populate and to pin it, and what a stream of kernels feels meanwhile."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.gpu.copies import MIB
from benchmarks.gpu.kernel import Kernel
from benchmarks.gpu.page_nodes import sampled_nodes
from benchmarks.gpu.results import Results, Section, held
from benchmarks.gpu.scale import Scale, size
from benchmarks.gpu.shared_files import FOLDER, free_bytes
from lmcache_client.cuda.driver import Device, GpuContext
from lmcache_client.cuda.pins import Pins
from lmcache_store.common.numa import on_node
from lmcache_store.tiers.memory.kernel_pages import populate
from testing.cuda_peers import open_context, peer

Bytes = npt.NDArray[np.uint8]

_PARTS = 8
_UNIT = _PARTS * 4 * MIB
"""The arena's size is a multiple of this."""
_SAMPLE_BYTES = 1 << 30
"""Bytes that are populated first. Their time decides the size of the arena."""
_POPULATING_SHARE = 0.4
"""Share of the remaining time that populating may take. Pinning needs the rest."""
_KINDS = ((256 * MIB, 0.0), (64 * MIB, 0.0), (16 * MIB, 0.0), (16 * MIB, 3.0))
"""Bytes of a registration, and the pause after it as a multiple of its time. The engine uses the last one."""


def run(results: Results, scale: Scale) -> None:
    device = Device.visible()[0]
    max_bytes = _usable_bytes(scale)
    if not max_bytes:
        results.problem(f"less than {size(_UNIT)} of memory are free", "pinning of an arena was not measured")
        return
    context = device.primary_context()
    kernel = Kernel(context, scale.kernel_bytes)
    with _arena(results, min(_SAMPLE_BYTES, max_bytes)) as (_, sample):
        steps, seconds = _during(kernel, lambda: _populate(sample, device.numa_node))
    per_gib = seconds / (sample.nbytes / 2**30)
    num_bytes = _fitting_bytes(max_bytes, per_gib, results.seconds_left())
    section = results.section(
        f"An arena of {size(num_bytes)}",
        ("work", "seconds per GiB", "step p50", "step p99", "longest step"),
        "Steps are launches of a kernel, each with a wait for its end, as an engine's thread makes them."
        f" Each kind of pinning registers one of {_PARTS} parts of the arena.",
    )
    _add(section, f"populating {size(sample.nbytes)} first", per_gib, steps)
    with _arena(results, num_bytes) as (name, arena):
        _add(section, "nothing", 0.0, [kernel.step() for _ in range(scale.kernel_runs)])
        steps, seconds = _during(kernel, lambda: _populate(arena, device.numa_node))
        _add(section, "populating by this process", seconds / (num_bytes / 2**30), steps)
        parts = iter(np.split(arena, _PARTS))
        for extent_bytes, pause_ratio in _KINDS:
            _pin_here(section, context, kernel, next(parts), extent_bytes, pause_ratio)
        with peer() as reader:
            reader.call(open_context)
            part = next(parts)
            offset = part.ctypes.data - arena.ctypes.data
            reader.start(pin, name, offset, part.nbytes)
            steps = _until(kernel, lambda: reader.has_result)
            _add(section, "pinning by another process", reader.result() / (part.nbytes / 2**30), steps)
        _report_nodes(results, arena, device.numa_node)
    kernel.close()
    context.close()


def _populate(arena: Bytes, node: int | None) -> None:
    with on_node(node):  # as the sidecar does for each column
        populate(arena)


def _report_nodes(results: Results, arena: Bytes, node: int | None) -> None:
    """Report how many pages lie on another NUMA node than the GPU."""
    section = results.section(
        "NUMA nodes",
        ("node of the GPU", "pages by node", "pages elsewhere", "bar"),
        "One page of every 2 MiB.",
    )
    try:
        pages = sampled_nodes(arena)
    except OSError as error:
        section.add(str(node), f"not known: {error}", "", "")
        return
    by_node = ", ".join(f"{number}: {count}" for number, count in sorted(pages.items()))
    share = 0.0 if node is None else 1 - pages[node] / sum(pages.values())
    bar = "" if node is None else held(share, 0.0)
    section.add("the host does not say" if node is None else str(node), by_node, f"{share:.1%}", bar)


def _usable_bytes(scale: Scale) -> int:
    """Return at most 0.8 of the free memory: of the host, in /dev/shm, and below the container's limit."""
    pages = os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
    return min(scale.arena_bytes, int(0.8 * min(free_bytes(), pages))) // _UNIT * _UNIT


def _fitting_bytes(max_bytes: int, seconds_per_gib: float, seconds_left: float) -> int:
    """Return the size of an arena that is populated in a share of the remaining time."""
    gib = _POPULATING_SHARE * max(0.0, seconds_left) / seconds_per_gib
    return max(_UNIT, min(max_bytes, int(gib * 2**30) // _UNIT * _UNIT))


@contextlib.contextmanager
def _arena(results: Results, num_bytes: int) -> Iterator[tuple[str, Bytes]]:
    """Memory on tmpfs, and the name of its file."""
    with tempfile.NamedTemporaryFile(dir=FOLDER, prefix=f"{results.shared_prefix}arena-") as file:
        file.truncate(num_bytes)
        yield file.name, _map(file.name, 0, num_bytes)


def _map(name: str, offset: int, num_bytes: int) -> Bytes:
    with open(name, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), num_bytes, offset=offset), np.uint8)


def _pin_here(
    section: Section, context: GpuContext, kernel: Kernel, part: Bytes, extent_bytes: int, pause_ratio: float
) -> None:
    pins = Pins(context, part.ctypes.data, part.nbytes, extent_bytes, pause_ratio=pause_ratio)
    began_at = time.perf_counter()
    pins.set_ready(part.nbytes)
    steps = _until(kernel, lambda: pins.wait(0))
    seconds = (time.perf_counter() - began_at) / (part.nbytes / 2**30)
    refused = f", {pins.failures} refused: {pins.problem}" if pins.failures else ""
    kind = f"{size(extent_bytes)} at once" + (", with pauses" if pause_ratio else "")
    _add(section, f"pinning by this process, {kind}{refused}", seconds, steps)
    pins.close()


def _until(kernel: Kernel, is_over: Callable[[], bool]) -> list[float]:
    """Run steps until ``is_over``. Returns the seconds of each."""
    steps = [kernel.step()]
    while not is_over():
        steps.append(kernel.step())
    return steps


def _add(section: Section, what: str, seconds: float, steps: list[float]) -> None:
    steps = sorted(steps)
    chosen = steps[len(steps) // 2], steps[len(steps) * 99 // 100], steps[-1]
    section.add(what, f"{seconds:.2f}" if seconds else "", *(f"{step * 1e3:.2f} ms" for step in chosen))


def _during(kernel: Kernel, work: Callable[[], object]) -> tuple[list[float], float]:
    """Run steps while ``work`` runs in another thread. Returns their seconds, and those of the work."""
    ended: list[float | Exception] = []

    def timed() -> None:
        began_at = time.perf_counter()
        try:
            work()
            ended.append(time.perf_counter() - began_at)
        except Exception as error:
            ended.append(error)

    # A daemon: the end of a stopped step does not wait for it.
    threading.Thread(target=timed, daemon=True).start()
    steps = _until(kernel, lambda: bool(ended))
    (end,) = ended
    if isinstance(end, Exception):
        raise end
    return steps, end


def pin(state: dict[str, Any], name: str, offset: int, num_bytes: int) -> float:
    """Pin a part of the arena in another process, as the sidecar's reader does. Returns seconds."""
    part = _map(name, offset, num_bytes)
    pins = Pins(state["context"], part.ctypes.data, num_bytes)
    began_at = time.perf_counter()
    pins.set_ready(num_bytes)
    while not pins.wait(10):
        pass
    seconds = time.perf_counter() - began_at
    pins.close()
    return seconds
