"""An arena whose memory is a tensor's: on the host, pinned where there is CUDA, or on a GPU."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch

from lmcache.logging import init_logger
from lmcache.tiers.memory.allocator import SLOTS_PER_FRAME
from lmcache.tiers.memory.contracts import Geometry
from lmcache.tiers.memory.private import PrivateArena
from lmcache.tiers.memory.slots import SlotTable
from lmcache.tiers.pages import PAGE_BYTES
from lmcache.units import ceil_div, round_up

logger = init_logger(__name__)

_PIN_BYTES = 64 << 20  # at once: as long as the kernel takes to clear these pages, which it must anyway


class TorchArena:
    """``num_slots`` slots for a ``LocalStore`` or a pool; ``tensor(row, …)`` is the memory of one row.

    A row is numbered by its first slot and never crosses a frame (``lmcache.tiers.memory.allocator``). Host
    memory is taken, and pinned when CUDA is available, piece by piece as rows in it are first used; a piece
    that can't be pinned works too, with slower copies. A GPU's memory is taken at once. Raises RuntimeError
    (torch's OutOfMemoryError is one) or MemoryError when there is not that much.
    """

    first_generation = 1
    shared_index = None

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
        """Make an arena in which a full chunk takes a frame, of about ``capacity_bytes``, at least one chunk.

        Slots are whole pages, so that of chunks below 64 KiB a frame holds several.
        """
        slot_bytes = round_up(ceil_div(chunk_bytes, SLOTS_PER_FRAME), PAGE_BYTES)
        num_slots = max(capacity_bytes // slot_bytes, ceil_div(chunk_bytes, slot_bytes))
        return cls(Geometry(slot_bytes, num_columns=1), num_slots, device)

    def tensor(self, row: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the row's memory as a contiguous tensor on ``device``, not the caller's own: it is valid for
        as long as the row is leased or reserved."""
        start = row * self.geometry.slot_bytes
        end = start + math.prod(shape) * dtype.itemsize
        self._pins.pin(start)
        return self._memory[start:end].view(dtype).view(tuple(shape))

    def view(self, row: int, column: int, length: int | None = None) -> memoryview:
        """See ``lmcache.tiers.memory.contracts.Arena``; raises TypeError for memory on a GPU."""
        if self._host is None:
            raise TypeError("memory on a GPU can't be viewed from the host")
        return self._host.view(row, column, length)

    def close(self) -> None:
        """Give the memory back; no tensor of it may be in use any more."""
        self._pins.close()
        del self._memory
        if self._host is not None:
            self._host.close()


class _Pins:
    """Registers host memory with CUDA, in pieces of whole frames: a copy must not cross two of them."""

    def __init__(self, memory: torch.Tensor, frame_bytes: int) -> None:
        self._address, self._num_bytes = memory.data_ptr(), memory.numel()
        self._piece_bytes = round_up(_PIN_BYTES, frame_bytes)
        self._lock = threading.Lock()  # protects what follows
        self._cudart: Any = None  # nothing (more) is pinned
        if memory.device.type == "cpu" and torch.cuda.is_available():
            self._cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._seen: set[int] = set()  # pieces
        self._pinned: list[int] = []  # addresses

    def pin(self, offset: int) -> None:
        """Pin the piece in which ``offset`` lies, if that was not tried yet."""
        piece = offset // self._piece_bytes
        if self._cudart is None or piece in self._seen:
            return
        with self._lock:
            if self._cudart is not None and piece not in self._seen:
                self._seen.add(piece)
                self._pin(piece * self._piece_bytes)

    def close(self) -> None:
        """Give back what was pinned."""
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
            logger.warning("can't pin %d bytes of host memory (CUDA error %d): copies are slow", size, status)
