"""What a pool of chunk-sized memory is."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch


@dataclass
class KVObj:
    """Memory for one chunk, taken from a pool."""

    chunk_idx: int  # names it within its pool
    size: int  # bytes that it takes of the pool
    data: torch.Tensor  # of the chunk's shape and dtype, over the pool's memory


class BasePool(abc.ABC):
    """Memory for chunks; thread-safe."""

    @abc.abstractmethod
    def allocate(self, kv_chunk: torch.Tensor) -> KVObj | None:
        """Take memory for a chunk of this shape and dtype; nothing is copied. None: none is left."""

    @abc.abstractmethod
    def free(self, kv_obj: KVObj) -> None:
        """Give back what ``allocate`` gave; its ``data`` must not be used any more."""
