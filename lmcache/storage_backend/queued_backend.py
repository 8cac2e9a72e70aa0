"""What the backends have in common that may leave puts to a thread."""

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
    """Any thread may use it. A fault is a miss, or a chunk that is dropped; it is counted and said."""

    def __init__(self, dst_device: str, logger: logging.Logger, *, waits: bool) -> None:
        """``waits``: puts that are not waited for do wait while the queue is full; else they are dropped.

        Raises RuntimeError when ``dst_device`` is no device.
        """
        super().__init__(usable_device(dst_device))
        self._faults = FaultLog(logger)
        self._puts = PutQueue(self._faults, waits=waits)

    @property
    def num_faults(self) -> int:
        """Puts that were dropped, and operations that failed or were not tried after a failure."""
        return self._faults.num_faults

    def contains(self, key: CacheEngineKey) -> bool:
        """Is the chunk here? Does not count as using it; False also when that can't be known."""
        return self.prefix_length([key]) == 1

    def put(self, key: CacheEngineKey, kv_chunk: torch.Tensor, blocking: bool = True) -> None:
        """Put one chunk, in place of the one that is there or queued."""
        (self.put_blocking if blocking else self.put_nonblocking)(key, kv_chunk)

    @abc.abstractmethod
    def put_blocking(self, key: CacheEngineKey, kv_chunk: torch.Tensor) -> None:
        """Put one chunk now."""

    def put_nonblocking(self, key: CacheEngineKey, kv_chunk: torch.Tensor) -> None:
        """Leave the put to a thread; the tensor must not be changed any more."""
        self._puts.push(key, kv_chunk, partial(self.put_blocking, key, kv_chunk))

    def put_worker(self) -> None:
        """Do nothing: of the LMCache 0.1-0.3 API. An executor's thread puts what is queued."""

    def close(self) -> None:
        """Put what is queued, end the threads, then give everything back; only the first call does anything.

        Calls that are under way are waited for. After it nothing is here: everything is a miss, and puts are
        dropped and counted.
        """
        if self._puts.close():
            self._release()

    @abc.abstractmethod
    def _release(self) -> None:
        """End what else runs, and give back memory, files and connections."""


class _Put(NamedTuple):
    key: CacheEngineKey
    num_bytes: int
    wait: Callable[[], object]
    """Until the chunk's bytes are there."""
    put: Callable[[], object]


class PutQueue:
    """A queue bounded in bytes, and one thread that puts and outlives every error.

    The thread starts with the first put. When the process ends normally (``sys.exit`` in a signal's handler
    included) what is queued is put first: an executor sees to both.
    """

    def __init__(self, faults: FaultLog, *, waits: bool) -> None:
        """``waits``: a put waits while the queue is full, otherwise it is dropped and counted."""
        self._faults = faults
        self._waits = waits
        self._executor = ThreadPoolExecutor(1, "put worker")
        self._changed = threading.Condition()
        # protected by _changed
        self._queued: deque[_Put] = deque()
        self._num_bytes = 0  # queued, or being put
        self._putting: tuple[CacheEngineKey, int] | None = None  # and the thread that does
        self._closed = False

    def push(self, key: CacheEngineKey, chunk: torch.Tensor, put: Callable[[], object]) -> None:
        """Have ``put`` called, which puts ``chunk``; the tensor must not be changed any more."""
        new = _Put(key, chunk.nbytes, _when_written(chunk), put)
        with self._changed:
            if self._waits:
                self._changed.wait_for(lambda: not self._is_full(new))
            try:
                if self._is_full(new):
                    raise Full("no room in the put queue")
                self._executor.submit(self._put_next)  # comes for nothing when the put was superseded
            except (Full, RuntimeError) as error:  # it is closed, or there can't be a thread
                self._faults.note("A chunk was dropped", error)
                return
            self._queued.append(new)
            self._num_bytes += new.num_bytes

    def supersede(self, key: CacheEngineKey) -> None:
        """Forget what is queued under the key, and wait for the end of its put if that has begun: what the
        caller is about to do is newer. The put itself, which may call this, is not held up."""
        if self._num_bytes == 0:
            return
        with self._changed:
            if self._putting == (key, threading.get_ident()):
                return
            kept = [queued for queued in self._queued if queued.key != key]
            self._num_bytes -= sum(queued.num_bytes for queued in self._queued if queued.key == key)
            self._queued = deque(kept)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._putting is None or self._putting[0] != key)

    def close(self) -> bool:
        """Put what is queued, and end the thread; later puts are dropped. False: it was closed before."""
        with self._changed:
            is_first, self._closed = not self._closed, True
            self._changed.notify_all()
        self._executor.shutdown()
        return is_first

    def _is_full(self, new: _Put) -> bool:
        # A chunk larger than the bound goes through alone.
        return not self._closed and 0 < self._num_bytes > MAX_QUEUED_BYTES - new.num_bytes

    def _put_next(self) -> None:
        with self._changed:
            if not self._queued:
                return
            queued = self._queued.popleft()
            self._putting = queued.key, threading.get_ident()
        try:
            queued.wait()
            queued.put()
        except Exception as error:
            self._faults.note("A chunk was dropped", error)
        with self._changed:
            self._num_bytes -= queued.num_bytes
            self._putting = None
            self._changed.notify_all()


def _when_written(chunk: torch.Tensor) -> Callable[[], object]:
    """Return what waits for the GPU work that is to write the chunk: the thread has a stream of its own."""
    if not chunk.is_cuda:
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(chunk.device))
    wait: Callable[[], object] = event.synchronize
    return wait
