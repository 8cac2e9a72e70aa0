"""Chunks in the memory of this process, on the host or on the GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from lmcache.config import (
    LMCacheEngineConfig,
    LMCacheEngineMetadata,
    LMCacheMemPoolMetadata,
    is_memory,
    parse_local_device,
)
from lmcache.logging import init_logger
from lmcache.storage_backend import tensors
from lmcache.storage_backend.chunks import ChunkSource, Keys
from lmcache.storage_backend.evicting_backend import EvictingBackend
from lmcache.storage_backend.guard import UseGate
from lmcache.storage_backend.local_disk_backend import LMCLocalDiskBackend, save_disk
from lmcache.storage_backend.mem_pool import KVObj, TorchArena
from lmcache.storage_backend.tensors import usable_device
from lmcache.tiers.base import RowKey
from lmcache.tiers.memory.local import LocalStore
from lmcache.units import ceil_div
from lmcache.utils import CacheEngineKey

__all__ = ["LMCLocalBackend", "LMCLocalDiskBackend", "LocalBackendEndSignal", "save_disk"]

logger = init_logger(__name__)


class LocalBackendEndSignal:
    """Of the LMCache 0.1-0.3 API: nothing uses it."""


class _Contents(NamedTuple):
    """What the bytes of a row are: written while the row is being filled, read while it is pinned."""

    key: CacheEngineKey
    shape: Sequence[int]
    dtype: torch.dtype


class LMCLocalBackend(EvictingBackend):
    """Chunks are kept as they are given: dtype and shape may be any whose bytes fit.

    ``metadata`` says what a full chunk is; a shorter one takes less. ``evictor.MAX_CACHE_SIZE`` (bytes) may
    be lowered, not raised above the memory that was taken at the start: ``mpool``. Another evictor may be
    assigned (``EvictingBackend``).
    """

    _is_memory = True

    def __init__(
        self, config: LMCacheEngineConfig, metadata: LMCacheMemPoolMetadata, dst_device: str = "cuda"
    ) -> None:
        """Take ``metadata.max_local_cache_size`` GiB on ``config.local_device``.

        Raises RuntimeError when ``dst_device`` is none, and MemoryError.
        """
        super().__init__(dst_device, logger, metadata)
        device = usable_device(config.local_device or "cpu")
        self.mpool = TorchArena.for_chunks(self._chunk_bytes, self._limit.MAX_CACHE_SIZE, device)
        # Of these there are as many as have room, wherever others lie: chunks never cross a multiple of it.
        num_slots = ceil_div(self._chunk_bytes, self.mpool.geometry.slot_bytes)
        self._full_bytes = self.mpool.geometry.slot_bytes << (num_slots - 1).bit_length()
        self._store = LocalStore(self.mpool)
        self._contents: dict[int, _Contents] = {}  # of rows by their first slot; those of free rows are stale
        self._gate = UseGate()  # of the memory

    def get(self, key: CacheEngineKey) -> torch.Tensor | None:
        """Return a copy on ``dst_device``; None: a miss."""
        with self.prefix([key]) as chunks:
            return self._copy_of(chunks[0]) if chunks else None

    def _release(self) -> None:
        self._gate.close()
        self._outputs.close()
        self.mpool.close()

    # ---- what the engine calls ----

    def prefix_length(self, keys: Keys) -> int:
        """See LMCBackendInterface."""
        with self._gate.enter() as is_open:
            return self._store.prefix(list(map(self._names, keys))) if is_open else 0

    def touch(self, keys: Keys, request: Hashable) -> None:
        """See LMCBackendInterface."""
        with self._pinned(keys, request):
            pass  # what was pinned is used

    @contextlib.contextmanager
    def prefix(self, keys: Keys, request: Hashable = None) -> Iterator[list[torch.Tensor]]:
        """Give the leading chunks where they lie: nothing is copied, and nothing evicts them meanwhile."""
        with self._pinned(keys, request) as rows:
            yield [self._tensor(row) for row in rows]

    @contextlib.contextmanager
    def _pinned(self, keys: Keys, request: Hashable) -> Iterator[list[int]]:
        with self._gate.enter() as is_open:
            names = list(map(self._names, keys)) if is_open else []
            with self._store.pin_prefix(names, request) as rows:
                self._used(keys[: len(rows)])
                yield [row for row, _ in rows]

    def _put(self, key: CacheEngineKey, source: ChunkSource, request: Hashable) -> None:
        def fill(row: int) -> None:
            self._contents[row] = _Contents(key, source.shape, source.dtype)
            room = self._tensor(row)
            source.copy_into(room)
            tensors.synchronize(room)

        self._puts.supersede(key)
        put = partial(self._store.put, self._names(key), source.num_bytes, fill, request=request)
        with self._gate.enter() as is_open:
            if not is_open:
                self._faults.note("A chunk was dropped", "closed")
            elif not self._admit(key, source, put):
                self._faults.note("A chunk was dropped", f"no room for its {source.num_bytes} bytes")

    def _tensor(self, row: int) -> torch.Tensor:
        """Return a pinned row's bytes as what they are."""
        _, shape, dtype = self._contents[row]
        return self.mpool.tensor(row, shape, dtype)

    def _copy_of(self, chunk: torch.Tensor) -> torch.Tensor:
        own = self._outputs.empty(chunk.shape, chunk.dtype, self.dst_device)
        tensors.copy(own, chunk)
        tensors.synchronize(own)
        return own

    # ---- eviction ----

    def _num_bytes(self) -> int:
        return self._store.num_bytes

    def _lowered_room(self, num_bytes: int) -> float | None:
        limit = self._limit.MAX_CACHE_SIZE
        return limit - num_bytes if self._store.capacity_bytes > limit else None

    def _victims(self) -> list[RowKey]:
        return self._store.keys()

    def _remove(self, name: RowKey) -> None:
        self._store.remove(name)

    def _entries(self) -> Iterator[tuple[CacheEngineKey, KVObj]]:
        known = {self._names(contents.key): contents for contents in list(self._contents.values())}
        in_order = (known[name] for name in self._victims() if name in known)
        return ((contents.key, self._entry(*contents)) for contents in in_order)

    def _entry(self, key: CacheEngineKey, shape: Sequence[int], dtype: torch.dtype) -> KVObj:
        data = torch.empty(tuple(shape), dtype=dtype, device="meta")  # what it is, without its bytes
        return KVObj(0, max(self._full_bytes, data.nbytes), data)

    def _end_eviction(self) -> None:
        self._store.end_eviction()


def create_local_backend(
    config: LMCacheEngineConfig,
    metadata: LMCacheEngineMetadata,
    pool: LMCacheMemPoolMetadata,
    dst_device: str,
) -> LMCLocalBackend | LMCLocalDiskBackend:
    """Return the backend of ``config.local_device``: memory, or a directory.

    A directory belongs to one process: of several workers each has one inside it.
    """
    device = parse_local_device(config.local_device or "")
    if is_memory(device):
        return LMCLocalBackend(config, pool, dst_device)
    if metadata.world_size > 1:
        directory = os.path.join(device, f"worker-{metadata.worker_id}")
        config = dataclasses.replace(config, local_device=directory)
    return LMCLocalDiskBackend(config, pool, dst_device)
