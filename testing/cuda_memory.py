"""Memory of the device and of the host for copies, and work of a GPU that waits until it is told to go on."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from lmcache.cuda.driver import Context, Event, Stream


def allocate(context: Context, content: bytes) -> int:
    """Device memory that holds ``content``."""
    address = int(context.call("cuMemAlloc", len(content)))
    context.call("cuMemcpyHtoD", address, content, len(content))
    return address


def content(context: Context, address: int, num_bytes: int) -> bytes:
    """What device memory holds."""
    out = np.zeros(num_bytes, np.uint8)
    context.call("cuMemcpyDtoH", out.ctypes.data, address, num_bytes)
    return out.tobytes()


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


class Gate:
    """A word of device memory that streams wait for."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._word = int(context.call("cuMemAlloc", 4))
        context.call("cuMemsetD8", self._word, 0, 4)
        self._opener = Stream(context)
        self._passed: list[Event] = []

    def hold(self, stream: Stream) -> None:
        """Later work of ``stream`` begins after ``open``."""
        self._context.call("cuStreamWaitValue32", stream.raw, self._word, 1, 0)
        passed = Event(self._context)
        passed.record(stream)
        self._passed.append(passed)

    def open(self) -> None:
        self._context.call("cuStreamWriteValue32", self._opener.raw, self._word, 1, 0)

    def close(self) -> None:
        for passed in self._passed:  # until then the word is looked at
            passed.synchronize()
            passed.close()
        self._opener.synchronize()
        self._opener.close()
        self._context.call("cuMemFree", self._word)


@contextlib.contextmanager
def gate(context: Context) -> Iterator[Gate]:
    """Opened at the end, whatever happens: nothing that waits for it outlives it."""
    gate = Gate(context)
    try:
        yield gate
    finally:
        gate.open()
        gate.close()
