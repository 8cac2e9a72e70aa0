"""Local storage backed by remote storage: puts write through to both, gets read through."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Hashable, Iterable, Iterator

import torch

from lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata, LMCacheMemPoolMetadata
from lmcache.storage_backend.abstract_backend import LMCBackendInterface
from lmcache.storage_backend.chunks import Chunks, ChunkSource, Keys
from lmcache.storage_backend.local_backend import create_local_backend
from lmcache.storage_backend.remote_backend import create_remote_backend
from lmcache.storage_backend.tensors import usable_device
from lmcache.utils import CacheEngineKey


class LMCHybridBackend(LMCBackendInterface):
    """Combines local and remote storage.

    A put stores the chunk in both, and always waits for the local one. A get that finds a chunk only in the
    remote storage also stores it locally. Nothing is prefetched.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheEngineMetadata,
        mpool_metadata: LMCacheMemPoolMetadata,
        dst_device: str = "cuda",
    ) -> None:
        """Create both backends. If one raises, its exception is passed on and the other is closed."""
        super().__init__(usable_device(dst_device))
        self.local_store = create_local_backend(config, metadata, mpool_metadata, dst_device)
        try:
            self.remote_store = create_remote_backend(config, metadata, dst_device)
        except BaseException:
            self.local_store.close()
            raise

    def contains(self, key: CacheEngineKey) -> bool:
        """Return whether either storage has the chunk."""
        return self.local_store.contains(key) or self.remote_store.contains(key)

    def get(self, key: CacheEngineKey) -> torch.Tensor | None:
        """Return the chunk on ``dst_device`` from either storage, or None for a miss."""
        return next(self._read_through([key], None))

    def batched_get(self, keys: Iterable[CacheEngineKey]) -> Iterator[torch.Tensor | None]:
        """Yield the chunk of each key in order, or None for a miss.

        If you stop at the first miss, no later chunk is fetched, except those that a pipelined remote backend
        fetches ahead.
        """
        return self._read_through(keys, None)

    def put(self, key: CacheEngineKey, value: torch.Tensor, blocking: bool = True) -> None:
        """Store the chunk locally at once, and remotely at once or, without ``blocking``, in the background.

        The caller must not change the tensor until both are done.
        """
        self.local_store.put(key, value, blocking=True)
        self.remote_store.put(key, value, blocking=blocking)

    def close(self) -> None:
        """Complete queued puts, and close both storages."""
        try:
            self.remote_store.close()
        finally:
            self.local_store.close()

    # ---- methods for the engine ----

    def prefix_length(self, keys: Keys) -> int:
        """See LMCBackendInterface. The prefix ends at the first chunk that both storages lack."""
        length = 0
        while length < len(keys):
            num_local = self.local_store.prefix_length(keys[length:])
            num_remote = self.remote_store.prefix_length(keys[length + num_local :])
            if not num_local + num_remote:
                break
            length += num_local + num_remote
        return length

    def touch(self, keys: Keys, request: Hashable) -> None:
        """See LMCBackendInterface."""
        self.local_store.touch(keys, request)

    @contextlib.contextmanager
    def prefix(self, keys: Keys, request: Hashable = None) -> Iterator[list[torch.Tensor]]:
        """See LMCBackendInterface. Local chunks are not copied; fetched chunks are also stored locally."""
        with self.local_store.prefix(keys, request) as chunks:
            for chunk in self._read_through(keys[len(chunks) :], request):
                if chunk is None:
                    break
                chunks.append(chunk)
            yield chunks

    def put_chunks(self, chunks: Chunks, blocking: bool = True, request: Hashable = None) -> int:
        """See LMCBackendInterface."""
        all_chunks = list(chunks)
        self.local_store.put_chunks(all_chunks, True, request)
        return self.remote_store.put_chunks(all_chunks, blocking, request)

    def _read_through(
        self, keys: Iterable[CacheEngineKey], request: Hashable
    ) -> Iterator[torch.Tensor | None]:
        """Yield the chunk of each key, or None for a miss. Also fetches local chunks that can't be read."""
        lookups, missing = itertools.tee((key, self.local_store.contains(key)) for key in keys)
        remote = iter(self.remote_store.batched_get(key for key, is_local in missing if not is_local))
        for key, is_local in lookups:
            chunk = self.local_store.get(key) if is_local else None
            if chunk is None:
                chunk = self.remote_store.get(key) if is_local else next(remote)
                # If the chunk was put during the fetch, that one is newer.
                if chunk is not None and not self.local_store.contains(key):
                    self.local_store.put_chunks([(key, ChunkSource.of(chunk))], request=request)
            yield chunk
