"""Copy whole chunks between the engine's paged KV and a slot of the arena.

A slot holds, layer after layer, the blocks of a chunk in order: ``[layer][block][page bytes]``. One call
moves all blocks of a chunk in one layer, without the GIL; there is no Python loop over blocks.

Why numpy on the CPU. One thread, 64 KiB pages, 32 layers x 16 scattered blocks x 8 chunks (256 MiB),
``ctypes.memmove`` of each piece = 100 % (13-14 GB/s on the machine this was chosen on):

===========================================  ======  ======
call                                         load    store
===========================================  ======  ======
``kv[ids] = slot`` (numpy)                   115 %
``torch.index_copy_``                         81 %
``kv[ids] = slot`` (torch)                    70 %
``np.take(kv, ids, out=slot, mode="clip")``          114 %
``torch.index_select(out=slot)``                     116 %
===========================================  ======  ======

All of them release the GIL. numpy's also stay on the calling thread: torch would start a second team of
OpenMP threads beside the engine's own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from lmcache.engines.vllm.layouts import Layout

logger = logging.getLogger(__name__)

Fence = Any
"""A point of the engine's compute stream: copies wait until the work before it is done. None on the CPU."""

Bytes = npt.NDArray[np.uint8]


class EngineCopier(Protocol):
    """Moves bytes between the engine's KV and one slot; returns when they are there. Thread-safe."""

    def fence(self) -> Fence:
        """Mark the present end of the engine's work; called on the engine's thread."""

    def load(self, slot: Bytes, first_block: int, blocks: Sequence[int], fence: Fence) -> None:
        """Fill ``blocks`` of the KV from the slot's blocks ``first_block`` and following."""

    def store(self, slot: Bytes, blocks: Sequence[int], fence: Fence) -> None:
        """Fill the slot from ``blocks``, which are one full chunk."""


def _by_layer(layers: Iterable[Any], blocks_per_chunk: int, slot: Any) -> Iterator[tuple[Any, Any]]:
    """Pair each layer's pages with its part ``[blocks_per_chunk, page_bytes]`` of a slot."""
    start = 0
    for pages in layers:
        end = start + blocks_per_chunk * pages.shape[1]
        yield pages, slot[start:end].reshape(blocks_per_chunk, pages.shape[1])
        start = end


class CpuCopier:
    """KV in host memory. The engine's forward is done when its hooks run, so there is nothing to wait for."""

    def __init__(self, layout: Layout) -> None:
        """Raises ValueError when a layer's blocks are not adjacent: ``np.take`` would copy it first."""
        self._blocks_per_chunk = layout.blocks_per_chunk
        self._layers: list[Bytes] = [pages.numpy() for pages in layout.pages]
        if not all(layer.flags.c_contiguous for layer in self._layers):
            raise ValueError("the blocks of a layer are not adjacent in host memory")

    def fence(self) -> Fence:
        """Nothing to mark."""
        return None

    def load(self, slot: Bytes, first_block: int, blocks: Sequence[int], fence: Fence) -> None:
        """See ``EngineCopier``."""
        ids = np.asarray(blocks)
        for layer, part in _by_layer(self._layers, self._blocks_per_chunk, slot):
            layer[ids] = part[first_block : first_block + len(ids)]

    def store(self, slot: Bytes, blocks: Sequence[int], fence: Fence) -> None:
        """See ``EngineCopier``."""
        ids = np.asarray(blocks)
        for layer, part in _by_layer(self._layers, self._blocks_per_chunk, slot):
            np.take(layer, ids, axis=0, out=part, mode="clip")  # any other mode would buffer


class CudaCopier:
    """KV in device memory: gathers a chunk there, one DMA to or from the arena. Not yet verified on a GPU.

    Loads and stores have a side stream and a staging buffer each; every call is a few kernels and one copy.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._device = layout.pages[0].device
        chunk_bytes = layout.chunk_bytes
        self._cuda: Any = torch.cuda  # untyped
        self._load_stream, self._store_stream = (self._cuda.Stream(self._device) for _ in range(2))
        self._load_staging, self._store_staging = (
            torch.empty(chunk_bytes, dtype=torch.uint8, device=self._device) for _ in range(2)
        )
        self._lock = threading.Lock()  # protects what is pinned
        self._arena: object = None
        self._pinned_slots: set[int] = set()

    def fence(self) -> Fence:
        """Record an event on the stream that the engine computes on."""
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._device))
        return event

    def load(self, slot: Bytes, first_block: int, blocks: Sequence[int], fence: Fence) -> None:
        """See ``EngineCopier``. Kernels before the fence may still read the blocks' old content."""
        host = self._pinned(slot)
        try:
            with self._cuda.stream(self._load_stream):
                self._load_stream.wait_event(fence)
                ids = torch.tensor(blocks, device=self._device)
                self._load_staging.copy_(host, non_blocking=True)
                for pages, part in self._staged(self._load_staging):
                    pages.index_copy_(0, ids, part[first_block : first_block + len(blocks)])
        finally:  # also a load that failed has ended only when nothing writes to its blocks any more
            self._load_stream.synchronize()

    def store(self, slot: Bytes, blocks: Sequence[int], fence: Fence) -> None:
        """See ``EngineCopier``."""
        host = self._pinned(slot)
        with self._cuda.stream(self._store_stream):
            self._store_stream.wait_event(fence)
            ids = torch.tensor(blocks, device=self._device)
            for pages, part in self._staged(self._store_staging):
                torch.index_select(pages, 0, ids, out=part)
            host.copy_(self._store_staging, non_blocking=True)
        self._store_stream.synchronize()

    def _staged(self, staging: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return _by_layer(self._layout.pages, self._layout.blocks_per_chunk, staging)

    def _pinned(self, slot: Bytes) -> torch.Tensor:
        """Pin the slot on first use: rows become ready one by one, and pinning all would take seconds."""
        host = torch.from_numpy(slot)
        with self._lock:
            if (
                slot.base is not self._arena
            ):  # our reference kept the old mapping alive until it is unpinned here
                for address in self._pinned_slots:
                    self._cuda.cudart().cudaHostUnregister(address)
                self._pinned_slots.clear()
                self._arena = slot.base
            if host.data_ptr() not in self._pinned_slots:
                self._pinned_slots.add(host.data_ptr())
                status = int(self._cuda.cudart().cudaHostRegister(host.data_ptr(), slot.nbytes, 0))
                if status:
                    logger.warning(
                        "Can't pin a slot of the arena (CUDA error %d): its copies are slow", status
                    )
        return host[: self._layout.chunk_bytes]


def make_copier(layout: Layout) -> EngineCopier:
    """Choose by where the KV is. Raises ValueError when no copier fits."""
    kind = layout.pages[0].device.type
    if kind == "cpu":
        return CpuCopier(layout)
    if kind == "cuda":
        return CudaCopier(layout)
    raise ValueError(f"no copier for KV on a {kind} device")
