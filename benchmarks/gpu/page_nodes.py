"""The NUMA nodes that pages of a process lie on."""

from __future__ import annotations

import ctypes
import os
import platform
from collections import Counter

import numpy as np
import numpy.typing as npt

_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}  # number of the system call; libc has no wrapper
_SAMPLE_BYTES = 2 << 20


def sampled_nodes(memory: npt.NDArray[np.uint8]) -> Counter[int]:
    """Return how many sampled pages lie on each NUMA node: one page of every 2 MiB, which must have memory.

    Raises OSError if the process may not ask.
    """
    addresses = np.arange(memory.ctypes.data, memory.ctypes.data + memory.nbytes, _SAMPLE_BYTES, np.uint64)
    nodes = np.full(len(addresses), -1, np.int32)
    libc = ctypes.CDLL(None, use_errno=True)
    where = ctypes.c_void_p(addresses.ctypes.data), None, ctypes.c_void_p(nodes.ctypes.data)
    number = _MOVE_PAGES.get(platform.machine(), -1)
    if libc.syscall(number, 0, ctypes.c_ulong(len(addresses)), *where, 0):  # without targets it only asks
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return Counter(nodes.tolist())
