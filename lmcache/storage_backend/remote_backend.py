"""Storage of chunks on a remote server: a serde converts tensors to bytes, and a connector transfers them."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache.logging import init_logger
from lmcache.storage_backend.chunks import Keys
from lmcache.storage_backend.connector import CreateConnector
from lmcache.storage_backend.guard import Guard
from lmcache.storage_backend.queued_backend import QueuedBackend
from lmcache.storage_backend.serde import CreateSerde
from lmcache.utils import CacheEngineKey
from lmcache_store.common.recent import Recent
from lmcache_store.tiers.circuit import Circuit

logger = init_logger(__name__)

_WINDOW = 4  # chunks fetched at once: the requested chunk and the chunks after it
_MAX_LOOKUPS = 64  # per round trip
_MAX_UNREADABLE = 4096  # keys of values that could not be read

_PROBE_KEY = "lmcache@probe@0@0@"


class RemoteBackendEndSignal:
    """Unused; part of the LMCache 0.1-0.3 API."""


class LMCRemoteBackend(QueuedBackend):
    """Stores chunks on a remote server. If the server fails, it gets no requests until a probe succeeds.

    Every value is bound to its key and to the model's geometry (layers, heads, head size). The value of
    another chunk or another model is a miss, and is counted. A value that could not be read counts as missing
    until it is put again.
    """

    def __init__(
        self, config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata, dst_device: str = "cuda"
    ) -> None:
        """Use the server at ``config.remote_url``. The server need not be available yet.

        Raises AssertionError if the URL or ``remote_serde`` is missing, and ValueError if one of them is of
        an unknown kind.
        """
        super().__init__(dst_device, logger, waits=False)
        if config.remote_url is None or config.remote_serde is None:
            raise AssertionError("a remote backend needs remote_url and remote_serde")
        self._serializer, self._deserializer = CreateSerde(config.remote_serde, config, metadata)
        self._geometry = _geometry(metadata)
        self._unreadable: Recent[CacheEngineKey, None] = Recent(_MAX_UNREADABLE)
        self._connector = CreateConnector(config.remote_url)
        circuit = Circuit("the remote server", self._probe, base=0.1, cap=2.0)
        circuit.subscribe(_log_recovery)
        self._guard = Guard(circuit, self._faults)

    def get(self, key: CacheEngineKey) -> torch.Tensor | None:
        """Return the chunk on ``dst_device``, or None for a miss, a fault, or an unreadable value."""
        return self._deserialize(key, self._fetch([key])[0])

    def batched_get(self, keys: Iterable[CacheEngineKey]) -> Iterator[torch.Tensor | None]:
        """Yield the chunk of each key in order, or None for a miss.

        Fetches four chunks at once. If you stop early, at most three are fetched in vain.
        """
        rest = iter(keys)
        while batch := list(itertools.islice(rest, _WINDOW)):
            yield from map(self._deserialize, batch, self._fetch(batch))

    def put_blocking(self, key: CacheEngineKey, kv_chunk: torch.Tensor) -> None:
        """Put one chunk now."""
        self._puts.supersede(key)
        self._guard.call(
            "A put",
            lambda: self._connector.set(
                key.to_string(), self._serializer.to_bytes(kv_chunk, self._label(key))
            ),
            None,
        )
        self._unreadable.pop(key, None)

    def list(self) -> list[CacheEngineKey]:
        """Return the keys of the chunks on the server. Ignores values with other names."""
        names: Sequence[str] = self._guard.call("A listing", self._connector.list, [])
        keys: dict[CacheEngineKey, None] = {}
        for name in names:
            with contextlib.suppress(ValueError):
                keys[CacheEngineKey.from_string(name)] = None
        return [*keys]

    def prefix_length(self, keys: Keys) -> int:
        """See LMCBackendInterface. Takes one round trip per 64 chunks if the connector supports that."""
        for start in range(0, len(keys), _MAX_LOOKUPS):
            batch = keys[start : start + _MAX_LOOKUPS]
            names = [key.to_string() for key in batch]
            exist = self._guard.call("A lookup", partial(self._connector.exists_many, names), ())
            for number, key in enumerate(batch):
                if number >= len(exist) or not exist[number] or key in self._unreadable:
                    return start + number
        return len(keys)

    def _release(self) -> None:
        self._guard.close()
        self._connector.close()

    def _probe(self) -> None:
        with contextlib.suppress(ValueError):  # a server that refuses is available
            self._connector.exists(_PROBE_KEY)

    def _label(self, key: CacheEngineKey) -> bytes:
        return f"{key.to_string()} {self._geometry}".encode()

    def _fetch(self, keys: Keys) -> Sequence[bytes | None]:
        names = [key.to_string() for key in keys]
        if len(names) > 1:
            values = self._guard.call("A get", partial(self._connector.get_many, names), ())
            if len(values) == len(names):
                return values
        # Fetch values one by one, because one refused value makes the whole batch fail.
        return [self._guard.call("A get", partial(self._connector.get, name), None) for name in names]

    def _deserialize(self, key: CacheEngineKey, content: bytes | None) -> torch.Tensor | None:
        if content is None:
            return None
        try:
            chunk = self._deserializer.from_bytes(content, self._label(key)).to(self.dst_device)
        except Exception as error:  # no bytes from the server may end a worker thread or the engine
            self._faults.note("A chunk from the server can't be read", error)
            self._unreadable[key] = None
            return None
        self._unreadable.pop(key, None)
        return chunk


class LMCPipelinedRemoteBackend(LMCRemoteBackend):
    """A remote backend that fetches the next chunks while it deserializes one."""

    def __init__(
        self, config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata, dst_device: str = "cuda"
    ) -> None:
        """See LMCRemoteBackend."""
        super().__init__(config, metadata, dst_device)
        self._network = ThreadPoolExecutor(1, "network worker")
        self._deserializing = ThreadPoolExecutor(1, "deserialize worker")

    def batched_get(self, keys: Iterable[CacheEngineKey]) -> Iterator[torch.Tensor | None]:
        """Yield the chunk of each key in order, or None for a miss.

        Fetches at most four chunks ahead. If you stop early, at most these are fetched in vain.
        """
        rest = iter(keys)
        pending: deque[Future[torch.Tensor | None]] = deque()
        try:
            while True:
                while len(pending) <= _WINDOW // 2 and (batch := list(itertools.islice(rest, _WINDOW // 2))):
                    pending += self._submit(batch)
                if not pending:
                    return
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()

    def network_worker(self) -> None:
        """Do nothing; part of the LMCache 0.1-0.3 API. An executor's thread fetches."""

    def deserialize_worker(self) -> None:
        """Do nothing; part of the LMCache 0.1-0.3 API. An executor's thread deserializes."""

    def close(self) -> None:
        """Complete running fetches and queued puts, end the threads, and close the connection."""
        self._network.shutdown()
        self._deserializing.shutdown()
        super().close()

    def _submit(self, keys: Keys) -> list[Future[torch.Tensor | None]]:
        def deserialize(number: int) -> torch.Tensor | None:
            return self._deserialize(keys[number], fetched.result()[number])

        try:
            fetched = self._network.submit(self._fetch, keys)
            return [self._deserializing.submit(deserialize, number) for number in range(len(keys))]
        except RuntimeError as error:  # closed, or no thread can be started
            self._faults.note("A get was not tried", error)
            miss: Future[torch.Tensor | None] = Future()
            miss.set_result(None)
            return [miss] * len(keys)


def _log_recovery(failed: bool) -> None:
    if not failed:
        logger.info("The remote server answers again")


def _geometry(metadata: LMCacheEngineMetadata) -> str:
    """Return the part of the shape that all chunks of a model share, as text."""
    shape = metadata.kv_shape
    return "" if shape is None else f"{shape[0]} layers, {shape[3]} heads of {shape[4]}"


def create_remote_backend(
    config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata, dst_device: str
) -> LMCRemoteBackend:
    """Create the remote backend: the pipelined one if ``config.pipelined_backend`` is set."""
    kind = LMCPipelinedRemoteBackend if config.pipelined_backend else LMCRemoteBackend
    return kind(config, metadata, dst_device)
