"""An arena whose memory is a tensor: on the host (pinned if CUDA is available), or on a GPU."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch

from lmcache.logging import init_logger
from lmcache_store.common.units import ceil_div, round_up
from lmcache_store.tiers.memory.allocator import SLOTS_PER_FRAME
from lmcache_store.tiers.memory.contracts import Geometry
from lmcache_store.tiers.memory.private import PrivateArena
from lmcache_store.tiers.memory.slots import SlotTable
from lmcache_store.tiers.pages import PAGE_BYTES

logger = init_logger(__name__)

_PIN_BYTES = 64 << 20  # pinned at once; clearing these pages takes as long, and is needed anyway


class TorchArena:
    """An arena of ``num_slots`` slots for a ``LocalStore`` or a pool.

    A row is numbered by its first slot, and never crosses a frame (``lmcache_store.tiers.memory.allocator``).
    Host memory is allocated (and pinned if CUDA is available) piece by piece, when rows are first used. A
    piece that can't be pinned still works, with slower copies. Memory on a GPU is allocated at once.

    Raises MemoryError, or RuntimeError such as torch's OutOfMemoryError, if memory is insufficient.
    """

    first_generation = 1
    shared_index = None
    is_lost = False

    def __init__(self, geometry: Geometry, num_slots: int, device: str = "cpu") -> None:
        self.geometry = geometry
        self.device = torch.device(device)
        self.num_rows = self.ready_rows = num_slots
        num_bytes = num_slots * geometry.slot_bytes
        self._host: PrivateArena | None = None
        if self.device.type == "cpu":
            self._host = PrivateArena(geometry, num_slots)
            self.table = self._host.table
            self._memory = torch.frombuffer(self._host.buffer, dtype=torch.uint8)
        else:
            self.table = SlotTable.blank(1, round_up(num_slots, SLOTS_PER_FRAME))
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self._pins = _Pins(self._memory, geometry.slot_bytes * SLOTS_PER_FRAME)

    @classmethod
    def for_chunks(cls, chunk_bytes: int, capacity_bytes: int, device: str = "cpu") -> TorchArena:
        """Create an arena of about ``capacity_bytes``, for at least one chunk. A full chunk takes one frame.

        Slots are whole pages. If chunks are smaller than 64 KiB, a frame holds several.
        """
        slot_bytes = round_up(ceil_div(chunk_bytes, SLOTS_PER_FRAME), PAGE_BYTES)
        num_slots = max(capacity_bytes // slot_bytes, ceil_div(chunk_bytes, slot_bytes))
        return cls(Geometry(slot_bytes, num_columns=1), num_slots, device)

    def tensor(self, row: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the row's memory as a contiguous tensor on ``device``.

        The arena owns the memory; the tensor is valid while the row is leased or reserved.
        """
        start = row * self.geometry.slot_bytes
        end = start + math.prod(shape) * dtype.itemsize
        self._pins.pin(start)
        return self._memory[start:end].view(dtype).view(tuple(shape))

    def view(self, row: int, column: int, length: int | None = None) -> memoryview:
        """See ``lmcache_store.tiers.memory.contracts.Arena``. Raises TypeError for memory on a GPU."""
        if self._host is None:
            raise TypeError("memory on a GPU has no view on the host")
        return self._host.view(row, column, length)

    def close(self) -> None:
        """Release the memory. No tensor of the arena may be in use any more."""
        self._pins.close()
        del self._memory
        if self._host is not None:
            self._host.close()


class _Pins:
    """Pins host memory in pieces of whole frames, because no copy may cross two pieces."""

    def __init__(self, memory: torch.Tensor, frame_bytes: int) -> None:
        self._address, self._num_bytes = memory.data_ptr(), memory.numel()
        self._piece_bytes = round_up(_PIN_BYTES, frame_bytes)
        self._lock = threading.Lock()  # protects the attributes below
        self._cudart: Any = None  # None: nothing is pinned, now or later
        if memory.device.type == "cpu" and torch.cuda.is_available():
            self._cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._tried: set[int] = set()  # pieces
        self._pinned: list[int] = []  # addresses

    def pin(self, offset: int) -> None:
        """Pin the piece that contains ``offset``, if that was not tried yet."""
        piece = offset // self._piece_bytes
        if self._cudart is None or piece in self._tried:
            return
        with self._lock:
            if self._cudart is not None and piece not in self._tried:
                self._tried.add(piece)
                self._pin(piece * self._piece_bytes)

    def close(self) -> None:
        """Unpin all pieces."""
        with self._lock:
            for address in self._pinned:
                self._cudart.cudaHostUnregister(address)
            self._pinned.clear()
            self._cudart = None

    def _pin(self, start: int) -> None:
        size = min(self._piece_bytes, self._num_bytes - start)
        status = int(self._cudart.cudaHostRegister(self._address + start, size, 0))
        if status == 0:
            self._pinned.append(self._address + start)
        else:
            logger.warning("Can't pin %d bytes of host memory (CUDA error %d): copies are slow", size, status)
