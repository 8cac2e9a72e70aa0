"""What the backends have in common that may leave puts to a worker."""

from __future__ import annotations

import abc
import logging
from functools import partial

import torch

from lmcache.storage_backend.abstract_backend import LMCBackendInterface
from lmcache.storage_backend.devices import usable_device
from lmcache.storage_backend.faults import FaultLog
from lmcache.storage_backend.put_queue import PutQueue
from lmcache.utils import CacheEngineKey


class LocalBackendEndSignal:
    """Ends a put worker of a local backend when it comes out of the queue."""


class QueuedBackend(LMCBackendInterface):
    """Any thread may use it. A fault is a miss, or a chunk that is dropped; it is counted and said."""

    def __init__(self, dst_device: str, end_signal: object, logger: logging.Logger, *, waits: bool) -> None:
        """``waits``: puts that are not waited for do wait while the queue is full; else they are dropped.

        Raises RuntimeError when ``dst_device`` is no device.
        """
        super().__init__(usable_device(dst_device))
        self._faults = FaultLog(logger)
        self._puts = PutQueue(self.put_worker, end_signal, self._faults, waits=waits)

    @property
    def num_faults(self) -> int:
        """Puts that were dropped, and operations that failed or were not tried after a failure."""
        return self._faults.num_faults

    def put(self, key: CacheEngineKey, kv_chunk: torch.Tensor, blocking: bool = True) -> None:
        """Put one chunk, in place of the one that is there or queued."""
        (self.put_blocking if blocking else self.put_nonblocking)(key, kv_chunk)

    @abc.abstractmethod
    def put_blocking(self, key: CacheEngineKey, kv_chunk: torch.Tensor) -> None:
        """Put one chunk now."""

    def put_nonblocking(self, key: CacheEngineKey, kv_chunk: torch.Tensor) -> None:
        """Leave the put to the worker; the tensor must not be changed any more."""
        self._puts.push(key, kv_chunk, partial(self.put_blocking, key, kv_chunk))

    def put_worker(self) -> None:
        """Put what is queued, until the end signal: the body of the worker thread."""
        self._puts.work()

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
