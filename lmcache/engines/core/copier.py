"""Copy whole chunks between the engine's paged KV and a slot of the arena.

A slot holds, layer after layer, the blocks of a chunk in order: ``[layer][block][page bytes]``. One call
moves all blocks of a chunk, without the GIL; there is no Python loop over blocks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lmcache import streaming
from lmcache.engines.core.layout import Layout

Fence = Any
"""A point of the engine's compute stream: copies wait until the work before it is done. None on the CPU."""

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]


class EngineCopier(Protocol):
    """Moves bytes between the engine's KV and one slot; returns when they are there. Thread-safe."""

    def fence(self) -> Fence:
        """Mark the present end of the engine's work; called on the engine's thread."""

    def share(self, work: Callable[[], None]) -> None:
        """Run ``work`` on as many threads at once as loads gain from; returns when all have ended."""

    def load(self, slot: Bytes, first_block: int, blocks: Sequence[int], fence: Fence) -> None:
        """Fill ``blocks`` of the KV from the slot's blocks ``first_block`` and following."""

    def store(self, slot: Bytes, blocks: Sequence[int], fence: Fence) -> None:
        """Fill the slot from ``blocks``, which are one full chunk."""


def by_layer(layers: Iterable[Any], blocks_per_chunk: int, slot: Any) -> Iterator[tuple[Any, Any]]:
    """Pair each layer's pages with its part ``[blocks_per_chunk, page_bytes]`` of a slot."""
    start = 0
    for pages in layers:
        end = start + blocks_per_chunk * pages.shape[1]
        yield pages, slot[start:end].reshape(blocks_per_chunk, pages.shape[1])
        start = end


class CpuCopier:
    """KV in host memory. The engine's forward is done when its hooks run, so there is nothing to wait for.

    Loads are shared among threads, chunk by chunk: a request waits for them. Stores are not: the engine
    computes meanwhile.
    """

    def __init__(self, layout: Layout, num_threads: int = 1) -> None:
        """Raises ValueError when a layer's blocks are not adjacent: ``np.take`` would copy it first."""
        self._blocks_per_chunk, self._chunk_bytes = layout.blocks_per_chunk, layout.chunk_bytes
        self._layers: list[Bytes] = [pages.numpy() for pages in layout.pages]
        if not all(layer.flags.c_contiguous for layer in self._layers):
            raise ValueError("the blocks of a layer are not adjacent in host memory")
        pages = np.array([layer.shape[1] for layer in self._layers], np.uint64)
        bases = np.array([layer.ctypes.data for layer in self._layers], np.uint64)
        can_stream = not (pages % streaming.PIECE_BYTES).any() and not (bases % streaming.LINE).any()
        self._stream = streaming.make_copy() if can_stream else None
        self._bases, self._pages = bases[:, None], pages[:, None]
        self._starts = (np.cumsum(pages) - pages)[:, None] * np.uint64(self._blocks_per_chunk)
        self._num_threads = num_threads
        self._others = futures.ThreadPoolExecutor(max(1, num_threads - 1), "lmcache-copy", spread)

    def fence(self) -> Fence:
        """Nothing to mark."""
        return None

    def share(self, work: Callable[[], None]) -> None:
        """See ``EngineCopier``."""
        others = [self._others.submit(work) for _ in range(self._num_threads - 1)]
        try:
            work()
        finally:  # a load has ended only when nothing writes to its blocks any more
            futures.wait(others)
        for other in others:
            other.result()

    def load(self, slot: Bytes, first_block: int, blocks: Sequence[int], fence: Fence) -> None:
        """See ``EngineCopier``."""
        self._copy(slot, first_block, blocks, is_load=True)

    def store(self, slot: Bytes, blocks: Sequence[int], fence: Fence) -> None:
        """See ``EngineCopier``."""
        self._copy(slot, 0, blocks, is_load=False)

    def _copy(self, slot: Bytes, first_block: int, blocks: Sequence[int], *, is_load: bool) -> None:
        ids = self._checked(slot, first_block, blocks)
        if self._stream is not None and not slot.ctypes.data % streaming.LINE:
            in_slot, in_kv, sizes = self._places(slot, first_block, ids)
            to, from_ = (in_kv, in_slot) if is_load else (in_slot, in_kv)
            self._stream(to, from_, sizes)
            return
        for layer, part in by_layer(self._layers, self._blocks_per_chunk, slot):
            if is_load:
                layer[ids] = part[first_block : first_block + len(ids)]
            else:
                np.take(layer, ids, axis=0, out=part, mode="clip")  # any other mode would buffer

    def _checked(self, slot: Bytes, first_block: int, blocks: Sequence[int]) -> Ids:
        """Addresses are not checked later. Raises ValueError."""
        ids = np.asarray(blocks, np.int64)
        if not 0 <= ids.min() <= ids.max() < len(self._layers[0]):
            raise ValueError(f"blocks {ids.min()} to {ids.max()} are not all blocks of the KV")
        if first_block + len(ids) > self._blocks_per_chunk or self._chunk_bytes > slot.nbytes:
            raise ValueError("the blocks are not all blocks of the slot")
        return ids

    def _places(self, slot: Bytes, first_block: int, ids: Ids) -> tuple[streaming.Words, ...]:
        """Addresses in the slot and in the KV, and sizes, of each page, layer after layer."""
        offsets = np.arange(first_block, first_block + len(ids), dtype=np.uint64)
        in_slot = np.uint64(slot.ctypes.data) + self._starts + self._pages * offsets
        in_kv = self._bases + self._pages * ids.astype(np.uint64)
        sizes = np.broadcast_to(self._pages, in_kv.shape)
        return in_slot.ravel(), in_kv.ravel(), sizes.ravel()


def make_copier(layout: Layout, num_threads: int | None = None) -> EngineCopier:
    """Choose by where the KV is. Raises ValueError when no copier fits.

    ``num_threads`` of a load; by default 2 where there is more than one core.
    """
    kind = layout.pages[0].device.type
    if kind == "cpu":
        return CpuCopier(layout, num_threads or min(2, len(allowed_cores())))
    if kind == "cuda":
        from lmcache.engines.core.cuda_copier import CudaCopier  # only an engine with a GPU needs the driver

        return CudaCopier(layout)
    raise ValueError(f"no copier for KV on a {kind} device")


def allowed_cores() -> set[int]:
    """Where copies may run: also the cores that the engine keeps free of its own computing.

    vLLM binds the thread that starts ours to one core, and with it all that it starts. Its parent is not
    bound.
    """
    own = os.sched_getaffinity(0)
    try:
        return own | os.sched_getaffinity(os.getppid())
    except OSError:  # the parent is outside our container, or gone
        return own


def spread() -> None:
    """Let the calling thread run on all allowed cores."""
    with contextlib.suppress(OSError):  # some may have been taken from us: stay where we are
        os.sched_setaffinity(0, allowed_cores())
