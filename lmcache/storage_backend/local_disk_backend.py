"""Storage of chunks in a directory, where they survive a restart."""

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
from lmcache.utils import CacheEngineKey, DiskCacheMetadata
from lmcache_store.tiers.base import ObjectId, RowKey, StoredId
from lmcache_store.tiers.disk.files import path_of
from lmcache_store.tiers.disk.tier import DiskTier
from lmcache_store.tiers.errors import DirectoryInUseError
from lmcache_store.tiers.header import MAX_LABEL_BYTES
from lmcache_store.tiers.probing import num_leading

logger = init_logger(__name__)

_MIN_KNOWN_KEYS = 1024
_FILE_OVERHEAD_BYTES = 8192  # header, trailer, and the unused part of the last block


class LMCLocalDiskBackend(EvictingBackend):
    """Stores chunks in a directory, unchanged.

    Any shape whose bytes fit and any dtype of a container is allowed. Each chunk is one file with a checksum.
    The backend does not touch other programs' files. A chunk of a blocking put survives a crash of the
    process. You may lower ``evictor.MAX_CACHE_SIZE`` (bytes), but not raise it. You may assign another
    evictor (see ``EvictingBackend``). It does not see files of earlier processes until they are read; such
    files are evicted before all others.
    """

    def __init__(
        self, config: LMCacheEngineConfig, metadata: LMCacheMemPoolMetadata, dst_device: str = "cuda"
    ) -> None:
        """Store up to ``metadata.max_local_cache_size`` GiB in the directory ``config.local_device``.

        Creates the directory if it does not exist. Raises ValueError if ``local_device`` is not a directory,
        RuntimeError if ``dst_device`` is not a device, and DiskError if the directory is unusable.
        """
        super().__init__(dst_device, logger, metadata)
        directory = parse_local_device(config.local_device or "cpu")
        if is_memory(directory):
            raise ValueError("a disk backend needs a directory as local_device")
        # The tier lists only row keys. This dictionary adds the keys of all chunks that this process wrote or
        # read, and the number of the engine's call that last did so.
        self._known: dict[RowKey, tuple[CacheEngineKey, int]] = {}
        self._num_calls = 0
        self._max_known = _MIN_KNOWN_KEYS
        self._capacity = self._bytes_on_disk()
        self._directory, self._tier = _open_tier(directory, self._capacity)
        self._guard = Guard(self._tier.health, self._faults)

    def get(self, key: CacheEngineKey) -> torch.Tensor | None:
        """Return the chunk on ``dst_device``, or None for a miss or if its put is not complete."""
        chunk = self._read(key)
        if chunk is not None:
            self._note_use([key])
        return chunk

    def _read(self, key: CacheEngineKey) -> torch.Tensor | None:
        name = self._names(key)
        buffer = self._outputs.empty([self._chunk_bytes + DESCRIPTION_BYTES], torch.uint8)
        target = buffer.numpy().data
        loaded = self._guard.call("A read", lambda: self._tier.load(ObjectId(name, 0), target), None)
        chunk = None if loaded is None else _chunk_in(buffer[: loaded.length])
        if chunk is None:
            if loaded is not None:
                # The file may have another version. If it stayed, the chunk would never be put again.
                self._faults.note("A file was removed", "it does not contain a chunk")
                self._guard.call("A removal", lambda: self._remove(name), None)
            with self._evictor_lock:  # another thread may have put the chunk since
                if not self.contains(key):
                    self._forget(key)
            return None
        self._remember(name, key)
        return chunk.to(self.dst_device)

    def batched_get(self, keys: Iterable[CacheEngineKey]) -> Iterable[torch.Tensor | None]:
        """Yield the chunk of each key in order, or None for a miss. Reads each chunk when you ask for it."""
        self._num_calls += 1
        return map(self.get, keys)

    def remove(self, key: CacheEngineKey) -> None:
        """See EvictingBackend. A fault of the disk is counted."""
        self._puts.supersede(key)  # this must happen even if the disk is unavailable
        self._guard.call("A removal", lambda: super(LMCLocalDiskBackend, self).remove(key), None)

    def buffer_sweeper(self) -> None:
        """Release the memory that is cached for future results. Puts hold no memory after they end."""
        self._outputs.clear()

    def _release(self) -> None:
        self._guard.close()
        self._outputs.close()
        self._tier.close()

    # ---- methods for the engine ----

    def prefix_length(self, keys: Keys) -> int:
        """See LMCBackendInterface."""
        names = list(map(self._names, keys))
        return self._guard.call("A lookup", lambda: num_leading(self._tier, names, 1), 0)

    def touch(self, keys: Keys, request: Hashable) -> None:
        """See LMCBackendInterface. The disk evicts chunks of about the same age tail first."""
        names = list(map(self._names, keys))
        self._num_calls += 1
        self._guard.call("A touch", lambda: self._tier.touch(names, 1), None)
        self._note_use(keys)

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
        self._note_use(keys[: len(chunks)])
        yield chunks

    def _bytes_on_disk(self) -> int:
        """Return the bytes on disk for as many full chunks as the limit allows.

        The user's limit counts only bytes of chunks, not the overhead of files.
        """
        limit = int(self._limit.MAX_CACHE_SIZE)
        return limit + limit // self._chunk_bytes * _FILE_OVERHEAD_BYTES

    def _lowered_limit(self, num_bytes: int) -> float | None:
        capacity = self._bytes_on_disk()
        return capacity - num_bytes - _FILE_OVERHEAD_BYTES if capacity < self._capacity else None

    def _victims(self) -> list[RowKey]:
        """Return all rows, least recent call first.

        The tier's own order (tail of a chain before its head) is too coarse for a limit far below its
        capacity.
        """
        known = dict(self._known)
        return sorted(self._tier.keys(), key=lambda name: known[name][1] if name in known else 0)

    def _put(self, key: CacheEngineKey, source: ChunkSource, request: Hashable) -> None:
        self._puts.supersede(key)
        name = self._names(key)

        def replace() -> None:
            if source.num_bytes > self._chunk_bytes:
                raise ValueError(f"{source.num_bytes} bytes are more than a full chunk")
            # The description is behind the chunk's bytes, so that these are aligned.
            content = self._outputs.empty([source.num_bytes + DESCRIPTION_BYTES], torch.uint8)
            source.copy_into(content[:-DESCRIPTION_BYTES].view(source.dtype).view(tuple(source.shape)))
            payload = content.numpy().data
            payload[-DESCRIPTION_BYTES:] = describe(source.dtype, source.shape, source.num_bytes)
            self._remove(name)  # the tier's store does not replace an existing object
            label = key.to_string().encode()[:MAX_LABEL_BYTES]

            def put() -> bool:
                is_stored = self._tier.store(ObjectId(name, 0), payload, label)
                if is_stored:
                    self._remember(name, key)
                return is_stored

            if not self._admit(key, source, put):
                raise ValueError("the chunk does not fit, or the evictor refused it")

        self._guard.call("A write", replace, None)

    def _remember(self, name: RowKey, key: CacheEngineKey) -> None:
        self._known[name] = key, self._num_calls
        if self._chunks is not None:
            with self._evictor_lock:  # another thread may have evicted the chunk since
                if key not in self._chunks and self._tier.contains(ObjectId(name, 0)):
                    self._chunks[key] = self._entry(key)
        if len(self._known) > self._max_known:
            stored = set(self._tier.keys())
            self._known = {name: use for name, use in list(self._known.items()) if name in stored}
            self._max_known = 2 * len(self._known) + _MIN_KNOWN_KEYS

    # ---- eviction ----

    def _num_bytes(self) -> int:
        return self._tier.used_bytes

    def _entries(self) -> Iterator[tuple[CacheEngineKey, DiskCacheMetadata]]:
        # Until its index is built, the tier returns no keys.
        names = self._tier.keys() if self._tier.indexed.is_set() else list(self._known)
        keys = [self._known[name][0] for name in names if name in self._known]
        return ((key, self._entry(key)) for key in keys)

    def _entry(
        self, key: CacheEngineKey, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> DiskCacheMetadata:
        path = os.path.join(self._directory, path_of(StoredId(ObjectId(self._names(key), 0))))
        size = None if shape is None else torch.Size(shape)
        return DiskCacheMetadata(path, self._chunk_bytes, size, dtype)

    def _make_room(self, num_bytes: int) -> bool:
        def unknown() -> list[RowKey]:
            known, names = set(map(self._names, self._chunks or ())), self._tier.keys()
            return [name for name in names if name not in known]

        return self._evict_to(self._capacity - num_bytes - _FILE_OVERHEAD_BYTES, unknown)

    def _remove(self, name: RowKey) -> None:
        self._tier.remove(ObjectId(name, 0))


def save_disk(path: str, kv_chunk: torch.Tensor) -> None:
    """Write a chunk to ``path`` as a safetensors file with one tensor, "kv_chunk". Replaces it atomically."""
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
    """Open a tier in ``directory``, or in a subdirectory if another engine uses ``directory`` already."""
    number, path = 1, directory
    while True:
        try:
            return path, DiskTier(path, capacity_bytes)
        except DirectoryInUseError:
            number += 1
            path = os.path.join(directory, f"engine-{number}")
            logger.warning("Another engine uses %s; this engine uses a cache of its own: %s", directory, path)


def _chunk_in(content: torch.Tensor) -> torch.Tensor | None:
    """Return the chunk in a file's bytes, as a view, or None if they are not a chunk."""
    try:
        _, dtype, shape = described(content[-DESCRIPTION_BYTES:].numpy().data)
        return content[:-DESCRIPTION_BYTES].view(dtype).view(shape)
    except (ValueError, RuntimeError):  # the description is missing or does not match
        return None
