"""A chunk on its way into a backend: what room it needs, and how to fill that room."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from lmcache.storage_backend import copies
from lmcache.utils import CacheEngineKey


@dataclass(frozen=True)
class ChunkSource:
    """Holds no bytes of its own, so a chunk that nobody needs is never built, and one that somebody needs is
    written once, straight to where it stays."""

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device  # where the bytes are now
    copy_into: Callable[[torch.Tensor], object]  # fills a contiguous tensor of this shape and dtype

    @classmethod
    def of(cls, chunk: torch.Tensor) -> ChunkSource:
        """Take a chunk that is one tensor, of any layout."""
        return cls(chunk.shape, chunk.dtype, chunk.device, lambda room: copies.copy(room, chunk))

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
        copies.copy(target, part)


Keys: TypeAlias = Sequence[CacheEngineKey]
"""Of one prompt's chunks, in their order."""

Chunks: TypeAlias = Iterable[tuple[CacheEngineKey, ChunkSource]]
"""To be put: made one by one as they are asked for."""
