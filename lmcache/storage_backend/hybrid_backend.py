"""Local and remote storage together: written through, read through."""

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
    """Puts go to both, always waiting for the local one. What only the remote one has is kept locally when it
    is read. Nothing is fetched before it is asked for."""

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheEngineMetadata,
        mpool_metadata: LMCacheMemPoolMetadata,
        dst_device: str = "cuda",
    ) -> None:
        """Build both; raises what they raise, with nothing left over."""
        super().__init__(usable_device(dst_device))
        self.local_store = create_local_backend(config, metadata, mpool_metadata, dst_device)
        try:
            self.remote_store = create_remote_backend(config, metadata, dst_device)
        except BaseException:
            self.local_store.close()
            raise

    def contains(self, key: CacheEngineKey) -> bool:
        """Does one of them have the chunk?"""
        return self.local_store.contains(key) or self.remote_store.contains(key)

    def get(self, key: CacheEngineKey) -> torch.Tensor | None:
        """Return the chunk on ``dst_device``, from wherever it is; None: a miss."""
        return next(self._read_through([key], None))

    def batched_get(self, keys: Iterable[CacheEngineKey]) -> Iterator[torch.Tensor | None]:
        """Yield one answer per key, in their order; who stops asking at the first miss has nothing fetched
        behind it, but for what a pipelined remote backend fetches ahead."""
        return self._read_through(keys, None)

    def put(self, key: CacheEngineKey, value: torch.Tensor, blocking: bool = True) -> None:
        """Put the chunk locally now, and remotely now or, when not ``blocking``, soon; the tensor must not be
        changed until then."""
        self.local_store.put(key, value, blocking=True)
        self.remote_store.put(key, value, blocking=blocking)

    def close(self) -> None:
        """Finish what is queued, and close both."""
        try:
            self.remote_store.close()
        finally:
            self.local_store.close()

    # ---- what the engine calls ----

    def prefix_length(self, keys: Keys) -> int:
        """See LMCBackendInterface. A chunk that both lack ends the prefix, whichever has those behind it."""
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
        """See LMCBackendInterface. The leading chunks that are local are not copied; the others are kept
        locally as they come."""
        with self.local_store.prefix(keys, request) as chunks:
            for chunk in self._read_through(keys[len(chunks) :], request):
                if chunk is None:
                    break
                chunks.append(chunk)
            yield chunks

    def put_chunks(self, chunks: Chunks, blocking: bool = True, request: Hashable = None) -> int:
        """See LMCBackendInterface."""
        everything = list(chunks)
        self.local_store.put_chunks(everything, True, request)
        return self.remote_store.put_chunks(everything, blocking, request)

    def _read_through(
        self, keys: Iterable[CacheEngineKey], request: Hashable
    ) -> Iterator[torch.Tensor | None]:
        """Yield one answer per key, in their order. What was here and can't be read is fetched, too."""
        asked, missing = itertools.tee((key, self.local_store.contains(key)) for key in keys)
        remote = iter(self.remote_store.batched_get(key for key, is_here in missing if not is_here))
        for key, is_here in asked:
            chunk = self.local_store.get(key) if is_here else None
            if chunk is None:
                chunk = self.remote_store.get(key) if is_here else next(remote)
                # A put that came while this was fetched is newer.
                if chunk is not None and not self.local_store.contains(key):
                    self.local_store.put_chunks([(key, ChunkSource.of(chunk))], request=request)
            yield chunk
