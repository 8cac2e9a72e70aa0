"""Pins host memory, so that the driver copies without a staging buffer and without blocking the caller."""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import threading
from collections.abc import Callable, Iterator

import numpy as np

from lmcache.cuda.copies import Words
from lmcache.cuda.driver import Context
from lmcache.cuda.errors import CudaError
from lmcache.cuda.pin_status import PinStatus

logger = logging.getLogger(__name__)

PAGE_BYTES = mmap.PAGESIZE  # 64 KiB on some hosts
EXTENT_BYTES = 256 << 20
"""Default bytes of a registration, which takes about 0.1 s per GiB. The thread can stop between extents."""


class Pins:
    """Registers a range of memory with CUDA extent by extent as it becomes ready, on a thread of its own.

    Copies need not wait: memory that is not registered is copied more slowly. Close the pins before the
    memory is unmapped.
    """

    def __init__(
        self,
        context: Context,
        address: int,
        num_bytes: int,
        extent_bytes: int = EXTENT_BYTES,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """``extent_bytes``: a multiple of the page size.

        ``on_change``: called without a lock when the status has changed, that is after a failure, and when
        the last ready extent has been tried. It must not block.
        """
        self._context = context
        self._on_change = on_change
        begin = -(-address // PAGE_BYTES) * PAGE_BYTES
        end = (address + num_bytes) // PAGE_BYTES * PAGE_BYTES
        self._begin, self._end = address, end
        bounds = [*range(begin, end, extent_bytes), end] if begin < end else []
        self.edges: Words = np.array(bounds, np.uint64)
        """Addresses of all extents' edges, ascending. No copied piece may cross an edge."""
        self.failures = 0
        """Number of extents that could not be registered."""
        self.problem = ""
        """Error of the first failed registration; empty if none failed."""
        self.pinned_bytes = 0
        self._changed = threading.Condition()  # protects the fields below
        self._ready = address  # end of the ready memory
        self._pinned: dict[int, int] = {}  # first address -> end, of registered extents
        self._refused: set[int] = set()
        self._registering_end = 0  # end of the extent that is being registered; 0: none
        self._num_uses = 0
        self._is_shut = False  # True: new uses must wait
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def set_ready(self, num_bytes: int) -> None:
        """Declare the first ``num_bytes`` bytes as ready. Returns at once if this is more than before.

        If it is less, the caller must no longer use the rest, and no part of the rest is registered on
        return. Raises CudaError if a part may still be registered.
        """
        with self._changed:
            self._ready = self._begin + num_bytes
            self._changed.wait_for(lambda: self._registering_end <= self._ready)
            self._changed.notify_all()
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._work, name="lmcache-pin", daemon=True)
                self._thread.start()

        has_unpinned = False
        while self._unpin_one():
            has_unpinned = True
        if has_unpinned:
            self._on_change()

    @property
    def status(self) -> PinStatus:
        """The pinned bytes now, and all failures so far."""
        return PinStatus(self.pinned_bytes, self.failures, self.problem)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Hold this around copies, so that no registered ready memory is unregistered meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_shut)
            self._num_uses += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_uses -= 1
                self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until every ready extent is registered or refused. Returns False after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: next(self._wanted(), None) is None, timeout)

    def close(self) -> None:
        """Unregister all extents. Waits for the extent that is being registered.

        A finalizer may call this on any thread, even on the registering thread, which then ends by itself.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join()
        with self._changed:
            for start in list(self._pinned):
                with contextlib.suppress(CudaError):  # a broken context: the end of the process unregisters
                    self._unpin(start)

    def _unpin_one(self) -> bool:
        """Unregister the last extent that is no longer completely ready. Return False if there is none."""
        with self._changed:
            start = max((start for start, end in self._pinned.items() if end > self._ready), default=None)
            if start is None:
                return False
            try:
                self._is_shut = start < self._ready  # copies may use the ready part of the extent
                self._changed.wait_for(lambda: not (self._is_shut and self._num_uses))
                self._unpin(start)
            finally:
                self._is_shut = False
                self._changed.notify_all()
            return True

    def _wanted(self) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of the extents that must still be registered, in order."""
        bounds = self.edges.tolist()
        for start, end in itertools.pairwise(bounds):
            if end <= self._ready and start not in self._pinned and start not in self._refused:
                yield start, end

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or next(self._wanted(), None) is not None)
                if self._is_closed:
                    return
                start, end = next(self._wanted())
                self._registering_end = end
            is_pinned = self._register(start, end - start)
            with self._changed:
                self._registering_end = 0
                if is_pinned:
                    self._pinned[start] = end
                    self.pinned_bytes += end - start
                    if end > self._ready or self._is_closed:
                        with contextlib.suppress(CudaError):  # ``set_ready`` or ``close`` tries again
                            self._unpin(start)
                else:
                    self._refused.add(start)
                    self.failures += 1
                has_changed = not is_pinned or next(self._wanted(), None) is None
                self._changed.notify_all()
            if has_changed:
                self._on_change()

    def _register(self, start: int, num_bytes: int) -> bool:
        try:
            self._context.call("cuMemHostRegister", start, num_bytes, 0)
        except CudaError as error:
            logger.warning("Can't pin %d MiB of the arena: its copies are slow: %s", num_bytes >> 20, error)
            self.problem = self.problem or str(error)
            return False
        return True

    def _unpin(self, start: int) -> None:
        self._context.call("cuMemHostUnregister", start)
        self.pinned_bytes -= self._pinned.pop(start) - start
