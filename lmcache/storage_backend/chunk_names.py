"""What the library calls its chunks: in the storage core, and to those who look into a backend."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from lmcache import keys
from lmcache.storage_backend.abstract_backend import LMCBackendInterface
from lmcache.tiers.base import RowKey
from lmcache.utils import CacheEngineKey


class RowNames:
    """Names chunks of one cache. Caches that differ in dtype or shape never share a name."""

    def __init__(self, kv_dtype: torch.dtype, kv_shape: Sequence[int]) -> None:
        @functools.lru_cache(maxsize=64)
        def namespace(fmt: str, model: str, world_size: int, worker_id: int) -> bytes:
            what: dict[str, keys.Listed] = {"fmt": fmt, "dtype": str(kv_dtype), "shape": list(kv_shape)}
            return keys.namespace({**what, "model": model, "world_size": world_size, "worker_id": worker_id})

        self._namespace = namespace

    def __call__(self, key: CacheEngineKey) -> RowKey:
        """Return the name of a chunk: its namespace, and the SHA-256 of its hash's text."""
        namespace = self._namespace(key.fmt, key.model_name, key.world_size, key.worker_id)
        return namespace + hashlib.sha256(key.chunk_hash.encode()).digest()


class ChunksView(Mapping[CacheEngineKey, torch.Tensor]):
    """A backend's chunks as a dictionary: what the documents call ``.dict``. Read-only and live, the next
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
