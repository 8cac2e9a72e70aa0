"""Copy whole chunks between the engine's paged KV and a slot of the arena.

A slot holds the blocks of a chunk in order, each with its layers: ``[block][layer][page bytes]``. So an
engine that keeps all layers of a block together (``BLHNC``) has one run of bytes per block on both sides. One
call moves all blocks of a chunk, without the GIL; there is no Python loop over blocks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lmcache import streaming
from lmcache.cuda.driver import Device
from lmcache.cuda.errors import CudaUnavailableError
from lmcache.cuda.pin_status import PinStatus
from lmcache.engines.core.layout import Layout
from lmcache.rpc.hello import TransferOffer

Fence = Any
"""A point of the engine's compute stream: copies wait until the work before it is done. None on the CPU."""

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]


class EngineCopier(Protocol):
    """Moves bytes between the engine's KV and one slot; returns when they are there. Thread-safe."""

    row_bytes: Mapping[int, int]
    """By KV group: bytes of a row of this rank."""

    def fence(self) -> Fence:
        """Mark the present end of the engine's work; called on the engine's thread."""

    def wait(self, fence: Fence) -> None:
        """Return when the engine's work before the fence is done."""

    def offer(self) -> TransferOffer:
        """Where the KV lies, for the sidecar to copy stores."""

    def prepare(self, slots: Bytes, ready_rows: int, is_alone: bool = False) -> None:
        """The first rows of a mapping of the arena, ``[num_rows, slot_bytes]``, may be touched now, others
        not (any more). ``is_alone``: no copy to or from an older mapping goes on.

        Raises CudaError when a device may have others pinned still.
        """

    def watch_pins(self, on_change: Callable[[PinStatus], None]) -> None:
        """Call ``on_change`` now, and from any thread whenever more or less of the arena is pinned; never
        where copies need no pinned memory. It must not block.
        """

    def share(self, work: Callable[[], None]) -> None:
        """Run ``work`` on as many threads at once as loads gain from; returns when all have ended."""

    def load(self, group: int, slot: Bytes, first_block: int, blocks: Sequence[int], fence: Fence) -> None:
        """Fill ``blocks`` of a KV group from the slot's blocks ``first_block`` and following."""

    def store(self, group: int, slot: Bytes, blocks: Sequence[int], fence: Fence) -> None:
        """Fill the slot from ``blocks``, which are one full row of a KV group."""

    def close(self) -> None:
        """Let go of all that was made; no copy is under way, and none comes."""


class Places:
    """Where the pages of a KV group's blocks lie, in the engine's KV and in a slot."""

    def __init__(self, layout: Layout) -> None:
        self._num_blocks = len(layout.pages[0])
        self._blocks_per_row, self._row_bytes = layout.blocks_per_row, layout.row_bytes
        self._bases = np.array([pages.data_ptr() for pages in layout.pages], np.uint64)
        self._strides = np.array([pages.stride(0) for pages in layout.pages], np.uint64)
        self.sizes = np.array([pages.shape[1] for pages in layout.pages], np.uint64)
        self.starts = np.cumsum(self.sizes) - self.sizes
        """Of each layer within a block of a slot."""
        # A request waits while the addresses of its pages are computed: whatever is the same for every row is
        # computed once. All callers get the same sizes, so they are read-only, as bytes are.
        self._offsets = np.arange(0, self._row_bytes, layout.block_bytes, np.uint64)[:, None] + self.starts
        self._row_sizes = np.frombuffer(np.tile(self.sizes, self._blocks_per_row).tobytes(), np.uint64)

    def of(
        self, slot: Bytes, first_block: int, blocks: Sequence[int]
    ) -> tuple[streaming.Words, streaming.Words, streaming.Words]:
        """Addresses in the slot and in the KV, and bytes, of each page, block after block.

        Raises ValueError when a place is not within both: nobody checks addresses later.
        """
        ids = self.checked(slot, first_block, blocks).astype(np.uint64)[:, None]
        in_slot = self._offsets[first_block : first_block + len(ids)] + np.uint64(slot.ctypes.data)
        in_kv = ids * self._strides + self._bases
        return in_slot.ravel(), in_kv.ravel(), self._row_sizes[: in_kv.size]

    def checked(self, slot: Bytes, first_block: int, blocks: Sequence[int]) -> Ids:
        """The blocks' numbers. Raises ValueError."""
        lowest, highest = min(blocks), max(blocks)
        if not 0 <= lowest <= highest < self._num_blocks:
            raise ValueError(f"blocks {lowest} to {highest} are not all blocks of the KV")
        if not 0 <= first_block <= self._blocks_per_row - len(blocks) or self._row_bytes > slot.nbytes:
            raise ValueError("the blocks are not all blocks of the slot")
        return np.array(blocks, np.int64)


class LoadThreads:
    """Threads that share the copies of a load, beside the one that began it."""

    def __init__(self, layouts: Mapping[int, Layout], num_threads: int) -> None:
        self.row_bytes: Mapping[int, int] = {group: layout.row_bytes for group, layout in layouts.items()}
        self._num_threads = num_threads
        self._others = futures.ThreadPoolExecutor(max(1, num_threads - 1), "lmcache-copy", spread)

    def share(self, work: Callable[[], None]) -> None:
        """See ``EngineCopier``."""
        others = [self._others.submit(work) for _ in range(self._num_threads - 1)]
        try:
            work()
        finally:  # a load has ended only when nothing writes to its blocks any more
            futures.wait(others)
        for other in others:
            other.result()

    def close(self) -> None:
        """See ``EngineCopier``."""
        self._others.shutdown()


class CpuCopier(LoadThreads):
    """KV in host memory. The engine's forward is done when its hooks run, so there is nothing to wait for.

    Loads are shared among threads, chunk by chunk: a request waits for them. Stores are not: the engine
    computes meanwhile.
    """

    def __init__(self, layouts: Mapping[int, Layout], num_threads: int = 1) -> None:
        super().__init__(layouts, num_threads)
        self._groups = {group: _CpuGroup(layout) for group, layout in layouts.items()}

    def fence(self) -> Fence:
        """Nothing to mark."""
        return None

    def wait(self, fence: Fence) -> None:
        """Nothing to wait for."""

    def offer(self) -> TransferOffer:
        """Only memory of a GPU is offered."""
        return TransferOffer()

    def prepare(self, slots: Bytes, ready_rows: int, is_alone: bool = False) -> None:
        """Nothing to prepare."""

    def watch_pins(self, on_change: Callable[[PinStatus], None]) -> None:
        """Copies in host memory need no pinned memory."""

    def load(self, group: int, slot: Bytes, first_block: int, blocks: Sequence[int], fence: Fence) -> None:
        """See ``EngineCopier``."""
        self._groups[group].copy(slot, first_block, blocks, is_load=True)

    def store(self, group: int, slot: Bytes, blocks: Sequence[int], fence: Fence) -> None:
        """See ``EngineCopier``."""
        self._groups[group].copy(slot, 0, blocks, is_load=False)


class _CpuGroup:
    """Copies of one KV group in host memory."""

    def __init__(self, layout: Layout) -> None:
        self._layers: list[Bytes] = [pages.numpy() for pages in layout.pages]
        self._places, self._block_bytes = Places(layout), layout.block_bytes
        can_stream = not (self._places.sizes % streaming.PIECE_BYTES).any() and not any(
            (layer.ctypes.data | layer.strides[0]) % streaming.LINE for layer in self._layers
        )
        self.stream = streaming.make_copy() if can_stream else None
        """None: the pages are not made for it."""

    def copy(self, slot: Bytes, first_block: int, blocks: Sequence[int], *, is_load: bool) -> None:
        if self.stream is not None and not slot.ctypes.data % streaming.LINE:
            in_slot, in_kv, sizes = self._places.of(slot, first_block, blocks)
            to, from_ = (in_kv, in_slot) if is_load else (in_slot, in_kv)
            self.stream(to, from_, sizes)
            return
        ids = self._places.checked(slot, first_block, blocks)
        start, size = first_block * self._block_bytes, len(ids) * self._block_bytes
        rows = slot[start : start + size].reshape(len(ids), -1)
        for layer, at in zip(self._layers, self._places.starts.tolist(), strict=True):
            part = rows[:, at : at + layer.shape[1]]
            if is_load:
                layer[ids] = part
            else:
                part[...] = layer[ids]


def make_copier(layouts: Mapping[int, Layout], num_threads: int | None = None) -> EngineCopier:
    """Choose by where the KV is, as the driver says. Raises ValueError when no copier fits.

    ``layouts`` by KV group; ``num_threads`` of a load; by default 2 where there is more than one core.
    """
    pages = next(iter(layouts.values())).pages[0]
    try:
        device = Device.of(pages.data_ptr())
    except CudaUnavailableError as error:
        if pages.device.type == "cuda":
            raise ValueError(f"KV lies on a GPU that can't be used: {error}") from error
        device = None
    if device is not None:
        from lmcache.engines.core.cuda_copier import CudaCopier  # it stands on this module

        return CudaCopier(layouts, device)
    if pages.device.type == "cpu":
        return CpuCopier(layouts, num_threads or min(2, len(allowed_cores())))
    raise ValueError(f"no copier for KV on a {pages.device.type} device")


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
