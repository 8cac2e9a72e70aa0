"""Memory for results that are the caller's own.

Fresh memory costs as much as the copy into it: the kernel clears every page at its first touch. So the memory
of a few results is used again once the caller has let go of the last tensor over it.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import torch

_MIN_BYTES = 1 << 20  # below, torch's own allocator has warm memory
_MAX_KEPT = 4
_SHARE = 8


class OutputPool:
    """Any thread may use it. Keeps the memory of at most ``_MAX_KEPT`` results, and all together at most an
    eighth of the cache that they come from: ``max_cache_gb`` GiB."""

    def __init__(self, max_cache_gb: float) -> None:
        self._max_bytes = int(max_cache_gb * 1024**3) // _SHARE
        # A finalizer may run at any point of any thread, this class's own code included: who finds the lock
        # taken does without, and the memory goes to the kernel.
        self._lock = threading.Lock()  # protects _kept
        self._kept: list[mmap.mmap] = []  # the youngest last

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept."""
        return sum(map(len, tuple(self._kept)))

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        """Return a tensor with undefined contents; memory on the GPU is torch's, which keeps it warm."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if torch.device(device).type != "cpu" or num_bytes < _MIN_BYTES:
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        memory = self._take(num_bytes) or _map(num_bytes)
        # Every view of the tensor keeps ``owner`` alive.
        owner = np.frombuffer(memory, np.uint8, num_bytes)
        if len(memory) <= self._max_bytes:
            weakref.finalize(owner, self._keep, memory).atexit = False
        return torch.from_numpy(owner).view(dtype).view(tuple(shape))

    def clear(self) -> None:
        """Give what is kept back to the kernel."""
        with self._lock:
            self._kept.clear()

    def close(self) -> None:
        """Give what is kept back to the kernel, and keep nothing any more."""
        self._max_bytes = 0
        self.clear()

    def _keep(self, memory: mmap.mmap) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self._kept.append(memory)
                while len(self._kept) > _MAX_KEPT or self.num_bytes > self._max_bytes:
                    del self._kept[0]
            finally:
                self._lock.release()

    def _take(self, num_bytes: int) -> mmap.mmap | None:
        """Take memory that is large enough and at most half wasted."""
        if self._lock.acquire(blocking=False):
            try:
                for index, memory in enumerate(self._kept):
                    if num_bytes <= len(memory) <= 2 * num_bytes:
                        return self._kept.pop(index)
            finally:
                self._lock.release()
        return None


def _map(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
