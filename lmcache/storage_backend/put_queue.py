"""Puts that nobody waits for."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from lmcache.storage_backend.faults import FaultLog
from lmcache.utils import CacheEngineKey

MAX_QUEUED_BYTES = 1 << 30


class _Job(NamedTuple):
    key: CacheEngineKey
    num_bytes: int
    wait: Callable[[], object]  # until the chunk's bytes are there
    put: Callable[[], object]


class PutQueue:
    """A queue bounded in bytes, and one worker that outlives every error.

    The worker starts with the first put. When the process ends normally (``sys.exit`` in a signal's handler
    included) what is queued is put first.
    """

    def __init__(
        self, worker: Callable[[], None], end_signal: object, faults: FaultLog, *, waits: bool
    ) -> None:
        """``worker`` is the body of the thread and calls ``work``; ``waits``: a put waits while the queue is
        full, otherwise it is dropped and counted."""
        self._faults = faults
        self._worker = worker
        self._end_signal = end_signal
        self._waits = waits
        self._changed = threading.Condition()
        # protected by _changed
        self._jobs: deque[_Job | object] = deque()
        self._num_bytes = 0  # queued, or being put
        self._putting: CacheEngineKey | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def push(self, key: CacheEngineKey, chunk: torch.Tensor, put: Callable[[], object]) -> None:
        """Have ``put`` called, which puts ``chunk``; the tensor must not be changed any more."""
        job = _Job(key, chunk.nbytes, _when_written(chunk), put)
        with self._changed:
            while self._waits and self._is_full(job):
                self._changed.wait()
            if self._closed or self._is_full(job):
                self._faults.note(
                    "A chunk was dropped", "closed" if self._closed else "the put queue is full"
                )
                return
            if self._thread is None and not self._start():
                return
            self._jobs.append(job)
            self._num_bytes += job.num_bytes
            self._changed.notify_all()

    def supersede(self, key: CacheEngineKey) -> None:
        """Forget what is queued under the key, and wait for the end of its put if that has begun: what the
        caller is about to do is newer. The worker itself is not held up."""
        if self._num_bytes == 0 or threading.current_thread() is self._thread:
            return
        with self._changed:
            kept: deque[_Job | object] = deque()
            for job in self._jobs:
                if isinstance(job, _Job) and job.key == key:
                    self._num_bytes -= job.num_bytes
                else:
                    kept.append(job)
            self._jobs = kept
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._putting != key)

    def work(self) -> None:
        """Put what comes, until the end signal."""
        while isinstance(job := self._next(), _Job):
            num_bytes = job.num_bytes
            try:
                job.wait()
                job.put()
            except Exception as error:
                self._faults.note("A chunk was dropped", error)
            del job  # the chunk is not kept while waiting for the next
            with self._changed:
                self._num_bytes -= num_bytes
                self._putting = None
                self._changed.notify_all()

    def close(self) -> bool:
        """Put what is queued, and end the worker; later puts are dropped. False: it was closed before."""
        with self._changed:
            is_first = not self._closed
            if is_first:
                self._jobs.append(self._end_signal)
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
            atexit.unregister(self.close)
        return is_first

    def _is_full(self, job: _Job) -> bool:
        # A chunk larger than the bound goes through alone.
        return not self._closed and 0 < self._num_bytes > MAX_QUEUED_BYTES - job.num_bytes

    def _next(self) -> object:
        with self._changed:
            while not self._jobs:
                self._changed.wait()
            job = self._jobs.popleft()
            self._putting = job.key if isinstance(job, _Job) else None
            return job

    def _start(self) -> bool:
        thread = threading.Thread(target=self._worker, name="put worker", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # there can't be another thread
            self._faults.note("A chunk was dropped", error)
            return False
        self._thread = thread
        atexit.register(self.close)
        return True


def _when_written(chunk: torch.Tensor) -> Callable[[], object]:
    """Return what waits for the GPU work that is to write the chunk: the worker has a stream of its own."""
    if not chunk.is_cuda:
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(chunk.device))
    wait: Callable[[], object] = event.synchronize
    return wait
