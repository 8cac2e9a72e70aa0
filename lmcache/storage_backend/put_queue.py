"""Puts that nobody waits for."""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable

import torch

from lmcache.storage_backend.faults import FaultLog
from lmcache.utils import CacheEngineKey

MAX_QUEUED_BYTES = 1 << 30

Put = Callable[[CacheEngineKey, torch.Tensor], None]


class PutQueue:
    """A queue bounded in bytes, and one worker that outlives every error.

    The worker starts with the first put. When the process ends normally (``sys.exit`` in a signal's handler
    included) what is queued is put first.
    """

    def __init__(
        self, worker: Callable[[], None], end_signal: object, logger: logging.Logger, *, waits: bool
    ) -> None:
        """``worker`` is the body of the thread and calls ``work``; ``waits``: a put waits while the queue is
        full, otherwise it is dropped and counted."""
        self.faults = FaultLog(logger)  # puts that were lost
        self._worker = worker
        self._end_signal = end_signal
        self._waits = waits
        self._changed = threading.Condition()
        # protected by _changed
        self._items: deque[tuple[CacheEngineKey, torch.Tensor] | object] = deque()
        self._num_bytes = 0  # queued, or being put
        self._thread: threading.Thread | None = None
        self._closed = False

    def push(self, key: CacheEngineKey, chunk: torch.Tensor) -> None:
        """Queue one put; the tensor must not be changed any more."""
        with self._changed:
            while self._is_full(chunk.nbytes) and self._waits:
                self._changed.wait()
            if self._is_full(chunk.nbytes) or self._closed:
                self.faults.note("A chunk was dropped", "closed" if self._closed else "the put queue is full")
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._worker, name="put worker", daemon=True)
                self._thread.start()
                atexit.register(self.close)
            self._items.append((key, chunk))
            self._num_bytes += chunk.nbytes
            self._changed.notify_all()

    def work(self, put: Put) -> None:
        """Put what comes, until the end signal."""
        while (item := self._next()) is not self._end_signal:
            key, chunk = item  # type: ignore[misc]
            try:
                put(key, chunk)
            except Exception as error:
                self.faults.note("A chunk was dropped", error)
            with self._changed:
                self._num_bytes -= chunk.nbytes
                self._changed.notify_all()
            del item, chunk  # not kept while waiting for the next

    def close(self) -> None:
        """Put what is queued, and end the worker; later puts are dropped."""
        with self._changed:
            if not self._closed:
                self._items.append(self._end_signal)
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
            atexit.unregister(self.close)

    def _is_full(self, num_bytes: int) -> bool:
        return not self._closed and self._num_bytes > 0 and self._num_bytes + num_bytes > MAX_QUEUED_BYTES

    def _next(self) -> object:
        with self._changed:
            while not self._items:
                self._changed.wait()
            return self._items.popleft()
