"""Chunks in the memory of this process, on the host or on the GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata, LMCacheMemPoolMetadata
from lmcache.logging import init_logger
from lmcache.storage_backend import copies
from lmcache.storage_backend.chunk_names import ChunksView, RowNames
from lmcache.storage_backend.chunk_source import Chunks, ChunkSource, Keys
from lmcache.storage_backend.devices import usable_device
from lmcache.storage_backend.evictor import LRUEvictor
from lmcache.storage_backend.local_disk_backend import LMCLocalDiskBackend, save_disk
from lmcache.storage_backend.mem_pool import TorchArena
from lmcache.storage_backend.output_pool import OutputPool
from lmcache.storage_backend.queued_backend import LocalBackendEndSignal, QueuedBackend, evict_down_to
from lmcache.tiers.local import LocalStore
from lmcache.utils import CacheEngineKey

__all__ = ["LMCLocalBackend", "LMCLocalDiskBackend", "LocalBackendEndSignal", "save_disk"]

_log = init_logger(__name__)


class _Contents(NamedTuple):
    """What the bytes of a row are: written while the row is being filled, read while it is pinned."""

    key: CacheEngineKey
    shape: Sequence[int]
    dtype: torch.dtype


class LMCLocalBackend(QueuedBackend):
    """Chunks are kept as they are given: dtype and shape may be any whose bytes fit.

    ``metadata`` says what a full chunk is; a shorter one takes less. ``evictor.MAX_CACHE_SIZE`` (bytes) may
    be lowered, not raised above the memory that was taken at the start: ``mpool``.
    """

    def __init__(
        self, config: LMCacheEngineConfig, metadata: LMCacheMemPoolMetadata, dst_device: str = "cuda"
    ) -> None:
        """Take ``metadata.max_local_cache_size`` GiB on ``config.local_device``.

        Raises RuntimeError when ``dst_device`` is none, and MemoryError.
        """
        super().__init__(dst_device, LocalBackendEndSignal(), _log, waits=True)
        self._evictor = LRUEvictor(metadata.max_local_cache_size)
        chunk_bytes = math.prod(metadata.kv_shape) * metadata.kv_dtype.itemsize
        device = usable_device(config.local_device or "cpu")
        self.mpool = TorchArena.for_chunks(chunk_bytes, self._evictor.MAX_CACHE_SIZE, device)
        self._store = LocalStore(self.mpool)
        self._names = RowNames(metadata.kv_dtype, metadata.kv_shape)
        self._contents: dict[int, _Contents] = {}  # of rows by their first slot; those of free rows are stale
        self._outputs = OutputPool()
        self.dict = ChunksView(self, self._keys)

    @property
    def evictor(self) -> LRUEvictor:
        """The limit, and the bytes that are taken at the moment of asking."""
        self._evictor.current_cache_size = self._store.num_bytes
        return self._evictor

    def contains(self, key: CacheEngineKey) -> bool:
        """Is the chunk here? Does not count as using it."""
        return self._store.contains(self._names(key))

    def get(self, key: CacheEngineKey) -> torch.Tensor | None:
        """Return a copy on ``dst_device``; None: a miss."""
        return self._store.get(self._names(key), lambda row, _: self._copy_of(self._tensor(row)))

    def put_blocking(self, key: CacheEngineKey, kv_chunk: torch.Tensor) -> None:
        """Copy the chunk in now; one that does not fit is dropped."""
        self._put(key, ChunkSource.of(kv_chunk), None)

    def remove(self, key: CacheEngineKey) -> None:
        """Take the chunk out, a queued one as well; no-op when it is not here."""
        self._puts.supersede(key)
        self._store.remove(self._names(key))

    def _release(self) -> None:
        self.mpool.close()

    # ---- what the engine calls ----

    def prefix_length(self, keys: Keys) -> int:
        """See LMCBackendInterface."""
        return self._store.prefix(list(map(self._names, keys)))

    def touch(self, keys: Keys, request: Hashable) -> None:
        """See LMCBackendInterface."""
        with self._store.pin_prefix(list(map(self._names, keys)), request):
            pass  # what was pinned is used

    @contextlib.contextmanager
    def prefix(self, keys: Keys, request: Hashable = None) -> Iterator[list[torch.Tensor]]:
        """Give the leading chunks where they lie: nothing is copied, and nothing evicts them meanwhile."""
        with self._store.pin_prefix(list(map(self._names, keys)), request) as rows:
            yield [self._tensor(row) for row, _ in rows]

    def put_chunks(self, chunks: Chunks, blocking: bool = True, request: Hashable = None) -> int:
        """See LMCBackendInterface. What is in host memory is copied in now in any case: the private copy that
        not waiting would need costs the caller just as much."""
        num_chunks = 0
        for key, source in chunks:
            if blocking or source.device.type == "cpu":
                self._put(key, source, request)
            else:
                chunk = source.to_tensor()
                self._puts.push(key, chunk, partial(self._put, key, ChunkSource.of(chunk), request))
            num_chunks += 1
        return num_chunks

    def _put(self, key: CacheEngineKey, source: ChunkSource, request: Hashable) -> None:
        def fill(row: int) -> None:
            self._contents[row] = _Contents(key, source.shape, source.dtype)
            room = self._tensor(row)
            source.copy_into(room)
            copies.settle(room)

        self._puts.supersede(key)
        fits = self._make_room(source.num_bytes)
        if not (fits and self._store.put(self._names(key), source.num_bytes, fill, request=request)):
            self._faults.note("A chunk was dropped", f"no room for its {source.num_bytes} bytes")

    def _make_room(self, num_bytes: int) -> bool:
        """Evict for a limit that was lowered; the store itself sees to the one that it has."""
        if self._store.capacity_bytes <= self._evictor.MAX_CACHE_SIZE:
            return True
        room = self._evictor.MAX_CACHE_SIZE - num_bytes
        return evict_down_to(room, lambda: self._store.num_bytes, self._store.keys, self._store.remove)

    def _tensor(self, row: int) -> torch.Tensor:
        """Return a pinned row's bytes as what they are."""
        _, shape, dtype = self._contents[row]
        return self.mpool.tensor(row, shape, dtype)

    def _copy_of(self, chunk: torch.Tensor) -> torch.Tensor:
        own = self._outputs.empty(chunk.shape, chunk.dtype, self.dst_device)
        copies.copy(own, chunk)
        copies.settle(own)
        return own

    def _keys(self) -> list[CacheEngineKey]:
        names = self._store.keys()
        keys = {self._names(contents.key): contents.key for contents in list(self._contents.values())}
        return [keys[name] for name in names if name in keys]


def create_local_backend(
    config: LMCacheEngineConfig,
    metadata: LMCacheEngineMetadata,
    pool: LMCacheMemPoolMetadata,
    dst_device: str,
) -> LMCLocalBackend | LMCLocalDiskBackend:
    """Return the backend of ``config.local_device``: memory, or a directory.

    A directory belongs to one process: of several workers each has one inside it.
    """
    if config.local_device in ("cpu", "cuda"):
        return LMCLocalBackend(config, pool, dst_device)
    if metadata.world_size > 1:
        directory = os.path.join(str(config.local_device), f"worker-{metadata.worker_id}")
        config = dataclasses.replace(config, local_device=directory)
    return LMCLocalDiskBackend(config, pool, dst_device)
