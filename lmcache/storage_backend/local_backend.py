"""Storage of chunks in the memory of this process, on the host or on a GPU."""

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
from lmcache.utils import CacheEngineKey
from lmcache_store.common.units import ceil_div
from lmcache_store.tiers.base import RowKey
from lmcache_store.tiers.memory.local import LocalStore

__all__ = ["LMCLocalBackend", "LMCLocalDiskBackend", "LocalBackendEndSignal", "save_disk"]

logger = init_logger(__name__)


class LocalBackendEndSignal:
    """Unused; part of the LMCache 0.1-0.3 API."""


class _Contents(NamedTuple):
    """Describes the bytes of a row. Written while the row is being filled, read while it is pinned."""

    key: CacheEngineKey
    shape: Sequence[int]
    dtype: torch.dtype


class LMCLocalBackend(EvictingBackend):
    """Stores chunks in memory, unchanged; any dtype and shape whose bytes fit is allowed.

    ``metadata`` gives the size of a full chunk; a shorter chunk needs less. You may lower
    ``evictor.MAX_CACHE_SIZE`` (bytes), but not raise it above the initial memory (``mpool``). You may assign
    another evictor (see ``EvictingBackend``).
    """

    _is_memory = True

    def __init__(
        self, config: LMCacheEngineConfig, metadata: LMCacheMemPoolMetadata, dst_device: str = "cuda"
    ) -> None:
        """Reserve ``metadata.max_local_cache_size`` GiB on ``config.local_device``.

        Raises RuntimeError if ``dst_device`` is not a device, and MemoryError.
        """
        super().__init__(dst_device, logger, metadata)
        device = usable_device(config.local_device or "cpu")
        self.mpool = TorchArena.for_chunks(self._chunk_bytes, self._limit.MAX_CACHE_SIZE, device)
        # Chunks never cross a multiple of _full_bytes. So the arena can hold this many of them in any order.
        num_slots = ceil_div(self._chunk_bytes, self.mpool.geometry.slot_bytes)
        self._full_bytes = self.mpool.geometry.slot_bytes << (num_slots - 1).bit_length()
        self._store = LocalStore(self.mpool)
        self._contents: dict[int, _Contents] = {}  # by a row's first slot; entries of free rows are stale
        self._gate = UseGate()  # keeps the memory from being released while it is used

    def get(self, key: CacheEngineKey) -> torch.Tensor | None:
        """Return a copy of the chunk on ``dst_device``, or None for a miss."""
        with self.prefix([key]) as chunks:
            return self._copy_of(chunks[0]) if chunks else None

    def _release(self) -> None:
        self._gate.close()
        self._outputs.close()
        self.mpool.close()

    # ---- methods for the engine ----

    def prefix_length(self, keys: Keys) -> int:
        """See LMCBackendInterface."""
        with self._gate.enter() as is_open:
            return self._store.prefix(list(map(self._names, keys))) if is_open else 0

    def touch(self, keys: Keys, request: Hashable) -> None:
        """See LMCBackendInterface."""
        with self._pinned(keys, request):
            pass  # pinning counts as a use

    @contextlib.contextmanager
    def prefix(self, keys: Keys, request: Hashable = None) -> Iterator[list[torch.Tensor]]:
        """Yield the leading stored chunks in place, without a copy. They are not evicted meanwhile."""
        with self._pinned(keys, request) as rows:
            yield [self._tensor(row) for row in rows]

    @contextlib.contextmanager
    def _pinned(self, keys: Keys, request: Hashable) -> Iterator[list[int]]:
        with self._gate.enter() as is_open:
            names = list(map(self._names, keys)) if is_open else []
            with self._store.pin_prefix(names, request) as rows:
                self._note_use(keys[: len(rows)])
                yield [row for row, _ in rows]

    def _put(self, key: CacheEngineKey, source: ChunkSource, request: Hashable) -> None:
        def fill(row: int) -> None:
            self._contents[row] = _Contents(key, source.shape, source.dtype)
            target = self._tensor(row)
            source.copy_into(target)
            tensors.synchronize(target)

        self._puts.supersede(key)
        put = partial(self._store.put, self._names(key), source.num_bytes, fill, request=request)
        with self._gate.enter() as is_open:
            if not is_open:
                self._faults.note("A chunk was dropped", "the backend is closed")
            elif not self._admit(key, source, put):
                self._faults.note("A chunk was dropped", f"no free memory for its {source.num_bytes} bytes")

    def _tensor(self, row: int) -> torch.Tensor:
        """Return a pinned row's bytes as a tensor of the chunk's shape and dtype."""
        _, shape, dtype = self._contents[row]
        return self.mpool.tensor(row, shape, dtype)

    def _copy_of(self, chunk: torch.Tensor) -> torch.Tensor:
        output = self._outputs.empty(chunk.shape, chunk.dtype, self.dst_device)
        tensors.copy(output, chunk)
        tensors.synchronize(output)
        return output

    # ---- eviction ----

    def _num_bytes(self) -> int:
        return self._store.num_bytes

    def _lowered_limit(self, num_bytes: int) -> float | None:
        limit = self._limit.MAX_CACHE_SIZE
        return limit - num_bytes if self._store.capacity_bytes > limit else None

    def _victims(self) -> list[RowKey]:
        return self._store.keys()

    def _remove(self, name: RowKey) -> None:
        self._store.remove(name)

    def _entries(self) -> Iterator[tuple[CacheEngineKey, KVObj]]:
        by_name = {self._names(contents.key): contents for contents in list(self._contents.values())}
        in_order = (by_name[name] for name in self._victims() if name in by_name)
        return ((contents.key, self._entry(*contents)) for contents in in_order)

    def _entry(self, key: CacheEngineKey, shape: Sequence[int], dtype: torch.dtype) -> KVObj:
        data = torch.empty(tuple(shape), dtype=dtype, device="meta")  # shape and dtype without bytes
        return KVObj(0, max(self._full_bytes, data.nbytes), data)

    def _end_eviction(self) -> None:
        self._store.end_eviction()


def create_local_backend(
    config: LMCacheEngineConfig,
    metadata: LMCacheEngineMetadata,
    pool: LMCacheMemPoolMetadata,
    dst_device: str,
) -> LMCLocalBackend | LMCLocalDiskBackend:
    """Return the backend for ``config.local_device``: memory, or a directory.

    A directory belongs to one process. If there are several workers, each uses its own subdirectory.
    """
    device = parse_local_device(config.local_device or "")
    if is_memory(device):
        return LMCLocalBackend(config, pool, dst_device)
    if metadata.world_size > 1:
        directory = os.path.join(device, f"worker-{metadata.worker_id}")
        config = dataclasses.replace(config, local_device=directory)
    return LMCLocalDiskBackend(config, pool, dst_device)
