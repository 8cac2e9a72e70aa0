"""Pins host memory, so that the driver copies without a staging buffer and without blocking the caller.

A registration is valid in one process. The engine pins the memory of its loads, which only the engine makes.
The sidecar's reader pins the memory of stores, once for all engines that share it. If the reader can't copy,
the engine stores too, and needs no other pins.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from lmcache_client.cuda.driver import GpuContext
from lmcache_client.cuda.errors import CudaError
from lmcache_client.cuda.pin_status import PinStatus
from lmcache_store.common.nontemporal import Words

logger = logging.getLogger(__name__)

PAGE_BYTES = mmap.PAGESIZE  # 64 KiB on some hosts
EXTENT_BYTES = 64 << 20
"""Default bytes of a registration, which takes about 0.1 s per GiB. Other calls may wait for it."""


class Pins:
    """Registers a range of memory with CUDA extent by extent as it becomes ready, on a thread of its own.

    Copies need not wait: memory that is not registered is copied more slowly. Close the pins before the
    memory is unmapped.
    """

    def __init__(
        self,
        context: GpuContext,
        address: int,
        num_bytes: int,
        extent_bytes: int = EXTENT_BYTES,
        on_change: Callable[[], None] = lambda: None,
        *,
        pause_ratio: float = 0.0,
        reports_progress: bool = False,
    ) -> None:
        """Start no thread yet; ``set_ready`` starts it.

        Args:
            context: the context in which the memory is registered.
            address: first byte of the memory.
            num_bytes: bytes of the memory.
            extent_bytes: bytes of a registration, a multiple of the page size.
            on_change: called without a lock when the status has changed, that is after a failure, and when
                the last ready extent has been tried. Must not block.
            pause_ratio: pause after each registration, as a multiple of the time that it took. In a process
                that launches kernels, 3 limits the launches that wait to a quarter of the time.
            reports_progress: call ``on_change`` after every registration.
        """
        self._context = context
        self._on_change = on_change
        self._pause_ratio, self._reports_progress = pause_ratio, reports_progress
        begin = -(-address // PAGE_BYTES) * PAGE_BYTES
        end = (address + num_bytes) // PAGE_BYTES * PAGE_BYTES
        self._begin = address
        # The extent with number n lies between the bounds n - 1 and n.
        self._bounds: list[int] = [*range(begin, end, extent_bytes), end] if begin < end else []
        self.edges: Words = np.array(self._bounds, np.uint64)
        """Addresses of all extents' edges, ascending. No copied piece may cross an edge."""
        self.failures = 0
        """Number of extents that could not be registered."""
        self.problem = ""
        """Error of the first failed registration; empty if none failed."""
        self.pinned_bytes = 0
        self._changed = threading.Condition()  # protects the fields below
        self._ready = address  # end of the ready memory
        self._is_pinned = np.zeros(len(self._bounds) + 1, bool)  # by extent; the memory around them is not
        self._refused: set[int] = set()
        self._next = 1  # all extents before it are registered or refused
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

    def covers(self, addresses: Words) -> npt.NDArray[np.bool_]:
        """Return for each address whether it is registered. Ready memory stays so while it is ``in_use``."""
        return self._is_pinned[np.searchsorted(self.edges, addresses, "right")]

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
            return self._changed.wait_for(lambda: not self._find_wanted(), timeout)

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
            for number in self._is_pinned.nonzero()[0].tolist():
                with contextlib.suppress(CudaError):  # a broken context: the end of the process unregisters
                    self._unpin(number)

    def _unpin_one(self) -> bool:
        """Unregister the last extent that is no longer completely ready. Return False if there is none."""
        with self._changed:
            number = max(self._is_pinned.nonzero()[0].tolist(), default=0)
            if not number or self._bounds[number] <= self._ready:
                return False
            try:
                self._is_shut = self._bounds[number - 1] < self._ready  # copies may use the ready part of it
                self._changed.wait_for(lambda: not (self._is_shut and self._num_uses))
                self._unpin(number)
            finally:
                self._is_shut = False
                self._changed.notify_all()
            return True

    def _find_wanted(self) -> int:
        """Return the number of the first extent that must still be registered; 0: none."""
        while self._next < len(self._bounds) and self._bounds[self._next] <= self._ready:
            if not self._is_pinned[self._next] and self._next not in self._refused:
                return self._next
            self._next += 1
        return 0

    def _work(self) -> None:
        self._context.driver.allow_calls_during_captures()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._find_wanted())
                if self._is_closed:
                    return
                number = self._find_wanted()
                self._registering_end = end = self._bounds[number]
            began = time.monotonic()
            is_pinned = self._register(number)
            seconds = time.monotonic() - began
            with self._changed:
                self._registering_end = 0
                if is_pinned:
                    self._is_pinned[number] = True
                    self.pinned_bytes += self._num_bytes(number)
                    if end > self._ready or self._is_closed:
                        with contextlib.suppress(CudaError):  # ``set_ready`` or ``close`` tries again
                            self._unpin(number)
                else:
                    self._refused.add(number)
                    self.failures += 1
                has_changed = self._reports_progress or not is_pinned or not self._find_wanted()
                self._changed.notify_all()
            if has_changed:
                self._on_change()
            self._pause(self._pause_ratio * seconds)

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, seconds)

    def _num_bytes(self, number: int) -> int:
        return self._bounds[number] - self._bounds[number - 1]

    def _register(self, number: int) -> bool:
        num_bytes = self._num_bytes(number)
        try:
            self._context.call("cuMemHostRegister", self._bounds[number - 1], num_bytes, 0)
        except CudaError as error:
            if not self.problem:
                self.problem = str(error)
                logger.warning(
                    "Can't pin %d MiB of the arena: its copies are slow: %s", num_bytes >> 20, error
                )
            return False
        return True

    def _unpin(self, number: int) -> None:
        self._context.call("cuMemHostUnregister", self._bounds[number - 1])
        self._is_pinned[number] = False
        self._next = min(self._next, number)
        self.pinned_bytes -= self._num_bytes(number)
