"""Copies whole chunks between the engine's paged KV and the arena: the contract, and host memory.

The arena is the file in shared memory that holds the cache. A **row** of it is one chunk of one KV group. A
**slot** is the part of a row that belongs to this rank.

A slot holds the last blocks of its chunk in order, each with its layers: ``[block][layer][page bytes]``. A
page is one layer's part of a block. If the engine uses vLLM's KV layout ``BLHNC``, it stores all layers of a
block together. A block is then one run of bytes on both sides.

One call copies all blocks of a chunk, or of several, without the GIL. There is no Python loop over blocks.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_client.core.layout import Layout
from lmcache_client.cuda.pin_status import PinStatus
from lmcache_client.rpc.hello import TransferOffer
from lmcache_store.common import nontemporal

Fence = Any
"""A point in the engine's compute stream: copies wait for the work before it. None for KV in host memory."""

STAGING_GROUP = -1
"""Number that stands for blocks outside the engine's KV, to which a copier may load rows. It is no KV group:
the sidecar never learns of these blocks."""

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]


class RowLoad(NamedTuple):
    """Blocks of the engine's KV to fill from one slot."""

    group: int
    slot: Bytes
    first_block: int
    """Position in the slot of the first block's bytes, in blocks."""
    blocks: Sequence[int]


class Places:
    """Addresses of the pages of a KV group's blocks, in the engine's KV and in a slot."""

    def __init__(self, layout: Layout) -> None:
        self._num_blocks = len(layout.pages[0])
        self._blocks_per_row, self._row_bytes = layout.blocks_per_row, layout.row_bytes
        self._bases = np.array([pages.data_ptr() for pages in layout.pages], np.uint64)
        self._strides = np.array([pages.stride(0) for pages in layout.pages], np.uint64)
        self.sizes = np.array([pages.shape[1] for pages in layout.pages], np.uint64)
        self.starts = np.cumsum(self.sizes) - self.sizes
        """Offset of each layer within a block of a slot, in bytes."""
        # A request waits while the addresses of its pages are computed. So values that are the same for every
        # row are computed once. All callers share the sizes, which are therefore read-only.
        self._offsets = np.arange(0, self._row_bytes, layout.block_bytes, np.uint64)[:, None] + self.starts
        self._row_sizes = np.frombuffer(np.tile(self.sizes, self._blocks_per_row).tobytes(), np.uint64)

    def of(
        self, slot: Bytes, first_block: int, blocks: Sequence[int]
    ) -> tuple[nontemporal.Words, nontemporal.Words, nontemporal.Words]:
        """Return (addresses in the slot, addresses in the KV, bytes) of each page, block after block.

        Raises ValueError if a page is not inside both. Addresses are not checked again later.
        """
        ids = self.checked(slot, first_block, blocks).astype(np.uint64)[:, None]
        in_slot = self._offsets[first_block : first_block + len(ids)] + np.uint64(slot.ctypes.data)
        in_kv = ids * self._strides + self._bases
        return in_slot.ravel(), in_kv.ravel(), self._row_sizes[: in_kv.size]

    def checked(self, slot: Bytes, first_block: int, blocks: Sequence[int]) -> Ids:
        """Return the blocks' numbers as an array. Raises ValueError if one is out of range."""
        lowest, highest = min(blocks), max(blocks)
        if not 0 <= lowest <= highest < self._num_blocks:
            raise ValueError(f"blocks {lowest} to {highest} are out of range: the KV has {self._num_blocks}")
        if not 0 <= first_block <= self._blocks_per_row - len(blocks) or self._row_bytes > slot.nbytes:
            raise ValueError("the blocks exceed the slot")
        return np.array(blocks, np.int64)


class EngineCopier(abc.ABC):
    """Copies bytes between the engine's KV and one slot, and returns when they have arrived. Thread-safe.

    By default, a copier is one for host memory. It has no fence: an engine on CPUs has finished its forward
    pass when it calls the connector.
    """

    batch_bytes = 0
    """Bytes that one call of ``load`` should copy. It copies at least one row."""

    def __init__(self, layouts: Mapping[int, Layout], num_threads: int) -> None:
        """``num_threads``: threads that share the copies of a load, including the one that began it."""
        self.row_bytes: Mapping[int, int] = {group: layout.row_bytes for group, layout in layouts.items()}
        """Bytes of this rank's part of one row, by KV group."""
        self._num_threads = num_threads
        self._helpers = futures.ThreadPoolExecutor(max(1, num_threads - 1), "lmcache-copy", use_all_cores)

    def fence(self) -> Fence:
        """Mark the present end of the engine's work. Must be called on the engine's thread."""
        return None

    def wait(self, fence: Fence) -> None:  # noqa: B027 - optional
        """Return when the engine's work before the fence is done."""

    def offer(self) -> TransferOffer:
        """Describe where the KV is, so that the sidecar can copy new KV into the arena for the engine.

        The offer of host memory is empty.
        """
        return TransferOffer()

    def prepare(self, slots: Bytes, ready_rows: int, is_alone: bool = False) -> None:  # noqa: B027 - optional
        """Prepare copies from and to the first ``ready_rows`` slots of a mapping of this rank's slots.

        Only these slots have memory. The others must not be accessed from now on.

        Args:
            slots: the mapping, ``[num_rows, slot_bytes]``.
            ready_rows: number of slots with memory.
            is_alone: no copy from or to an older mapping is running.

        Raises:
            CudaError: a slot without memory may still be pinned for a device.
        """

    def watch_pins(self, on_change: Callable[[PinStatus], None]) -> None:  # noqa: B027 - optional
        """Call ``on_change`` now and, from any thread, whenever the pinned part of the arena changes.

        ``on_change`` must not block. It is never called if copies need no pinned memory.
        """

    def share(self, work: Callable[[], None]) -> None:
        """Call ``work`` once on each thread of a load. Return when all calls have ended.

        The calls divide the copies among themselves.
        """
        helpers = [self._helpers.submit(work) for _ in range(self._num_threads - 1)]
        try:
            work()
        finally:  # a load has ended only when no thread writes to its blocks
            futures.wait(helpers)
        for helper in helpers:
            helper.result()

    @abc.abstractmethod
    def load(self, rows: Sequence[RowLoad], fence: Fence) -> None:
        """Fill blocks from slots.

        Between two calls, a thread waits for the GIL: for up to 5 ms if the engine computes in Python.
        """

    @abc.abstractmethod
    def store(self, group: int, slot: Bytes, blocks: Sequence[int], fence: Fence) -> None:
        """Fill the slot from ``blocks``, which are one full row of a KV group."""

    def close(self) -> None:
        """Release all resources. No copy may be running, or begin later."""
        self._helpers.shutdown()


class CpuCopier(EngineCopier):
    """Copies KV in host memory.

    Several threads share a load, because a request waits for it. One thread copies a store, because the
    engine computes meanwhile.
    """

    batch_bytes = 4 << 20
    """The copies take less than 1 ms."""

    def __init__(self, layouts: Mapping[int, Layout], num_threads: int = 1) -> None:
        super().__init__(layouts, num_threads)
        self._groups = {group: _CpuGroup(layout) for group, layout in layouts.items()}

    def load(self, rows: Sequence[RowLoad], fence: Fence) -> None:
        """See ``EngineCopier``."""
        for group, of_group in itertools.groupby(rows, lambda row: row.group):
            self._groups[group].load(list(of_group))

    def store(self, group: int, slot: Bytes, blocks: Sequence[int], fence: Fence) -> None:
        """See ``EngineCopier``."""
        self._groups[group].copy(slot, 0, blocks, is_load=False)


class _CpuGroup:
    """Copies of one KV group in host memory."""

    def __init__(self, layout: Layout) -> None:
        self._layers: list[Bytes] = [pages.numpy() for pages in layout.pages]
        self._places, self._block_bytes = Places(layout), layout.block_bytes
        can_stream = not (self._places.sizes % nontemporal.PIECE_BYTES).any() and not any(
            (layer.ctypes.data | layer.strides[0]) % nontemporal.LINE for layer in self._layers
        )
        self.stream = nontemporal.make_copy() if can_stream else None
        """Copies that bypass the processor's caches; None if the pages are not aligned for them."""

    def load(self, rows: Sequence[RowLoad]) -> None:
        if self.stream is None or any(row.slot.ctypes.data % nontemporal.LINE for row in rows):
            for row in rows:
                self.copy(row.slot, row.first_block, row.blocks, is_load=True)
            return
        places = [self._places.of(row.slot, row.first_block, row.blocks) for row in rows]
        in_slots, in_kv, sizes = (np.concatenate(words) for words in zip(*places, strict=True))
        self.stream(in_kv, in_slots, sizes)

    def copy(self, slot: Bytes, first_block: int, blocks: Sequence[int], *, is_load: bool) -> None:
        if self.stream is not None and not slot.ctypes.data % nontemporal.LINE:
            in_slot, in_kv, sizes = self._places.of(slot, first_block, blocks)
            targets, sources = (in_kv, in_slot) if is_load else (in_slot, in_kv)
            self.stream(targets, sources, sizes)
            return
        ids = self._places.checked(slot, first_block, blocks)
        start, size = first_block * self._block_bytes, len(ids) * self._block_bytes
        rows = slot[start : start + size].reshape(len(ids), -1)
        for layer, offset in zip(self._layers, self._places.starts.tolist(), strict=True):
            part = rows[:, offset : offset + layer.shape[1]]
            if is_load:
                layer[ids] = part
            else:
                part[...] = layer[ids]


def allowed_cores() -> set[int]:
    """Return the cores on which copies may run, including cores that the engine does not compute on.

    vLLM binds the thread that starts the copy threads to one core, and they inherit that. Its parent process
    is not bound.
    """
    cores = os.sched_getaffinity(0)
    try:
        return cores | os.sched_getaffinity(os.getppid())
    except OSError:  # the parent is outside this container, or has ended
        return cores


def use_all_cores() -> None:
    """Let the calling thread run on all allowed cores."""
    with contextlib.suppress(OSError):  # a core may no longer be allowed: the thread stays on its core
        os.sched_setaffinity(0, allowed_cores())
