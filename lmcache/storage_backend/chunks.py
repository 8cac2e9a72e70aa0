"""Chunks on their way into a backend, and what the library calls them in the storage core."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from lmcache import keys
from lmcache.storage_backend import tensors
from lmcache.tiers.base import RowKey
from lmcache.utils import CacheEngineKey


@dataclass(frozen=True)
class ChunkSource:
    """What room a chunk needs, and how to fill that room.

    Holds no bytes of its own, so a chunk that nobody needs is never built, and one that somebody needs is
    written once, straight to where it stays.
    """

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    """Where the bytes are now."""
    copy_into: Callable[[torch.Tensor], object]
    """Fills a contiguous tensor of this shape and dtype."""

    @classmethod
    def of(cls, chunk: torch.Tensor) -> ChunkSource:
        """Take a chunk that is one tensor, of any layout."""
        return cls(chunk.shape, chunk.dtype, chunk.device, lambda room: tensors.copy(room, chunk))

    @classmethod
    def of_layers(cls, parts: Sequence[torch.Tensor]) -> ChunkSource:
        """Take the K and V of each layer in turn; they become [num_layers, 2, …]."""
        shape = (len(parts) // 2, 2, *parts[0].shape)
        return cls(shape, parts[0].dtype, parts[0].device, partial(_copy_layers, parts))

    @property
    def num_bytes(self) -> int:
        """Bytes that the chunk needs."""
        return math.prod(self.shape) * self.dtype.itemsize

    def to_tensor(self) -> torch.Tensor:
        """Return the chunk as a tensor of its own, on the device where it is."""
        chunk = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self.copy_into(chunk)
        return chunk


def _copy_layers(parts: Sequence[torch.Tensor], room: torch.Tensor) -> None:
    for target, part in zip(room.flatten(0, 1).unbind(), parts, strict=True):
        tensors.copy(target, part)


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


Keys: TypeAlias = Sequence[CacheEngineKey]
"""Of one prompt's chunks, in their order."""

Chunks: TypeAlias = Iterable[tuple[CacheEngineKey, ChunkSource]]
"""To be put: made one by one as they are asked for."""
