"""Pinned memory of the host, so that copies need no staging and don't hold up who asks for them."""

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
"""Registering takes some 0.1 s per GiB: between two extents the thread can be told to stop."""


class Pins:
    """Registers a stretch of memory extent by extent, in a thread of its own, as it becomes ready.

    Copies need not wait for it: what is not registered yet, or can't be, is copied more slowly. Close it
    before the memory is unmapped.
    """

    def __init__(
        self,
        context: Context,
        address: int,
        num_bytes: int,
        extent_bytes: int = EXTENT_BYTES,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """``extent_bytes`` is a multiple of the page.

        ``on_change`` is called without a lock when the status changed: after a failure, and when the last
        extent that is ready has been tried. It must not block.
        """
        self._context = context
        self._on_change = on_change
        begin = -(-address // PAGE_BYTES) * PAGE_BYTES
        end = (address + num_bytes) // PAGE_BYTES * PAGE_BYTES
        self._begin, self._end = address, end
        bounds = [*range(begin, end, extent_bytes), end] if begin < end else []
        self.edges: Words = np.array(bounds, np.uint64)
        """Addresses that no copied piece may lie across; always the same."""
        self.failures = 0
        """Extents that could not be registered."""
        self.problem = ""
        """Why the first of them could not; empty: none failed."""
        self.pinned_bytes = 0
        self._changed = threading.Condition()  # protects what follows
        self._ready = address
        self._pinned: dict[int, int] = {}  # first address to end, of extents
        self._refused: set[int] = set()
        self._under_way = 0  # the end of the extent that is being registered
        self._num_uses = 0
        self._is_shut = False  # for uses that begin
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def set_ready(self, num_bytes: int) -> None:
        """The first so many bytes may be touched now; returns at once where it is more than before.

        Where it is less, nothing may use what lies beyond any more, and none of it is registered when this
        returns. Raises CudaError when it is, for all that is known.
        """
        with self._changed:
            self._ready = self._begin + num_bytes
            self._changed.wait_for(lambda: self._under_way <= self._ready)
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
        """What is pinned now, and what could not be."""
        return PinStatus(self.pinned_bytes, self.failures, self.problem)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Hold this around copies: what is ready, and registered, stays so meanwhile."""
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
        """Is everything that is ready registered, or known to be refused, within ``timeout`` seconds?"""
        with self._changed:
            return self._changed.wait_for(lambda: next(self._wanted(), None) is None, timeout)

    def close(self) -> None:
        """Unregister everything; waits for the extent that is being registered.

        From any thread, as a finalizer comes: also from that which registers, which then ends by itself.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join()
        with self._changed:
            for start in list(self._pinned):
                with contextlib.suppress(CudaError):  # of a broken context: the process's end does it
                    self._unpin(start)

    def _unpin_one(self) -> bool:
        """Unregister the last extent if some of it is not ready any more; was there one?"""
        with self._changed:
            start = max((start for start, end in self._pinned.items() if end > self._ready), default=None)
            if start is None:
                return False
            try:
                self._is_shut = start < self._ready  # copies may use its head
                self._changed.wait_for(lambda: not (self._is_shut and self._num_uses))
                self._unpin(start)
            finally:
                self._is_shut = False
                self._changed.notify_all()
            return True

    def _wanted(self) -> Iterator[tuple[int, int]]:
        """Extents that are to be registered next."""
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
                self._under_way = end
            is_pinned = self._register(start, end - start)
            with self._changed:
                self._under_way = 0
                if is_pinned:
                    self._pinned[start] = end
                    self.pinned_bytes += end - start
                    if end > self._ready or self._is_closed:
                        with contextlib.suppress(CudaError):  # whoever wants it so tries again
                            self._unpin(start)
                else:
                    self._refused.add(start)
                    self.failures += 1
                is_news = not is_pinned or next(self._wanted(), None) is None
                self._changed.notify_all()
            if is_news:
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
