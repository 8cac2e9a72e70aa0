"""Chunks in a directory, found again after a restart."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Hashable, Iterable, Iterator, Sequence

import torch
from safetensors.torch import save_file

from lmcache.config import LMCacheEngineConfig, LMCacheMemPoolMetadata, is_memory, parse_local_device
from lmcache.logging import init_logger
from lmcache.storage_backend.chunks import ChunkSource, Keys
from lmcache.storage_backend.evicting_backend import EvictingBackend
from lmcache.storage_backend.guard import Guard
from lmcache.storage_backend.serde.container import DESCRIPTION_BYTES, describe, described
from lmcache.tiers.base import ObjectId, RowKey
from lmcache.tiers.disk.files import path_of
from lmcache.tiers.disk.tier import DiskTier
from lmcache.tiers.errors import DirectoryInUseError
from lmcache.tiers.header import MAX_LABEL_BYTES
from lmcache.utils import CacheEngineKey, DiskCacheMetadata

logger = init_logger(__name__)

_MIN_KNOWN = 1024
_FILE_OVERHEAD_BYTES = 8192  # header, trailer, and the rest of the last block


class LMCLocalDiskBackend(EvictingBackend):
    """Chunks are kept as they are given: any shape whose bytes fit, any dtype of a container.

    One file per chunk, checksummed; files of other makers are left alone. What a blocking put has written
    survives the process being killed. ``evictor.MAX_CACHE_SIZE`` (bytes) may be lowered, not raised. Another
    evictor may be assigned (``EvictingBackend``); files of earlier processes that were not read since go
    before anything that it knows of.
    """

    def __init__(
        self, config: LMCacheEngineConfig, metadata: LMCacheMemPoolMetadata, dst_device: str = "cuda"
    ) -> None:
        """Use the directory ``config.local_device``, made when it isn't there, for at most
        ``metadata.max_local_cache_size`` GiB.

        Raises ValueError when there is no directory, RuntimeError when ``dst_device`` is none, and DiskError
        when the directory can't be used.
        """
        super().__init__(dst_device, logger, metadata)
        directory = parse_local_device(config.local_device or "cpu")
        if is_memory(directory):
            raise ValueError("a disk backend needs a directory as local_device")
        # A directory only tells names: these are the keys of those that this process wrote or read, and the
        # number of the engine's call in which it last did.
        self._known: dict[RowKey, tuple[CacheEngineKey, int]] = {}
        self._num_calls = 0
        self._max_known = _MIN_KNOWN
        self._capacity = self._bytes_on_disk()
        self._directory, self._tier = _open_tier(directory, self._capacity)
        self._guard = Guard(self._tier.health, self._faults)

    def get(self, key: CacheEngineKey) -> torch.Tensor | None:
        """Return the chunk on ``dst_device``; None: a miss, or a put that is not finished."""
        chunk = self._read(key)
        if chunk is not None:
            self._used([key])
        return chunk

    def _read(self, key: CacheEngineKey) -> torch.Tensor | None:
        name = self._names(key)
        room = self._outputs.empty([self._chunk_bytes + DESCRIPTION_BYTES], torch.uint8)
        into = room.numpy().data
        loaded = self._guard.call("A read", lambda: self._tier.load(ObjectId(name, 0), into), None)
        chunk = None if loaded is None else _chunk_in(room[: loaded.length])
        if chunk is None:
            if loaded is not None:  # of another version, say: who sees that it is there would never put it
                self._faults.note("A file can't be read as a chunk, and is removed")
                self._guard.call("A removal", lambda: self._remove(name), None)
            with self._deciding:  # somebody may have put it since
                if not self.contains(key):
                    self._forget(key)
            return None
        self._remember(name, key)
        return chunk.to(self.dst_device)

    def batched_get(self, keys: Iterable[CacheEngineKey]) -> Iterable[torch.Tensor | None]:
        """Yield one answer per key, in their order, each read only when it is asked for."""
        self._num_calls += 1
        return map(self.get, keys)

    def remove(self, key: CacheEngineKey) -> None:
        """See EvictingBackend; a fault is counted."""
        self._puts.supersede(key)  # also while the disk is unavailable
        self._guard.call("A removal", lambda: super(LMCLocalDiskBackend, self).remove(key), None)

    def buffer_sweeper(self) -> None:
        """Give memory that is kept for the next results back to the system. (No put holds memory beyond its
        end, so that is all there is to sweep.)"""
        self._outputs.clear()

    def _release(self) -> None:
        self._guard.close()
        self._outputs.close()
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
        self._used(keys)

    @contextlib.contextmanager
    def prefix(self, keys: Keys, request: Hashable = None) -> Iterator[list[torch.Tensor]]:
        """See LMCBackendInterface."""
        self._num_calls += 1
        chunks: list[torch.Tensor] = []
        for key in keys:
            chunk = self._read(key)
            if chunk is None:
                break
            chunks.append(chunk)
        self._used(keys[: len(chunks)])
        yield chunks

    def _bytes_on_disk(self) -> int:
        """Return what the limit's number of full chunks takes: what files need beside them is not the user's
        concern."""
        limit = int(self._limit.MAX_CACHE_SIZE)
        return limit + limit // self._chunk_bytes * _FILE_OVERHEAD_BYTES

    def _lowered_room(self, num_bytes: int) -> float | None:
        capacity = self._bytes_on_disk()
        return capacity - num_bytes - _FILE_OVERHEAD_BYTES if capacity < self._capacity else None

    def _victims(self) -> list[RowKey]:
        """Return all rows, the one used in the earliest call first; the tier's own order, which has the tail
        of a chain before its head, is too coarse for a small part of its capacity."""
        known = dict(self._known)
        return sorted(self._tier.keys(), key=lambda name: known[name][1] if name in known else 0)

    def _put(self, key: CacheEngineKey, source: ChunkSource, request: Hashable) -> None:
        self._puts.supersede(key)
        name = self._names(key)

        def replace() -> None:
            if source.num_bytes > self._chunk_bytes:
                raise ValueError(f"{source.num_bytes} bytes are more than a full chunk")
            # The chunk's bytes, which begin where memory is aligned, and what they are.
            content = self._outputs.empty([source.num_bytes + DESCRIPTION_BYTES], torch.uint8)
            source.copy_into(content[:-DESCRIPTION_BYTES].view(source.dtype).view(tuple(source.shape)))
            payload = content.numpy().data
            payload[-DESCRIPTION_BYTES:] = describe(source.dtype, source.shape, source.num_bytes)
            self._remove(name)  # a store leaves what is there
            label = key.to_string().encode()[:MAX_LABEL_BYTES]

            def put() -> bool:
                is_stored = self._tier.store(ObjectId(name, 0), payload, label)
                if is_stored:
                    self._remember(name, key)
                return is_stored

            if not self._admit(key, source, put):
                raise ValueError("there is no room")

        self._guard.call("A write", replace, None)

    def _remember(self, name: RowKey, key: CacheEngineKey) -> None:
        self._known[name] = key, self._num_calls
        if self._chunks is not None:
            with self._deciding:  # somebody may have evicted it since
                if key not in self._chunks and self._tier.probe([name], 1):
                    self._chunks[key] = self._entry(key)
        if len(self._known) > self._max_known:
            here = set(self._tier.keys())
            self._known = {name: use for name, use in list(self._known.items()) if name in here}
            self._max_known = 2 * len(self._known) + _MIN_KNOWN

    # ---- eviction ----

    def _num_bytes(self) -> int:
        return self._tier.used_bytes

    def _entries(self) -> Iterator[tuple[CacheEngineKey, DiskCacheMetadata]]:
        # Until the index is built, the tier names none.
        names = self._tier.keys() if self._tier.indexed.is_set() else list(self._known)
        keys = [self._known[name][0] for name in names if name in self._known]
        return ((key, self._entry(key)) for key in keys)

    def _entry(
        self, key: CacheEngineKey, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> DiskCacheMetadata:
        path = os.path.join(self._directory, path_of(ObjectId(self._names(key), 0)))
        size = None if shape is None else torch.Size(shape)
        return DiskCacheMetadata(path, self._chunk_bytes, size, dtype)

    def _has_room(self, num_bytes: int) -> bool:
        def unknown() -> list[RowKey]:
            known, names = set(map(self._names, self._chunks or ())), self._tier.keys()
            return [name for name in names if name not in known]

        return self._evict_to(self._capacity - num_bytes - _FILE_OVERHEAD_BYTES, unknown)

    def _remove(self, name: RowKey) -> None:
        self._tier.remove(ObjectId(name, 0))


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


def _open_tier(directory: str, capacity_bytes: int) -> tuple[str, DiskTier]:
    """A directory belongs to one engine: others that want it at the same time have one inside it each."""
    number, path = 1, directory
    while True:
        try:
            return path, DiskTier(path, capacity_bytes)
        except DirectoryInUseError:
            number += 1
            path = os.path.join(directory, f"engine-{number}")
            logger.warning(
                "%s belongs to another engine: this one has %s, a cache of its own", directory, path
            )


def _chunk_in(content: torch.Tensor) -> torch.Tensor | None:
    """Return the chunk in a file's bytes, a view; None when they are none."""
    try:
        _, dtype, shape = described(content[-DESCRIPTION_BYTES:].numpy().data)
        return content[:-DESCRIPTION_BYTES].view(dtype).view(shape)
    except (ValueError, RuntimeError):  # no description, or of something else
        return None
