"""What the backends of bounded size have in common: somebody decides which chunks go."""

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
from lmcache.tiers.base import RowKey
from lmcache.utils import CacheEngineKey, DiskCacheMetadata


class EvictingBackend(QueuedBackend):
    """At first the storage core decides: the prompt used least recently goes, its tail before its head.

    An evictor that is assigned to ``evictor`` decides alone from then on. It is asked
    ``update_on_put(cache_dict, num_bytes)`` before every put, and told ``update_on_get(key, cache_dict)`` of
    every chunk that is used, of a prompt's the last one first; under one lock. The dictionary holds a KVObj
    or DiskCacheMetadata for each chunk; ``num_bytes`` and their sizes are those of a full chunk at least, so
    that as many as the limit has room for always fit. Keys that it returns are removed. What it allows and
    there is no room for (a reader may still hold what was removed), and what it does not allow, is dropped
    and counted; an evictor's error is counted.
    """

    _is_memory = False
    """A put is a copy in memory: it takes no longer than the private copy that not waiting needs."""

    def __init__(self, dst_device: str, logger: logging.Logger, metadata: LMCacheMemPoolMetadata) -> None:
        """Raises RuntimeError when ``dst_device`` is none."""
        super().__init__(dst_device, logger, waits=True)
        self._names = RowNames(metadata.kv_dtype, metadata.kv_shape)
        self._outputs = OutputPool(metadata.max_local_cache_size)
        self._chunk_bytes = math.prod(metadata.kv_shape) * metadata.kv_dtype.itemsize
        # Says how much may be taken as long as the core decides.
        self._limit = LRUEvictor(metadata.max_local_cache_size)
        self._evictor: BaseEvictor = self._limit
        self._deciding = threading.RLock()  # protects _evictor and _chunks
        self._chunks: CacheDict | None = None
        self.dict = ChunksView(self, self._keys)

    def put_blocking(self, key: CacheEngineKey, kv_chunk: torch.Tensor) -> None:
        """Put the chunk now; one that does not fit is dropped."""
        self._put(key, ChunkSource.of(kv_chunk), None)

    def put_chunks(self, chunks: Chunks, blocking: bool = True, request: Hashable = None) -> int:
        """See LMCBackendInterface. A put that is waited for copies straight to where the chunk stays."""
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
        """Take the chunk out, a queued one as well; no-op when it is not here."""
        self._puts.supersede(key)
        self._forget(key)
        self._remove(self._names(key))

    @property
    def evictor(self) -> BaseEvictor:
        """Who decides. As long as that is the core: its limit, and the bytes that are taken at the moment."""
        if self._chunks is None:
            self._limit.current_cache_size = self._num_bytes()
        return self._evictor

    @evictor.setter
    def evictor(self, evictor: BaseEvictor) -> None:
        with self._deciding:
            if self._chunks is None:
                self._chunks = OrderedDict(self._entries())
                self._end_eviction()
            self._evictor = evictor

    def _admit(self, key: CacheEngineKey, source: ChunkSource, put: Callable[[], bool]) -> bool:
        """Make room and put. False: dropped."""
        if self._chunks is None:
            room = self._lowered_room(source.num_bytes)
            return (room is None or self._evict_to(room, self._victims)) and put()
        with self._deciding:
            entry = self._entry(key, source.shape, source.dtype)
            if self._chunks.pop(key, None) is not None:
                self._remove(self._names(key))
            try:
                victims, status = self._evictor.update_on_put(self._chunks, entry.size)
            except Exception as error:
                self._faults.note("The evictor failed", error)
                return False
            for victim in victims:
                self._chunks.pop(victim, None)  # it may have done so itself
                if isinstance(victim, CacheEngineKey):
                    self._remove(self._names(victim))
            is_put = status == PutStatus.LEGAL and self._has_room(source.num_bytes) and put()
            if is_put:
                self._chunks[key] = entry
            return is_put

    def _used(self, keys: Sequence[CacheEngineKey]) -> None:
        """Chunks of one prompt were read: its head is to go last."""
        if self._chunks is None:
            return
        with self._deciding:
            for key in reversed(keys):
                if key in self._chunks:
                    try:
                        self._evictor.update_on_get(key, self._chunks)
                    except Exception as error:
                        self._faults.note("The evictor failed", error)

    def _forget(self, key: CacheEngineKey) -> None:
        """The chunk is gone."""
        if self._chunks is not None:
            with self._deciding:
                self._chunks.pop(key, None)

    def _keys(self) -> list[CacheEngineKey]:
        with self._deciding:
            return [key for key, _ in self._entries()] if self._chunks is None else list(self._chunks)

    def _evict_to(self, room: float, victims: Callable[[], Iterable[RowKey]]) -> bool:
        """Remove one victim after the other until at most ``room`` bytes are taken. False: that can't be;
        nothing is removed when ``room`` is negative."""
        if room >= 0 and self._num_bytes() > room:
            for name in victims():
                self._remove(name)
                if self._num_bytes() <= room:
                    break
        return self._num_bytes() <= room

    @abc.abstractmethod
    def _put(self, key: CacheEngineKey, source: ChunkSource, request: Hashable) -> None:
        """Put one chunk now, in place of the one that is there or queued; what does not fit is a fault."""

    @abc.abstractmethod
    def _num_bytes(self) -> int:
        """Return the bytes that are taken."""

    @abc.abstractmethod
    def _lowered_room(self, num_bytes: int) -> float | None:
        """While the core decides: how much may be taken before a chunk of ``num_bytes`` is put under a limit
        that was lowered; None: it was not, and the core itself makes room."""

    @abc.abstractmethod
    def _victims(self) -> Iterable[RowKey]:
        """Return the names of all chunks, the core's next victim first."""

    @abc.abstractmethod
    def _remove(self, name: RowKey) -> None:
        """Remove a chunk's bytes."""

    @abc.abstractmethod
    def _entries(self) -> Iterable[tuple[CacheEngineKey, KVObj | DiskCacheMetadata]]:
        """Return what is here, the core's next victim first."""

    @abc.abstractmethod
    def _entry(
        self, key: CacheEngineKey, shape: Sequence[int], dtype: torch.dtype
    ) -> KVObj | DiskCacheMetadata:
        """Return what an evictor sees of a chunk."""

    def _end_eviction(self) -> None:
        """The core does not decide any more."""

    def _has_room(self, num_bytes: int) -> bool:
        """Is there room for a chunk that the evictor allowed? Here the medium says so when it is asked."""
        return True


class ChunksView(Mapping[CacheEngineKey, torch.Tensor]):
    """A backend's chunks as a dictionary: ``.dict`` of the LMCache 0.1-0.3 API. Read-only and live, the next
    victim first. A value is a copy; reading one uses the chunk."""

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
