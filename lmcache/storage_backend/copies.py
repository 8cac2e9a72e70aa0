"""Copying between tensors, on the host and on GPUs."""

from __future__ import annotations

import functools

import numpy as np
import torch

from lmcache import streaming

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # numpy knows no bfloat16
_MIN_STREAMED_BYTES = 64 << 10  # below, it costs more to ask than it saves


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
    return None if (to % streaming.ALIGNMENT).any() else (to, from_, np.full(len(to), num_bytes, np.uint64))


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


def settle(tensor: torch.Tensor) -> None:
    """Wait until this thread's copies from or to a tensor on a GPU are done: until then neither the memory
    that was read may be given to somebody else, nor what was written be shown to one on another stream."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
