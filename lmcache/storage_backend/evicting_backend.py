"""Common base of the backends of bounded size: eviction by the storage core or by a user's evictor."""

from __future__ import annotations

import abc
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch

from lmcache.config import LMCacheMemPoolMetadata
from lmcache.storage_backend.abstract_backend import LMCBackendInterface
from lmcache.storage_backend.chunks import Chunks, ChunkSource, RowNames
from lmcache.storage_backend.evictor import BaseEvictor, LRUEvictor, PutStatus
from lmcache.storage_backend.evictor.base_evictor import CacheDict
from lmcache.storage_backend.mem_pool import KVObj
from lmcache.storage_backend.queued_backend import QueuedBackend
from lmcache.storage_backend.tensors import OutputPool
from lmcache.utils import CacheEngineKey, DiskCacheMetadata
from lmcache_store.tiers.base import RowKey


class EvictingBackend(QueuedBackend):
    """A backend of bounded size that evicts chunks.

    By default the storage core evicts: the least recently used prompt first, its tail before its head. If you
    assign an evictor to ``evictor``, only that evictor decides from then on:

    - The backend calls ``update_on_put(cache_dict, num_bytes)`` before every put, and removes the returned
      keys.
    - The backend calls ``update_on_get(key, cache_dict)`` for every chunk that is used, the last chunk of a
      prompt first.
    - One lock covers all calls. The dictionary maps each key to a KVObj or DiskCacheMetadata.
    - ``num_bytes`` and the sizes in the dictionary are at least those of a full chunk. The chunks that the
      evictor allows therefore fit.
    - A chunk that the evictor refuses is dropped and counted. So is a chunk that the evictor allows but that
      does not fit, because a reader still holds a removed chunk. An evictor's exception is counted, too.
    """

    _is_memory = False
    """Whether a put only copies in memory, which is as fast as the private copy for a background put."""

    def __init__(self, dst_device: str, logger: logging.Logger, metadata: LMCacheMemPoolMetadata) -> None:
        """Derive the sizes of chunks and the limit from ``metadata``.

        Raises RuntimeError if ``dst_device`` is not a device.
        """
        super().__init__(dst_device, logger, waits=True)
        self._names = RowNames(metadata.kv_dtype, metadata.kv_shape)
        self._outputs = OutputPool(metadata.max_local_cache_size)
        self._chunk_bytes = math.prod(metadata.kv_shape) * metadata.kv_dtype.itemsize
        # While the core evicts, this evictor only holds the limit.
        self._limit = LRUEvictor(metadata.max_local_cache_size)
        self._evictor: BaseEvictor = self._limit
        self._evictor_lock = threading.RLock()  # protects _evictor and _chunks
        self._chunks: CacheDict | None = None
        self.dict = ChunksView(self, self._keys)

    def put_blocking(self, key: CacheEngineKey, kv_chunk: torch.Tensor) -> None:
        """Put the chunk now; drop it if it does not fit."""
        self._put(key, ChunkSource.of(kv_chunk), None)

    def put_chunks(self, chunks: Chunks, blocking: bool = True, request: Hashable = None) -> int:
        """See LMCBackendInterface. A blocking put copies straight to the chunk's final place."""
        num_chunks = 0
        for key, source in chunks:
            if blocking or (self._is_memory and source.device.type == "cpu"):
                self._put(key, source, request)
            else:
                chunk = source.to_tensor()
                self._puts.push(key, chunk, partial(self._put, key, ChunkSource.of(chunk), request))
            num_chunks += 1
        return num_chunks

    def remove(self, key: CacheEngineKey) -> None:
        """Remove the chunk, even if its put is still queued. Does nothing if it is not stored."""
        self._puts.supersede(key)
        self._forget(key)
        self._remove(self._names(key))

    @property
    def evictor(self) -> BaseEvictor:
        """The evictor in use.

        While the core evicts, it is an LRUEvictor with the limit and the bytes in use.
        """
        if self._chunks is None:
            self._limit.current_cache_size = self._num_bytes()
        return self._evictor

    @evictor.setter
    def evictor(self, evictor: BaseEvictor) -> None:
        with self._evictor_lock:
            if self._chunks is None:
                self._chunks = OrderedDict(self._entries())
                self._end_eviction()
            self._evictor = evictor

    def _admit(self, key: CacheEngineKey, source: ChunkSource, put: Callable[[], bool]) -> bool:
        """Evict chunks if necessary, and put this one. Returns False if the chunk was dropped."""
        if self._chunks is None:
            max_bytes = self._lowered_limit(source.num_bytes)
            return (max_bytes is None or self._evict_to(max_bytes, self._victims)) and put()
        with self._evictor_lock:
            entry = self._entry(key, source.shape, source.dtype)
            if self._chunks.pop(key, None) is not None:
                self._remove(self._names(key))
            try:
                victims, status = self._evictor.update_on_put(self._chunks, entry.size)
            except Exception as error:
                self._faults.note("The evictor failed", error)
                return False
            for victim in victims:
                self._chunks.pop(victim, None)  # the evictor may have removed the key itself
                if isinstance(victim, CacheEngineKey):
                    self._remove(self._names(victim))
            is_put = status == PutStatus.LEGAL and self._make_room(source.num_bytes) and put()
            if is_put:
                self._chunks[key] = entry
            return is_put

    def _note_use(self, keys: Sequence[CacheEngineKey]) -> None:
        """Report the use of one prompt's chunks to the evictor, in an order that evicts the head last."""
        if self._chunks is None:
            return
        with self._evictor_lock:
            for key in reversed(keys):
                if key in self._chunks:
                    try:
                        self._evictor.update_on_get(key, self._chunks)
                    except Exception as error:
                        self._faults.note("The evictor failed", error)

    def _forget(self, key: CacheEngineKey) -> None:
        """Remove the chunk from the evictor's dictionary."""
        if self._chunks is not None:
            with self._evictor_lock:
                self._chunks.pop(key, None)

    def _keys(self) -> list[CacheEngineKey]:
        with self._evictor_lock:
            return [key for key, _ in self._entries()] if self._chunks is None else list(self._chunks)

    def _evict_to(self, max_bytes: float, victims: Callable[[], Iterable[RowKey]]) -> bool:
        """Remove victims until at most ``max_bytes`` are in use. Returns False if that is impossible.

        If ``max_bytes`` is negative, nothing is removed.
        """
        if max_bytes >= 0 and self._num_bytes() > max_bytes:
            for name in victims():
                self._remove(name)
                if self._num_bytes() <= max_bytes:
                    break
        return self._num_bytes() <= max_bytes

    @abc.abstractmethod
    def _put(self, key: CacheEngineKey, source: ChunkSource, request: Hashable) -> None:
        """Put one chunk now; it replaces a stored or queued one.

        A chunk that does not fit counts as a fault.
        """

    @abc.abstractmethod
    def _num_bytes(self) -> int:
        """Return the bytes in use."""

    @abc.abstractmethod
    def _lowered_limit(self, num_bytes: int) -> float | None:
        """Return the bytes that may be in use before a chunk of ``num_bytes`` is put.

        Only for a limit that the user lowered while the core evicts. None: the limit was not lowered, and the
        core itself makes room.
        """

    @abc.abstractmethod
    def _victims(self) -> Iterable[RowKey]:
        """Return the row keys of all chunks, the core's next victim first."""

    @abc.abstractmethod
    def _remove(self, name: RowKey) -> None:
        """Remove a chunk's bytes."""

    @abc.abstractmethod
    def _entries(self) -> Iterable[tuple[CacheEngineKey, KVObj | DiskCacheMetadata]]:
        """Return all chunks, as an evictor sees them, the core's next victim first."""

    @abc.abstractmethod
    def _entry(
        self, key: CacheEngineKey, shape: Sequence[int], dtype: torch.dtype
    ) -> KVObj | DiskCacheMetadata:
        """Return the description of a chunk that an evictor sees."""

    def _end_eviction(self) -> None:
        """Stop eviction by the core."""

    def _make_room(self, num_bytes: int) -> bool:
        """Evict until a chunk that the evictor allowed fits. By default, the put itself checks that."""
        return True


class ChunksView(Mapping[CacheEngineKey, torch.Tensor]):
    """A read-only, live view of a backend's chunks, the next victim first: ``.dict`` of LMCache 0.1-0.3.

    Reading a value copies the chunk, and counts as a use of it.
    """

    def __init__(self, backend: LMCBackendInterface, keys: Callable[[], list[CacheEngineKey]]) -> None:
        self._backend = backend
        self._keys = keys

    def __getitem__(self, key: CacheEngineKey) -> torch.Tensor:
        chunk = self._backend.get(key)
        if chunk is None:
            raise KeyError(key)
        return chunk

    def __contains__(self, key: object) -> bool:
        return isinstance(key, CacheEngineKey) and self._backend.contains(key)

    def __iter__(self) -> Iterator[CacheEngineKey]:
        return iter(self._keys())

    def __len__(self) -> int:
        return len(self._keys())
