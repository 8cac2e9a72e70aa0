"""Work of a GPU that waits until it is told to go on: how copies are made late, on any driver."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lmcache.cuda.driver import Context, Event, Stream


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
