"""Memory pools of the LMCache 0.1-0.3 API. The library's own backends use ``TorchArena``."""

from __future__ import annotations

import abc
import math
import threading
from dataclasses import dataclass

import torch

from lmcache.config import LMCacheMemPoolMetadata
from lmcache.storage_backend.mem_pool.torch_arena import TorchArena
from lmcache.storage_backend.tensors import usable_device
from lmcache_store.common.units import ceil_div
from lmcache_store.tiers.memory.allocator import SLOTS_PER_FRAME, FrameAllocator


@dataclass
class KVObj:
    """Memory for one chunk, allocated from a pool."""

    chunk_idx: int
    """Identifier within its pool."""
    size: int
    """Bytes allocated in the pool."""
    data: torch.Tensor
    """Tensor of the chunk's shape and dtype in the pool's memory."""


class BasePool(abc.ABC):
    """A thread-safe pool of memory for chunks."""

    @abc.abstractmethod
    def allocate(self, kv_chunk: torch.Tensor) -> KVObj | None:
        """Allocate memory for a chunk of this shape and dtype, without copying it.

        Returns None if memory is exhausted.
        """

    @abc.abstractmethod
    def free(self, kv_obj: KVObj) -> None:
        """Release memory from ``allocate``. The caller must not use its ``data`` afterwards."""


class LocalPool(BasePool):
    """A pool of ``metadata.max_local_cache_size`` GiB for chunks of any layout.

    Short chunks need less memory. ``size_per_chunk`` is the bytes of a full chunk. ``max_chunk_num`` is the
    number of full chunks that fit, at least one.
    """

    device = "cpu"

    def __init__(self, metadata: LMCacheMemPoolMetadata) -> None:
        self._dtype = metadata.kv_dtype
        self.size_per_chunk = math.prod(metadata.kv_shape) * self._dtype.itemsize
        capacity_bytes = int(metadata.max_local_cache_size * 1024**3)
        self._arena = TorchArena.for_chunks(self.size_per_chunk, capacity_bytes, usable_device(self.device))
        block = 1 << (self._num_slots(self.size_per_chunk) - 1).bit_length()  # chunks are aligned to this
        self.max_chunk_num = self._arena.num_rows // block
        self._lock = threading.Lock()  # protects the attributes below
        self._slots = FrameAllocator(self._arena.num_rows, SLOTS_PER_FRAME)
        self._allocated: set[int] = set()  # rows

    def allocate(self, kv_chunk: torch.Tensor) -> KVObj | None:
        """See BasePool. Raises Exception("Mempool allocation failed…") instead of returning None.

        Raises AssertionError for a chunk that is larger than a full one. Raises TypeError for another dtype,
        because copying into the pool would silently round values.
        """
        num_bytes = kv_chunk.numel() * self._dtype.itemsize
        if kv_chunk.dtype != self._dtype:
            raise TypeError(f"the pool holds {self._dtype}, not {kv_chunk.dtype}: convert the chunk first")
        assert num_bytes <= self.size_per_chunk, f"{tuple(kv_chunk.shape)} is more than a full chunk"
        num_slots = self._num_slots(num_bytes)
        with self._lock:
            row = self._slots.allocate(num_slots, self._slots.num_frames)
            if row is None:
                return self._exhausted()
            self._allocated.add(row)
            first_slot = self._slots.first_slot(row)
        data = self._arena.tensor(first_slot, kv_chunk.shape, self._dtype)
        return KVObj(row, num_slots * self._arena.geometry.slot_bytes, data)

    def free(self, kv_obj: KVObj) -> None:
        """See BasePool. Raises ValueError if the memory is already free."""
        with self._lock:
            if kv_obj.chunk_idx not in self._allocated:
                raise ValueError(f"chunk {kv_obj.chunk_idx} is not allocated: it was freed before")
            self._allocated.remove(kv_obj.chunk_idx)
            self._slots.free(kv_obj.chunk_idx)

    def _num_slots(self, num_bytes: int) -> int:
        return max(1, ceil_div(num_bytes, self._arena.geometry.slot_bytes))

    def _exhausted(self) -> KVObj | None:
        raise Exception("Mempool allocation failed: the pool is exhausted")


class LocalCPUPool(LocalPool):
    """A pool of host memory, which is pinned if CUDA is available."""


class LocalCPUBufferPool(LocalCPUPool):
    """A pool of host memory for chunks in transit. If it is exhausted, ``allocate`` returns None."""

    def _exhausted(self) -> None:
        return None


class LocalGPUPool(LocalPool):
    """A pool of memory of the current CUDA device, or of the host if CUDA is not available."""

    device = "cuda"
