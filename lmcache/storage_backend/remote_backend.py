"""Chunks on a remote server: a connector moves bytes, a serde makes them of tensors."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeAlias

import torch

from lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache.logging import init_logger
from lmcache.storage_backend.connector import CreateConnector
from lmcache.storage_backend.guard import Guard
from lmcache.storage_backend.queued_backend import QueuedBackend
from lmcache.storage_backend.serde import CreateSerde
from lmcache.tiers.resilience import CircuitBreaker
from lmcache.utils import CacheEngineKey

_log = init_logger(__name__)

_WINDOW = 4  # chunks fetched ahead of the one that is asked for

_TRIAL_KEY = "lmcache@trial@0@0@"

_Answer: TypeAlias = "Future[torch.Tensor | None]"


class RemoteBackendEndSignal:
    """Ends a worker when it comes out of its queue."""


class LMCRemoteBackend(QueuedBackend):
    """A server that does not answer is left alone until it does."""

    def __init__(
        self, config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata, dst_device: str = "cuda"
    ) -> None:
        """Connect to ``config.remote_url``.

        Raises AssertionError when there is no URL or no ``remote_serde``, and ValueError when one of them is
        of no known kind. Whether the server answers does not matter yet.
        """
        super().__init__(dst_device, RemoteBackendEndSignal(), _log, waits=False)
        if config.remote_url is None or config.remote_serde is None:
            raise AssertionError("a remote backend needs remote_url and remote_serde")
        self._serializer, self._deserializer = CreateSerde(config.remote_serde, config, metadata)
        self._connector = CreateConnector(config.remote_url)
        self._breaker = CircuitBreaker(base=0.1, cap=2.0)
        self._guard = Guard(self._breaker, self._try_again, self._faults)

    def contains(self, key: CacheEngineKey) -> bool:
        """Is the chunk on the server? False also when that can't be known."""
        return self._guard.call("A look", lambda: self._connector.exists(key.to_string()), False)

    def get(self, key: CacheEngineKey) -> torch.Tensor | None:
        """Return the chunk on ``dst_device``; None: a miss, a fault, or bytes that are no chunk."""
        return self._deserialize(self._fetch(key))

    def batched_get(self, keys: Iterable[CacheEngineKey]) -> Iterable[torch.Tensor | None]:
        """Yield one answer per key, in their order, each fetched only when it is asked for."""
        return map(self.get, keys)

    def put_blocking(self, key: CacheEngineKey, kv_chunk: torch.Tensor) -> None:
        """Put one chunk now."""
        self._puts.supersede(key)
        self._guard.call(
            "A put",
            lambda: self._connector.set(key.to_string(), self._serializer.to_bytes(kv_chunk)),
            None,
        )

    def list(self) -> list[CacheEngineKey]:
        """Return the keys of the chunks on the server; what else it holds is none of ours."""
        names: Sequence[str] = self._guard.call("A listing", self._connector.list, [])
        return list(map(CacheEngineKey.from_string, names))

    def _release(self) -> None:
        self._guard.close()
        self._connector.close()

    def _try_again(self) -> None:
        try:
            with contextlib.suppress(ValueError):  # a refusal is an answer
                self._connector.exists(_TRIAL_KEY)
        except Exception:
            self._breaker.failure()
            return
        self._breaker.trial_succeeded()
        _log.info("The remote server answers again")

    def _fetch(self, key: CacheEngineKey) -> bytes | None:
        return self._guard.call("A get", lambda: self._connector.get(key.to_string()), None)

    def _deserialize(self, content: bytes | None) -> torch.Tensor | None:
        try:
            return None if content is None else self._deserializer.from_bytes(content).to(self.dst_device)
        except Exception as error:  # neither may the worker end, nor the engine, by whatever was sent to it
            self._faults.note("A chunk from the server can't be read", error)
            return None


class LMCPipelinedRemoteBackend(LMCRemoteBackend):
    """Fetches the next chunks while one is deserialised."""

    def __init__(
        self, config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata, dst_device: str = "cuda"
    ) -> None:
        """As for ``LMCRemoteBackend``."""
        super().__init__(config, metadata, dst_device)
        self._to_fetch: queue.SimpleQueue[tuple[CacheEngineKey, _Answer] | None] = queue.SimpleQueue()
        self._to_deserialize: queue.SimpleQueue[tuple[bytes | None, _Answer] | None] = queue.SimpleQueue()
        self._closing = threading.Lock()  # protects _closed: nothing is queued behind the end
        self._closed = False
        self._workers = [
            threading.Thread(target=worker, name=worker.__name__, daemon=True)
            for worker in (self.network_worker, self.deserialize_worker)
        ]
        for thread in self._workers:
            thread.start()

    def batched_get(self, keys: Iterable[CacheEngineKey]) -> Iterator[torch.Tensor | None]:
        """Yield one answer per key, in their order. At most four chunks are fetched ahead; who stops asking
        leaves these, and no more, for nothing."""
        rest = iter(keys)
        asked = deque(self._ask(key) for key in itertools.islice(rest, _WINDOW))
        try:
            while asked:
                answer = asked.popleft().result()
                asked.extend(self._ask(key) for key in itertools.islice(rest, 1))
                yield answer
        finally:
            for left in asked:
                left.cancel()

    def network_worker(self) -> None:
        """Fetch what is asked for, until the end: the body of a thread."""
        while (work := self._to_fetch.get()) is not None:
            key, answer = work
            if answer.set_running_or_notify_cancel():
                self._to_deserialize.put((self._fetch(key), answer))
        self._to_deserialize.put(None)

    def deserialize_worker(self) -> None:
        """Make tensors of what was fetched, until the end: the body of a thread."""
        while (work := self._to_deserialize.get()) is not None:
            content, answer = work
            answer.set_result(self._deserialize(content))

    def close(self) -> None:
        """Answer what was asked, end the threads, then close the connection."""
        with self._closing:
            if not self._closed:
                self._to_fetch.put(None)
            self._closed = True
        for thread in self._workers:
            thread.join()
        super().close()

    def _ask(self, key: CacheEngineKey) -> _Answer:
        answer: _Answer = Future()
        with self._closing:
            if self._closed:
                answer.set_result(None)
            else:
                self._to_fetch.put((key, answer))
        return answer


def create_remote_backend(
    config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata, dst_device: str
) -> LMCRemoteBackend:
    """Return the pipelined backend if ``config`` asks for it."""
    kind = LMCPipelinedRemoteBackend if config.pipelined_backend else LMCRemoteBackend
    return kind(config, metadata, dst_device)
