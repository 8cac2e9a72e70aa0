"""Copying between tensors, on the host and on GPUs."""

from __future__ import annotations

import numpy as np
import torch

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # numpy knows no bfloat16


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` into ``target``, of the same shape and dtype, without holding the GIL.

    On the host it is a plain memcpy by this thread: torch would start a team of threads for every piece,
    which costs more than it saves, and stalls as soon as one of its cores is taken.
    """
    width = _SAME_SIZE.get(target.dtype.itemsize)  # None: complex128
    if width and target.device.type == source.device.type == "cpu" and target.dtype == source.dtype:
        np.copyto(target.view(width).numpy(), source.detach().view(width).numpy())
    else:
        target.copy_(source)


def settle(tensor: torch.Tensor) -> None:
    """Wait until this thread's copies from or to a tensor on a GPU are done: until then neither the memory
    that was read may be given to somebody else, nor what was written be shown to one on another stream."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
