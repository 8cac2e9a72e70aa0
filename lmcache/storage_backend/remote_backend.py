"""Chunks on a remote server: a connector moves bytes, a serde makes them of tensors."""

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
from lmcache.recent import Recent
from lmcache.storage_backend.chunks import Keys
from lmcache.storage_backend.connector import CreateConnector
from lmcache.storage_backend.guard import Guard
from lmcache.storage_backend.queued_backend import QueuedBackend
from lmcache.storage_backend.serde import CreateSerde
from lmcache.tiers.circuit import Circuit
from lmcache.utils import CacheEngineKey

logger = init_logger(__name__)

_WINDOW = 4  # chunks fetched at once, the one that is asked for and those behind it
_MAX_LOOKS = 64  # at once
_MAX_UNREADABLE = 4096  # that are remembered

_PROBE_KEY = "lmcache@probe@0@0@"


class RemoteBackendEndSignal:
    """Of the LMCache 0.1-0.3 API: nothing uses it."""


class LMCRemoteBackend(QueuedBackend):
    """A server that does not answer is not asked again until it does.

    What is written is bound to its key and to the model's geometry (layers, heads, head size): the value of
    another chunk or of another model is a miss, counted. A value that could not be read counts as absent
    until it was put again.
    """

    def __init__(
        self, config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata, dst_device: str = "cuda"
    ) -> None:
        """Connect to ``config.remote_url``.

        Raises AssertionError when there is no URL or no ``remote_serde``, and ValueError when one of them is
        of no known kind. Whether the server answers does not matter yet.
        """
        super().__init__(dst_device, logger, waits=False)
        if config.remote_url is None or config.remote_serde is None:
            raise AssertionError("a remote backend needs remote_url and remote_serde")
        self._serializer, self._deserializer = CreateSerde(config.remote_serde, config, metadata)
        self._geometry = _geometry(metadata)
        self._unreadable: Recent[CacheEngineKey, None] = Recent(_MAX_UNREADABLE)
        self._connector = CreateConnector(config.remote_url)
        circuit = Circuit("the remote server", self._probe, base=0.1, cap=2.0)
        circuit.subscribe(_say_recovery)
        self._guard = Guard(circuit, self._faults)

    def get(self, key: CacheEngineKey) -> torch.Tensor | None:
        """Return the chunk on ``dst_device``; None: a miss, a fault, or bytes that are no chunk."""
        return self._deserialize(key, self._fetch([key])[0])

    def batched_get(self, keys: Iterable[CacheEngineKey]) -> Iterator[torch.Tensor | None]:
        """Yield one answer per key, in their order. Four are fetched at once; who stops asking leaves at most
        three for nothing."""
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
        """Return the keys of the chunks on the server; what else it holds is none of ours."""
        names: Sequence[str] = self._guard.call("A listing", self._connector.list, [])
        keys: dict[CacheEngineKey, None] = {}
        for name in names:
            with contextlib.suppress(ValueError):
                keys[CacheEngineKey.from_string(name)] = None
        return [*keys]

    def prefix_length(self, keys: Keys) -> int:
        """See LMCBackendInterface. A round trip per 64 chunks, where the connector can."""
        for start in range(0, len(keys), _MAX_LOOKS):
            batch = keys[start : start + _MAX_LOOKS]
            names = [key.to_string() for key in batch]
            are_there = self._guard.call("A look", partial(self._connector.exists_many, names), ())
            for number, key in enumerate(batch):
                if number >= len(are_there) or not are_there[number] or key in self._unreadable:
                    return start + number
        return len(keys)

    def _release(self) -> None:
        self._guard.close()
        self._connector.close()

    def _probe(self) -> None:
        with contextlib.suppress(ValueError):  # a refusal is an answer
            self._connector.exists(_PROBE_KEY)

    def _label(self, key: CacheEngineKey) -> bytes:
        return f"{key.to_string()} {self._geometry}".encode()

    def _fetch(self, keys: Keys) -> Sequence[bytes | None]:
        names = [key.to_string() for key in keys]
        if len(names) > 1:
            found = self._guard.call("A get", partial(self._connector.get_many, names), ())
            if len(found) == len(names):
                return found
        # Alone: of several, one that is refused would have taken the others with it.
        return [self._guard.call("A get", partial(self._connector.get, name), None) for name in names]

    def _deserialize(self, key: CacheEngineKey, content: bytes | None) -> torch.Tensor | None:
        if content is None:
            return None
        try:
            chunk = self._deserializer.from_bytes(content, self._label(key)).to(self.dst_device)
        except Exception as error:  # neither may the worker end, nor the engine, by whatever was sent to it
            self._faults.note("A chunk from the server can't be read", error)
            self._unreadable[key] = None
            return None
        self._unreadable.pop(key, None)
        return chunk


class LMCPipelinedRemoteBackend(LMCRemoteBackend):
    """Fetches the next chunks while one is deserialised."""

    def __init__(
        self, config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata, dst_device: str = "cuda"
    ) -> None:
        """As for ``LMCRemoteBackend``."""
        super().__init__(config, metadata, dst_device)
        self._network = ThreadPoolExecutor(1, "network worker")
        self._deserializing = ThreadPoolExecutor(1, "deserialize worker")

    def batched_get(self, keys: Iterable[CacheEngineKey]) -> Iterator[torch.Tensor | None]:
        """Yield one answer per key, in their order. At most four chunks are fetched ahead; who stops asking
        leaves these, and no more, for nothing."""
        rest = iter(keys)
        asked: deque[Future[torch.Tensor | None]] = deque()
        try:
            while True:
                while len(asked) <= _WINDOW // 2 and (batch := list(itertools.islice(rest, _WINDOW // 2))):
                    asked += self._ask(batch)
                if not asked:
                    return
                yield asked.popleft().result()
        finally:
            for left in asked:
                left.cancel()

    def network_worker(self) -> None:
        """Do nothing: of the LMCache 0.1-0.3 API. An executor's thread fetches."""

    def deserialize_worker(self) -> None:
        """Do nothing: of the LMCache 0.1-0.3 API. An executor's thread makes tensors of what was fetched."""

    def close(self) -> None:
        """Answer what was asked, end the threads, then close the connection."""
        self._network.shutdown()
        self._deserializing.shutdown()
        super().close()

    def _ask(self, keys: Keys) -> list[Future[torch.Tensor | None]]:
        def answer(number: int) -> torch.Tensor | None:
            return self._deserialize(keys[number], fetched.result()[number])

        try:
            fetched = self._network.submit(self._fetch, keys)
            return [self._deserializing.submit(answer, number) for number in range(len(keys))]
        except RuntimeError as error:  # closed, or there can't be a thread
            self._faults.note("A get was not tried", error)
            missing: Future[torch.Tensor | None] = Future()
            missing.set_result(None)
            return [missing] * len(keys)


def _say_recovery(failed: bool) -> None:
    if not failed:
        logger.info("The remote server answers again")


def _geometry(metadata: LMCacheEngineMetadata) -> str:
    """Return what all chunks of a model have in common, whatever the number of their tokens."""
    shape = metadata.kv_shape
    return "" if shape is None else f"{shape[0]} layers, {shape[3]} heads of {shape[4]}"


def create_remote_backend(
    config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata, dst_device: str
) -> LMCRemoteBackend:
    """Return the pipelined backend if ``config`` asks for it."""
    kind = LMCPipelinedRemoteBackend if config.pipelined_backend else LMCRemoteBackend
    return kind(config, metadata, dst_device)
