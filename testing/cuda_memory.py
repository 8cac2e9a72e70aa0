"""Device and host memory for copies, and a gate that holds back work of a GPU."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from lmcache_client.cuda.driver import GpuContext, GpuEvent, GpuStream


def allocate(context: GpuContext, content: bytes) -> int:
    """Allocate device memory with this content."""
    address = int(context.call("cuMemAlloc", len(content)))
    context.call("cuMemcpyHtoD", address, content, len(content))
    return address


def content(context: GpuContext, address: int, num_bytes: int) -> bytes:
    """Content of device memory."""
    out = np.zeros(num_bytes, np.uint8)
    context.call("cuMemcpyDtoH", out.ctypes.data, address, num_bytes)
    return out.tobytes()


def pages(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed memory that starts at a page boundary."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


@contextlib.contextmanager
def pinned(context: GpuContext, num_bytes: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Zeroed memory that is registered inside the context."""
    array = pages(num_bytes)
    context.call("cuMemHostRegister", array.ctypes.data, num_bytes, 0)
    try:
        yield array
    finally:
        context.call("cuMemHostUnregister", array.ctypes.data)


class Gate:
    """A word of device memory on which streams wait."""

    def __init__(self, context: GpuContext) -> None:
        self._context = context
        self._word = int(context.call("cuMemAlloc", 4))
        context.call("cuMemsetD8", self._word, 0, 4)
        self._opener = GpuStream(context)
        self._waits: list[GpuEvent] = []

    def hold(self, stream: GpuStream) -> None:
        """Hold back later work of ``stream`` until ``open``."""
        self._context.call("cuStreamWaitValue32", stream.raw, self._word, 1, 0)
        wait_ended = GpuEvent(self._context)
        wait_ended.record(stream)
        self._waits.append(wait_ended)

    def open(self) -> None:
        self._context.call("cuStreamWriteValue32", self._opener.raw, self._word, 1, 0)

    def close(self) -> None:
        for wait_ended in self._waits:  # streams read the word until then
            wait_ended.synchronize()
            wait_ended.close()
        self._opener.synchronize()
        self._opener.close()
        self._context.call("cuMemFree", self._word)


@contextlib.contextmanager
def gate(context: GpuContext) -> Iterator[Gate]:
    """A gate that is always opened at the end, so that no waiting work outlives it."""
    gate = Gate(context)
    try:
        yield gate
    finally:
        gate.open()
        gate.close()
