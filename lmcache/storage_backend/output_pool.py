"""Memory for results that are the caller's own.

Fresh memory costs as much as the copy into it: the kernel clears every page at its first touch. So the memory
of a few results is used again once the caller has let go of the last tensor over it.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

_MIN_BYTES = 1 << 20  # below, torch's own allocator has warm memory
_MAX_BYTES = 1 << 30  # a larger result's memory goes back to the kernel
_MAX_KEPT = 4


class OutputPool:
    """Any thread may use it. Keeps the memory of at most ``_MAX_KEPT`` results of ``_MAX_BYTES`` each."""

    def __init__(self) -> None:
        # A finalizer may run at any point of any thread, this class's own code included: there is no lock,
        # only operations of deque that are atomic.
        self._kept: deque[mmap.mmap] = deque(maxlen=_MAX_KEPT)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        """Return a tensor with undefined contents; memory on the GPU is torch's, which keeps it warm."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if torch.device(device).type != "cpu" or num_bytes < _MIN_BYTES:
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        memory = self._take(num_bytes) or _map(num_bytes)
        # Every view of the tensor keeps ``owner`` alive.
        owner = np.frombuffer(memory, np.uint8, num_bytes)
        if len(memory) <= _MAX_BYTES:
            weakref.finalize(owner, self._kept.append, memory).atexit = False
        return torch.from_numpy(owner).view(dtype).view(tuple(shape))

    def clear(self) -> None:
        """Give what is kept back to the kernel."""
        self._kept.clear()

    def _take(self, num_bytes: int) -> mmap.mmap | None:
        """Take memory that is large enough and at most half wasted."""
        for _ in range(len(self._kept)):
            try:
                memory = self._kept.pop()
            except IndexError:  # another thread took it
                break
            if num_bytes <= len(memory) <= 2 * num_bytes:
                return memory
            self._kept.appendleft(memory)
        return None


def _map(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
