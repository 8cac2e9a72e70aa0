"""Chunks before they are stored in a backend, and their names in the storage core."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from lmcache.storage_backend import tensors
from lmcache.utils import CacheEngineKey
from lmcache_store import keys
from lmcache_store.tiers.base import RowKey


@dataclass(frozen=True)
class ChunkSource:
    """The shape and dtype of a chunk, and a function that writes the chunk into memory.

    It holds no bytes of its own. A chunk that is stored already is therefore never built. Any other chunk is
    written once, straight to its final place.
    """

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    """Device of the source tensors."""
    copy_into: Callable[[torch.Tensor], object]
    """Function that fills a contiguous tensor of this shape and dtype."""

    @classmethod
    def of(cls, chunk: torch.Tensor) -> ChunkSource:
        """Return a source for a chunk that is one tensor, of any layout."""
        return cls(chunk.shape, chunk.dtype, chunk.device, lambda target: tensors.copy(target, chunk))

    @classmethod
    def of_layers(cls, parts: Sequence[torch.Tensor]) -> ChunkSource:
        """Return a source for the K and V of each layer in turn, which become [num_layers, 2, …]."""
        shape = (len(parts) // 2, 2, *parts[0].shape)
        return cls(shape, parts[0].dtype, parts[0].device, partial(_copy_layers, parts))

    @property
    def num_bytes(self) -> int:
        """Bytes that the chunk needs."""
        return math.prod(self.shape) * self.dtype.itemsize

    def to_tensor(self) -> torch.Tensor:
        """Return the chunk as a new tensor on the device of its source."""
        chunk = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self.copy_into(chunk)
        return chunk


def _copy_layers(parts: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    for target_part, part in zip(target.flatten(0, 1).unbind(), parts, strict=True):
        tensors.copy(target_part, part)


class RowNames:
    """Derives row keys from the library's keys.

    Caches that differ in dtype or shape never share a row key.
    """

    def __init__(self, kv_dtype: torch.dtype, kv_shape: Sequence[int]) -> None:
        @functools.lru_cache(maxsize=64)
        def namespace(fmt: str, model: str, world_size: int, worker_id: int) -> bytes:
            kv: dict[str, keys.Listed] = {"fmt": fmt, "dtype": str(kv_dtype), "shape": list(kv_shape)}
            return keys.namespace({**kv, "model": model, "world_size": world_size, "worker_id": worker_id})

        self._namespace = namespace

    def __call__(self, key: CacheEngineKey) -> RowKey:
        """Return the row key of a chunk: its namespace, and the SHA-256 of its hash's text."""
        namespace = self._namespace(key.fmt, key.model_name, key.world_size, key.worker_id)
        return namespace + hashlib.sha256(key.chunk_hash.encode()).digest()


Keys: TypeAlias = Sequence[CacheEngineKey]
"""Keys of the chunks of one prompt, in order."""

Chunks: TypeAlias = Iterable[tuple[CacheEngineKey, ChunkSource]]
"""Chunks to put; they may be generated one by one."""
