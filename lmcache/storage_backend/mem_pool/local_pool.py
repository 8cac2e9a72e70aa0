"""Pools of chunk-sized memory: of the LMCache 0.1-0.3 API; our own backends stand on ``TorchArena``."""

from __future__ import annotations

import abc
import math
import threading
from dataclasses import dataclass

import torch

from lmcache.config import LMCacheMemPoolMetadata
from lmcache.storage_backend.mem_pool.torch_arena import TorchArena
from lmcache.storage_backend.tensors import usable_device
from lmcache.tiers.memory.allocator import SLOTS_PER_FRAME, FrameAllocator
from lmcache.units import ceil_div


@dataclass
class KVObj:
    """Memory for one chunk, taken from a pool."""

    chunk_idx: int
    """Names it within its pool."""
    size: int
    """Bytes that it takes of the pool."""
    data: torch.Tensor
    """Of the chunk's shape and dtype, over the pool's memory."""


class BasePool(abc.ABC):
    """Memory for chunks; thread-safe."""

    @abc.abstractmethod
    def allocate(self, kv_chunk: torch.Tensor) -> KVObj | None:
        """Take memory for a chunk of this shape and dtype; nothing is copied. None: none is left."""

    @abc.abstractmethod
    def free(self, kv_obj: KVObj) -> None:
        """Give back what ``allocate`` gave; its ``data`` must not be used any more."""


class LocalPool(BasePool):
    """Chunks of any layout, short ones taking only what they need, in ``metadata.max_local_cache_size`` GiB.

    ``size_per_chunk`` is the bytes of a full chunk, ``max_chunk_num`` how many of those fit (at least one).
    """

    device = "cpu"

    def __init__(self, metadata: LMCacheMemPoolMetadata) -> None:
        self._dtype = metadata.kv_dtype
        self.size_per_chunk = math.prod(metadata.kv_shape) * self._dtype.itemsize
        capacity_bytes = int(metadata.max_local_cache_size * 1024**3)
        self._arena = TorchArena.for_chunks(self.size_per_chunk, capacity_bytes, usable_device(self.device))
        block = 1 << (self._num_slots(self.size_per_chunk) - 1).bit_length()  # they begin at powers of two
        self.max_chunk_num = self._arena.num_rows // block
        self._lock = threading.Lock()  # protects what follows
        self._slots = FrameAllocator(self._arena.num_rows, SLOTS_PER_FRAME)
        self._taken: set[int] = set()  # rows

    def allocate(self, kv_chunk: torch.Tensor) -> KVObj | None:
        """See BasePool. A chunk that is larger than a full one is an AssertionError; one of another dtype a
        TypeError, since copying into the pool would round it silently.

        Raises Exception("Mempool allocation failed…") instead of returning None.
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
            self._taken.add(row)
            first_slot = self._slots.first_slot(row)
        data = self._arena.tensor(first_slot, kv_chunk.shape, self._dtype)
        return KVObj(row, num_slots * self._arena.geometry.slot_bytes, data)

    def free(self, kv_obj: KVObj) -> None:
        """See BasePool; raises ValueError for what is free already."""
        with self._lock:
            if kv_obj.chunk_idx not in self._taken:
                raise ValueError(f"chunk {kv_obj.chunk_idx} is not taken")
            self._taken.remove(kv_obj.chunk_idx)
            self._slots.free(kv_obj.chunk_idx)

    def _num_slots(self, num_bytes: int) -> int:
        return max(1, ceil_div(num_bytes, self._arena.geometry.slot_bytes))

    def _exhausted(self) -> KVObj | None:
        raise Exception("Mempool allocation failed: the pool is exhausted")


class LocalCPUPool(LocalPool):
    """Host memory, pinned where CUDA is available."""


class LocalCPUBufferPool(LocalCPUPool):
    """Host memory for chunks on their way: exhaustion is a value."""

    def _exhausted(self) -> None:
        return None


class LocalGPUPool(LocalPool):
    """Memory of the current CUDA device, or of the host where there is none."""

    device = "cuda"
