"""Copy whole chunks between KV in device memory and a slot of the arena."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lmcache.engines.core.copier import Bytes, Fence
from lmcache.engines.core.layout import Layout

logger = logging.getLogger(__name__)


class CudaCopier:
    """KV in device memory: gathers a chunk there, one DMA to or from the arena. Not yet verified on a GPU.

    Loads and stores have a side stream and a staging buffer each; every call is a few kernels and one copy.
    """

    def __init__(self, layouts: Mapping[int, Layout]) -> None:
        self._layouts = layouts
        self._device = next(iter(layouts.values())).pages[0].device
        row_bytes = max(layout.row_bytes for layout in layouts.values())
        self._cuda: Any = torch.cuda  # untyped
        self._load_stream, self._store_stream = (self._cuda.Stream(self._device) for _ in range(2))
        self._load_staging, self._store_staging = (
            torch.empty(row_bytes, dtype=torch.uint8, device=self._device) for _ in range(2)
        )
        self._pins = Pins(self._register, self._unregister)

    def fence(self) -> Fence:
        """Record an event on the stream that the engine computes on."""
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._device))
        return event

    def share(self, work: Callable[[], None]) -> None:
        """One thread fills the bus."""
        work()

    def load(self, group: int, slot: Bytes, first_block: int, blocks: Sequence[int], fence: Fence) -> None:
        """See ``EngineCopier``. Kernels before the fence may still read the blocks' old content."""
        self._pins.pin(slot)
        layout = self._layouts[group]
        host = torch.from_numpy(slot)[: layout.row_bytes]
        try:
            with self._cuda.stream(self._load_stream):
                self._load_stream.wait_event(fence)
                ids = torch.tensor(blocks, device=self._device)
                self._load_staging[: layout.row_bytes].copy_(host, non_blocking=True)
                for pages, part in self._staged(layout, self._load_staging):
                    pages.index_copy_(0, ids, part[first_block : first_block + len(blocks)].contiguous())
        finally:  # also a load that failed has ended only when nothing writes to its blocks any more
            self._load_stream.synchronize()

    def store(self, group: int, slot: Bytes, blocks: Sequence[int], fence: Fence) -> None:
        """See ``EngineCopier``."""
        self._pins.pin(slot)
        layout = self._layouts[group]
        host = torch.from_numpy(slot)[: layout.row_bytes]
        try:
            with self._cuda.stream(self._store_stream):
                self._store_stream.wait_event(fence)
                ids = torch.tensor(blocks, device=self._device)
                for pages, part in self._staged(layout, self._store_staging):
                    part.copy_(torch.index_select(pages, 0, ids))
                host.copy_(self._store_staging[: layout.row_bytes], non_blocking=True)
        finally:  # also a store that failed may not write to a slot that is given back
            self._store_stream.synchronize()

    @staticmethod
    def _staged(layout: Layout, staging: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        blocks, start = staging[: layout.row_bytes].view(layout.blocks_per_row, -1), 0
        for pages in layout.pages:
            yield pages, blocks[:, start : (start := start + pages.shape[1])]

    def _register(self, slot: Bytes) -> None:
        with self._cuda.device(self._device):  # else every rank makes a context on the first GPU
            status = int(self._cuda.cudart().cudaHostRegister(slot.ctypes.data, slot.nbytes, 0))
        if status:
            logger.warning("Can't pin a slot of the arena (CUDA error %d): its copies are slow", status)

    def _unregister(self, address: int) -> None:
        with self._cuda.device(self._device):
            self._cuda.cudart().cudaHostUnregister(address)


class Pins:
    """Pins slots on first use: rows become ready one by one, and pinning all would take seconds.

    A new session maps the arena again. What is pinned of the old mapping is unpinned when nothing refers to
    it any more: neither the session nor a copy that goes on.
    """

    def __init__(self, pin: Callable[[Bytes], None], unpin: Callable[[int], None]) -> None:
        """``pin`` takes a slot, ``unpin`` its address."""
        self._pin, self._unpin = pin, unpin
        self._lock = threading.Lock()  # protects against pinning twice
        self._addresses: dict[int, set[int]] = {}  # of pinned slots, by id of their mapping

    def pin(self, slot: Bytes) -> None:
        """Pin a slot, if it is not yet."""
        mapping = slot.base
        with self._lock:
            if id(mapping) not in self._addresses:
                self._addresses[id(mapping)] = set()
                # At exit the device is gone before.
                weakref.finalize(mapping, self._unpin_all, id(mapping)).atexit = False
            addresses = self._addresses[id(mapping)]
            if slot.ctypes.data not in addresses:
                addresses.add(slot.ctypes.data)
                self._pin(slot)

    def _unpin_all(self, mapping: int) -> None:
        """The memory is still mapped. Takes no lock: any thread may come here, also one that pins."""
        for address in self._addresses.pop(mapping):
            self._unpin(address)
