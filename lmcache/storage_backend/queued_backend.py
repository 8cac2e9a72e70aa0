"""Common base of the backends that can run puts in a background thread."""

from __future__ import annotations

import abc
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Full
from typing import NamedTuple

import torch

from lmcache.storage_backend.abstract_backend import LMCBackendInterface
from lmcache.storage_backend.guard import FaultLog
from lmcache.storage_backend.tensors import usable_device
from lmcache.utils import CacheEngineKey

MAX_QUEUED_BYTES = 1 << 30


class QueuedBackend(LMCBackendInterface):
    """A thread-safe backend with a queue of puts.

    A fault is counted and logged, and is a miss or a dropped chunk.
    """

    def __init__(self, dst_device: str, logger: logging.Logger, *, waits: bool) -> None:
        """Create the queue. While it is full, puts wait if ``waits`` is set, and are dropped otherwise.

        Raises RuntimeError if ``dst_device`` is not a device.
        """
        super().__init__(usable_device(dst_device))
        self._faults = FaultLog(logger)
        self._puts = PutQueue(self._faults, waits=waits)

    @property
    def num_faults(self) -> int:
        """Number of dropped puts, failed operations, and operations not tried after a failure."""
        return self._faults.num_faults

    def contains(self, key: CacheEngineKey) -> bool:
        """Return whether the chunk is stored; False if the storage is unavailable.

        Does not count as a use.
        """
        return self.prefix_length([key]) == 1

    def put(self, key: CacheEngineKey, kv_chunk: torch.Tensor, blocking: bool = True) -> None:
        """Put one chunk; it replaces a stored or queued one."""
        (self.put_blocking if blocking else self.put_nonblocking)(key, kv_chunk)

    @abc.abstractmethod
    def put_blocking(self, key: CacheEngineKey, kv_chunk: torch.Tensor) -> None:
        """Put one chunk now."""

    def put_nonblocking(self, key: CacheEngineKey, kv_chunk: torch.Tensor) -> None:
        """Put one chunk in the background. The caller must not change the tensor afterwards."""
        self._puts.push(key, kv_chunk, partial(self.put_blocking, key, kv_chunk))

    def put_worker(self) -> None:
        """Do nothing; part of the LMCache 0.1-0.3 API. An executor's thread runs the queued puts."""

    def close(self) -> None:
        """Complete queued puts, wait for running calls, end the threads, and release all resources.

        Afterwards every lookup is a miss, and puts are dropped and counted. Further calls of ``close`` do
        nothing.
        """
        if self._puts.close():
            self._release()

    @abc.abstractmethod
    def _release(self) -> None:
        """End further threads, and release memory, files and connections."""


class _Put(NamedTuple):
    key: CacheEngineKey
    num_bytes: int
    wait: Callable[[], object]
    """Function that waits until the GPU has written the chunk's bytes."""
    put: Callable[[], object]
    """Function that stores the chunk."""


class PutQueue:
    """A queue of puts that is bounded in bytes, and one thread that runs them. Errors don't end the thread.

    The thread starts with the first put. If the process ends normally (including ``sys.exit`` in a signal
    handler), queued puts run first. The executor guarantees both.
    """

    def __init__(self, faults: FaultLog, *, waits: bool) -> None:
        """Create an empty queue.

        While it is full, puts wait if ``waits`` is set, or are dropped and counted.
        """
        self._faults = faults
        self._waits = waits
        self._executor = ThreadPoolExecutor(1, "put worker")
        self._changed = threading.Condition()
        # protected by _changed
        self._queued: deque[_Put] = deque()
        self._num_bytes = 0  # queued or being put
        self._running: tuple[CacheEngineKey, int] | None = None  # key being put, and the putting thread
        self._closed = False

    def push(self, key: CacheEngineKey, chunk: torch.Tensor, put: Callable[[], object]) -> None:
        """Queue ``put``, a function that stores ``chunk``.

        The caller must not change the tensor afterwards.
        """
        new = _Put(key, chunk.nbytes, _when_written(chunk), put)
        with self._changed:
            if self._waits:
                self._changed.wait_for(lambda: not self._is_full(new))
            try:
                if self._is_full(new):
                    raise Full("the put queue is full")
                self._executor.submit(self._put_next)  # finds an empty queue if the put was superseded
            except (Full, RuntimeError) as error:  # RuntimeError: closed, or no thread can be started
                self._faults.note("A chunk was dropped", error)
                return
            self._queued.append(new)
            self._num_bytes += new.num_bytes

    def supersede(self, key: CacheEngineKey) -> None:
        """Remove queued puts of the key, and wait for a running one: the caller's operation is newer.

        A running put may call this for its own key; the call then returns immediately.
        """
        if self._num_bytes == 0:
            return
        with self._changed:
            if self._running == (key, threading.get_ident()):
                return
            remaining = [queued for queued in self._queued if queued.key != key]
            self._num_bytes -= sum(queued.num_bytes for queued in self._queued if queued.key == key)
            self._queued = deque(remaining)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._running is None or self._running[0] != key)

    def close(self) -> bool:
        """Run all queued puts, and end the thread; later puts are dropped.

        Returns False if already closed.
        """
        with self._changed:
            is_first, self._closed = not self._closed, True
            self._changed.notify_all()
        self._executor.shutdown()
        return is_first

    def _is_full(self, new: _Put) -> bool:
        # A chunk larger than the bound is accepted if the queue is empty.
        return not self._closed and 0 < self._num_bytes > MAX_QUEUED_BYTES - new.num_bytes

    def _put_next(self) -> None:
        with self._changed:
            if not self._queued:
                return
            queued = self._queued.popleft()
            self._running = queued.key, threading.get_ident()
        try:
            queued.wait()
            queued.put()
        except Exception as error:
            self._faults.note("A chunk was dropped", error)
        with self._changed:
            self._num_bytes -= queued.num_bytes
            self._running = None
            self._changed.notify_all()


def _when_written(chunk: torch.Tensor) -> Callable[[], object]:
    """Return a function that waits for the GPU work that writes the chunk.

    The wait is needed because the putting thread uses another CUDA stream.
    """
    if not chunk.is_cuda:
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(chunk.device))
    wait: Callable[[], object] = event.synchronize
    return wait
