"""Chunks in a directory, found again after a restart."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Hashable, Iterable

import torch
from safetensors.torch import save_file

from lmcache.config import LMCacheEngineConfig, LMCacheMemPoolMetadata
from lmcache.logging import init_logger
from lmcache.storage_backend.chunk_names import ChunksView, RowNames
from lmcache.storage_backend.chunk_source import Chunks, ChunkSource, Keys
from lmcache.storage_backend.evictor import LRUEvictor
from lmcache.storage_backend.guard import Guard
from lmcache.storage_backend.output_pool import OutputPool
from lmcache.storage_backend.queued_backend import LocalBackendEndSignal, QueuedBackend, evict_down_to
from lmcache.tiers.base import RowKey
from lmcache.tiers.disk import DiskTier
from lmcache.tiers.disk_files import DirectoryInUse
from lmcache.tiers.header import MAX_LABEL_BYTES
from lmcache.utils import CacheEngineKey

_log = init_logger(__name__)

_MIN_KNOWN = 1024
_FILE_OVERHEAD_BYTES = 8192  # header, trailer, and the rest of the last block
_TRAILER_BYTES = 128  # behind the chunk's bytes: their dtype and shape as text


class LMCLocalDiskBackend(QueuedBackend):
    """Chunks are kept as they are given: dtype and shape may be any whose bytes fit.

    One file per chunk, checksummed; files of other makers are left alone. What a blocking put has written
    survives the process being killed. ``evictor.MAX_CACHE_SIZE`` (bytes) may be lowered, not raised.
    """

    def __init__(
        self, config: LMCacheEngineConfig, metadata: LMCacheMemPoolMetadata, dst_device: str = "cuda"
    ) -> None:
        """Use the directory ``config.local_device``, made when it isn't there, for at most
        ``metadata.max_local_cache_size`` GiB.

        Raises ValueError when there is no directory, RuntimeError when ``dst_device`` is none, and DiskError
        when the directory can't be used.
        """
        super().__init__(dst_device, LocalBackendEndSignal(), _log, waits=True)
        if not config.local_device:
            raise ValueError("a disk backend needs a directory as local_device")
        self._evictor = LRUEvictor(metadata.max_local_cache_size)
        self._chunk_bytes = math.prod(metadata.kv_shape) * metadata.kv_dtype.itemsize
        self._names = RowNames(metadata.kv_dtype, metadata.kv_shape)
        # A directory only tells names: these are the keys of those that this process wrote or read, and the
        # number of the engine's call in which it last did.
        self._known: dict[RowKey, tuple[CacheEngineKey, int]] = {}
        self._num_calls = 0
        self._max_known = _MIN_KNOWN
        self._outputs = OutputPool()
        self._capacity = self._bytes_on_disk()
        self._tier = _open_tier(config.local_device, self._capacity)
        self._guard = Guard(self._tier.breaker, self._tier.try_again, self._faults)
        self.dict = ChunksView(self, self._keys)

    @property
    def evictor(self) -> LRUEvictor:
        """The limit, and the bytes of the volume that are taken at the moment of asking."""
        self._evictor.current_cache_size = self._tier.num_bytes
        return self._evictor

    def contains(self, key: CacheEngineKey) -> bool:
        """Is the chunk here, its file written?"""
        return self.prefix_length([key]) == 1

    def get(self, key: CacheEngineKey) -> torch.Tensor | None:
        """Return the chunk on ``dst_device``; None: a miss, or a put that is not finished."""
        name = self._names(key)
        room = self._outputs.empty([self._chunk_bytes + _TRAILER_BYTES], torch.uint8)
        into = room.numpy().data
        length = self._guard.call("A read", lambda: self._tier.load(name, 0, into), None)
        chunk = None if length is None else _chunk_in(room[:length])
        if chunk is None:
            return None
        self._remember(name, key)
        return chunk.to(self.dst_device)

    def batched_get(self, keys: Iterable[CacheEngineKey]) -> Iterable[torch.Tensor | None]:
        """Yield one answer per key, in their order, each read only when it is asked for."""
        self._num_calls += 1
        return map(self.get, keys)

    def put_blocking(self, key: CacheEngineKey, kv_chunk: torch.Tensor) -> None:
        """Write the chunk's file now; a chunk that does not fit is dropped."""
        self._write(key, ChunkSource.of(kv_chunk))

    def buffer_sweeper(self) -> None:
        """Give memory that is kept for the next results back to the system. (No put holds memory beyond its
        end, so that is all there is to sweep.)"""
        self._outputs.clear()

    def remove(self, key: CacheEngineKey) -> None:
        """Delete the chunk's file, and forget a queued one; no-op when it is not here."""
        self._puts.supersede(key)
        self._guard.call("A removal", lambda: self._tier.remove(self._names(key), 0), False)

    def _release(self) -> None:
        self._guard.close()
        self._tier.close()

    # ---- what the engine calls ----

    def prefix_length(self, keys: Keys) -> int:
        """See LMCBackendInterface."""
        names = list(map(self._names, keys))
        return self._guard.call("A look", lambda: self._tier.probe(names, 1), 0)

    def touch(self, keys: Keys, request: Hashable) -> None:
        """See LMCBackendInterface. On a disk, what is used at about the same time goes tail first."""
        names = list(map(self._names, keys))
        self._num_calls += 1
        self._guard.call("A touch", lambda: self._tier.touch(names, 1), None)

    def put_chunks(self, chunks: Chunks, blocking: bool = True, request: Hashable = None) -> int:
        """See LMCBackendInterface. A blocking put copies straight into what is written."""
        if not blocking:
            return super().put_chunks(chunks, blocking, request)
        num_chunks = 0
        for key, source in chunks:
            self._write(key, source)
            num_chunks += 1
        return num_chunks

    def _bytes_on_disk(self) -> int:
        """Return what the limit's number of full chunks takes: what files need beside them is not the user's
        concern."""
        limit = int(self._evictor.MAX_CACHE_SIZE)
        return limit + limit // self._chunk_bytes * _FILE_OVERHEAD_BYTES

    def _make_room(self, num_bytes: int) -> bool:
        """Evict for a limit that was lowered; the tier itself sees to the one that it has."""
        capacity = self._bytes_on_disk()
        if capacity >= self._capacity:
            return True
        room = capacity - num_bytes - _FILE_OVERHEAD_BYTES
        tier = self._tier
        return evict_down_to(room, lambda: tier.num_bytes, self._victims, lambda name: tier.remove(name, 0))

    def _victims(self) -> list[RowKey]:
        """Return all rows, the one used in the earliest call first; the tier's own order, which has the tail
        of a chain before its head, is too coarse for a small part of its capacity."""
        known = dict(self._known)
        return sorted(self._tier.keys(), key=lambda name: known[name][1] if name in known else 0)

    def _write(self, key: CacheEngineKey, source: ChunkSource) -> None:
        self._puts.supersede(key)
        name = self._names(key)

        def replace() -> None:
            if source.num_bytes > self._chunk_bytes:
                raise ValueError(f"{source.num_bytes} bytes are more than a full chunk")
            content = self._outputs.empty([source.num_bytes + _TRAILER_BYTES], torch.uint8)
            source.copy_into(content[:-_TRAILER_BYTES].view(source.dtype).view(tuple(source.shape)))
            payload = content.numpy().data
            payload[-_TRAILER_BYTES:] = _trailer(source)
            self._tier.remove(name, 0)  # a store leaves what is there
            label = key.to_string().encode()[:MAX_LABEL_BYTES]
            if not (self._make_room(source.num_bytes) and self._tier.store(name, 0, payload, label)):
                raise ValueError("there is no room")
            self._remember(name, key)

        self._guard.call("A write", replace, None)

    def _remember(self, name: RowKey, key: CacheEngineKey) -> None:
        self._known[name] = key, self._num_calls
        if len(self._known) > self._max_known:
            here = set(self._tier.keys())
            self._known = {name: use for name, use in list(self._known.items()) if name in here}
            self._max_known = 2 * len(self._known) + _MIN_KNOWN

    def _keys(self) -> list[CacheEngineKey]:
        names = self._tier.keys()
        return [self._known[name][0] for name in names if name in self._known]


def save_disk(path: str, kv_chunk: torch.Tensor) -> None:
    """Write a chunk as a safetensors file whose one tensor is "kv_chunk"; ``path`` is replaced at once."""
    directory, name = os.path.split(path)
    with tempfile.NamedTemporaryFile(dir=directory or ".", prefix=f".{name}.", delete=False) as file:
        temporary = file.name
    try:
        save_file({"kv_chunk": kv_chunk.contiguous()}, temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _open_tier(directory: str, capacity_bytes: int) -> DiskTier:
    """A directory belongs to one engine: others that want it at the same time have one inside it each."""
    number, path = 1, directory
    while True:
        try:
            return DiskTier(path, capacity_bytes)
        except DirectoryInUse:
            number += 1
            path = os.path.join(directory, f"engine-{number}")


def _trailer(source: ChunkSource) -> bytes:
    dtype = str(source.dtype).removeprefix("torch.")
    return " ".join([dtype, *map(str, source.shape)]).encode().ljust(_TRAILER_BYTES)


def _chunk_in(content: torch.Tensor) -> torch.Tensor | None:
    """Return the chunk in a file's bytes, a view; None when they are none."""
    try:
        name, *shape = bytes(content[-_TRAILER_BYTES:].numpy()).decode("ascii").split()
        return content[:-_TRAILER_BYTES].view(getattr(torch, name)).view(tuple(map(int, shape)))
    except (ValueError, RuntimeError, TypeError, AttributeError):
        return None
