"""Memory of the host for copies."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from lmcache.cuda.driver import Context


def pages(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Blank memory that begins with a page."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


@contextlib.contextmanager
def pinned(context: Context, num_bytes: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Blank memory that is registered meanwhile."""
    array = pages(num_bytes)
    context.call("cuMemHostRegister", array.ctypes.data, num_bytes, 0)
    try:
        yield array
    finally:
        context.call("cuMemHostUnregister", array.ctypes.data)
