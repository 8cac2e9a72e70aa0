"""Tensors on the host and on GPUs: devices by name, copies between tensors, memory for results."""

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

from lmcache import streaming
from lmcache.logging import init_logger

logger = init_logger(__name__)

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # numpy knows no bfloat16
_MIN_STREAMED_BYTES = 64 << 10  # below, it costs more to ask than it saves
_MIN_POOLED_BYTES = 1 << 20  # below, torch's own allocator has warm memory
_MAX_POOLED = 4
_POOLED_SHARE = 8


def usable_device(name: str) -> str:
    """Return ``name``, or "cpu" when it is a CUDA device and there is no CUDA.

    "cuda" becomes the current one: every thread has its own idea of that, and we have threads. Raises
    RuntimeError when ``name`` is no device.
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
    logger.warning("CUDA is not available: KV is kept on, and comes back on, the CPU")


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` into ``target``, of the same shape and dtype, without holding the GIL.

    On the host it is a copy by this thread, past the caches where that is possible (``lmcache.streaming``):
    torch would start a team of threads for every piece, which costs more than it saves, and stalls as soon as
    one of its cores is taken.
    """
    width = _SAME_SIZE.get(target.dtype.itemsize)  # None: complex128
    if not (width and target.device.type == source.device.type == "cpu" and target.dtype == source.dtype):
        target.copy_(source)
    elif (pieces := _pieces(target, source)) and (stream := _streaming_copy()):
        stream(*pieces)
    else:
        np.copyto(target.view(width).numpy(), source.detach().view(width).numpy())


def _pieces(target: torch.Tensor, source: torch.Tensor) -> tuple[streaming.Words, ...] | None:
    """Return addresses and sizes of the parts that are contiguous in both; None: they can't be streamed."""
    if target.shape != source.shape:
        return None  # to be spread
    itemsize = num_bytes = target.dtype.itemsize
    num_outer = target.dim()
    while num_outer and all(t.stride(num_outer - 1) * itemsize == num_bytes for t in (target, source)):
        num_outer -= 1
        num_bytes *= target.shape[num_outer]
    if num_bytes < _MIN_STREAMED_BYTES or num_bytes % streaming.PIECE_BYTES:
        return None
    to, from_ = _addresses(target, num_outer), _addresses(source, num_outer)
    return None if (to % streaming.LINE).any() else (to, from_, np.full(len(to), num_bytes, np.uint64))


def _addresses(tensor: torch.Tensor, num_outer: int) -> streaming.Words:
    """Return where each part begins, of which the first dimensions count the parts."""
    places = np.array([tensor.data_ptr()], np.uint64)
    for size, stride in zip(tensor.shape[:num_outer], tensor.stride(), strict=False):
        steps = np.arange(size, dtype=np.uint64) * np.uint64(stride * tensor.dtype.itemsize)
        places = np.add.outer(places, steps).ravel()
    return places


@functools.cache
def _streaming_copy() -> streaming.Copy | None:
    return streaming.make_copy()


def synchronize(tensor: torch.Tensor) -> None:
    """Wait until this thread's copies from or to a tensor on a GPU are done: until then neither the memory
    that was read may be given to somebody else, nor what was written be shown to one on another stream."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Make ordinary tensors whatever mode the caller is in: nobody could change inference tensors outside of
    inference mode, and copies of the engine's tensors need no gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class OutputPool:
    """Memory for results that are the caller's own; any thread may use it.

    Fresh memory costs as much as the copy into it: the kernel clears every page at its first touch. So the
    memory of a few results is used again once the caller has let go of the last tensor over it. Keeps the
    memory of at most ``_MAX_POOLED`` results, and all together at most an
    eighth of the cache that they come from: ``max_cache_gb`` GiB.
    """

    def __init__(self, max_cache_gb: float) -> None:
        self._max_bytes = int(max_cache_gb * 1024**3) // _POOLED_SHARE
        # A finalizer may run at any point of any thread, this class's own code included: who finds the lock
        # taken does without, and the memory goes to the kernel.
        self._lock = threading.Lock()  # protects _kept
        self._kept: list[mmap.mmap] = []  # the newest last

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept."""
        return sum(map(len, tuple(self._kept)))

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        """Return a tensor with undefined contents; memory on the GPU is torch's, which keeps it warm."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if torch.device(device).type != "cpu" or num_bytes < _MIN_POOLED_BYTES:
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        memory = self._reuse(num_bytes) or _map(num_bytes)
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
                while len(self._kept) > _MAX_POOLED or self.num_bytes > self._max_bytes:
                    del self._kept[0]
            finally:
                self._lock.release()

    def _reuse(self, num_bytes: int) -> mmap.mmap | None:
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
