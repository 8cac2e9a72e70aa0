"""Helpers for tensors on the host and on GPUs: devices by name, copies, and memory for results."""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import threading
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from lmcache.logging import init_logger
from lmcache_store.common import nontemporal

logger = init_logger(__name__)

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # numpy has no bfloat16
_MIN_STREAMED_BYTES = 64 << 10  # for less, the call costs more than it saves
_MIN_POOLED_BYTES = 1 << 20  # for less, torch's own allocator has warm memory
_MAX_POOLED = 4
_POOLED_SHARE = 8


def usable_device(name: str) -> str:
    """Return ``name``, or "cpu" if it is a CUDA device and CUDA is not available.

    Replaces "cuda" by the current device, because the current device differs between threads. Raises
    RuntimeError if ``name`` is not a device.
    """
    device = torch.device(name)
    if device.type != "cuda":
        return name
    if not torch.cuda.is_available():
        _warn_once()
        return "cpu"
    return name if device.index is not None else f"cuda:{torch.cuda.current_device()}"


@functools.cache
def _warn_once() -> None:
    logger.warning("CUDA is not available: KV is stored and returned on the CPU")


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` into ``target``, of the same shape and dtype, without holding the GIL.

    On the host, the calling thread copies, past the processor's caches if possible
    (``lmcache_store.common.nontemporal``). torch would start a team of threads for every piece. The team
    costs more than it saves, and stalls as soon as another program uses one of its cores.
    """
    width = _SAME_SIZE.get(target.dtype.itemsize)  # None: complex128
    if not (width and target.device.type == source.device.type == "cpu" and target.dtype == source.dtype):
        target.copy_(source)
    elif (pieces := _pieces(target, source)) and (stream := _streaming_copy()):
        stream(*pieces)
    else:
        np.copyto(target.view(width).numpy(), source.detach().view(width).numpy())


def _pieces(target: torch.Tensor, source: torch.Tensor) -> tuple[nontemporal.Words, ...] | None:
    """Return addresses and sizes of the parts that are contiguous in both; None if they can't be streamed."""
    if target.shape != source.shape:
        return None  # the source is broadcast
    itemsize = num_bytes = target.dtype.itemsize
    num_outer = target.dim()
    while num_outer and all(t.stride(num_outer - 1) * itemsize == num_bytes for t in (target, source)):
        num_outer -= 1
        num_bytes *= target.shape[num_outer]
    if num_bytes < _MIN_STREAMED_BYTES or num_bytes % nontemporal.PIECE_BYTES:
        return None
    to, from_ = _addresses(target, num_outer), _addresses(source, num_outer)
    return None if (to % nontemporal.LINE).any() else (to, from_, np.full(len(to), num_bytes, np.uint64))


def _addresses(tensor: torch.Tensor, num_outer: int) -> nontemporal.Words:
    """Return the address of each part; the first ``num_outer`` dimensions of ``tensor`` number the parts."""
    places = np.array([tensor.data_ptr()], np.uint64)
    for size, stride in zip(tensor.shape[:num_outer], tensor.stride(), strict=False):
        steps = np.arange(size, dtype=np.uint64) * np.uint64(stride * tensor.dtype.itemsize)
        places = np.add.outer(places, steps).ravel()
    return places


@functools.cache
def _streaming_copy() -> nontemporal.Copy | None:
    return nontemporal.make_copy()


def synchronize(tensor: torch.Tensor) -> None:
    """Wait until this thread's copies from or to a tensor on a GPU are complete.

    Before that, the source memory must not be reused, and other streams must not read the target.
    """
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Create ordinary tensors without gradients, even if the caller is in inference mode.

    Inference tensors could not be changed outside of inference mode.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


class OutputPool:
    """A thread-safe pool of memory for results that the caller owns.

    Fresh memory costs as much as the copy into it, because the kernel clears every page at its first use. The
    pool therefore reuses the memory of a few results, after the caller has released the last tensor over it.
    It retains the memory of at most ``_MAX_POOLED`` results, and at most an eighth of the cache's capacity of
    ``max_cache_gb`` GiB.
    """

    def __init__(self, max_cache_gb: float) -> None:
        self._max_bytes = int(max_cache_gb * 1024**3) // _POOLED_SHARE
        # A finalizer may run in any thread at any point, even inside this class. So no method waits for the
        # lock: if the lock is taken, the pool is not used, and the kernel gets the memory back.
        self._lock = threading.Lock()  # protects _retained
        self._retained: list[mmap.mmap] = []  # the newest is last

    @property
    def num_bytes(self) -> int:
        """Bytes of retained memory."""
        return sum(map(len, tuple(self._retained)))

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        """Return an uninitialized tensor. On a GPU, torch's allocator provides it and retains its memory."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if torch.device(device).type != "cpu" or num_bytes < _MIN_POOLED_BYTES:
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        memory = self._reuse(num_bytes) or _map(num_bytes)
        # Every view of the tensor keeps ``owner`` alive.
        owner = np.frombuffer(memory, np.uint8, num_bytes)
        if len(memory) <= self._max_bytes:
            weakref.finalize(owner, self._retain, memory).atexit = False
        return torch.from_numpy(owner).view(dtype).view(tuple(shape))

    def clear(self) -> None:
        """Return all retained memory to the kernel."""
        with self._lock:
            self._retained.clear()

    def close(self) -> None:
        """Return all retained memory to the kernel, and retain none from now on."""
        self._max_bytes = 0
        self.clear()

    def _retain(self, memory: mmap.mmap) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self._retained.append(memory)
                while len(self._retained) > _MAX_POOLED or self.num_bytes > self._max_bytes:
                    del self._retained[0]
            finally:
                self._lock.release()

    def _reuse(self, num_bytes: int) -> mmap.mmap | None:
        """Take retained memory that is large enough and at most twice as large as needed."""
        if self._lock.acquire(blocking=False):
            try:
                for index, memory in enumerate(self._retained):
                    if num_bytes <= len(memory) <= 2 * num_bytes:
                        return self._retained.pop(index)
            finally:
                self._lock.release()
        return None


def _map(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
