"""Types that all of the library shares: KV caches, keys, what is known of a chunk on disk."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch

KVCache = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""Per layer (K, V): [num_tokens, num_kv_heads, head_size] in format "vllm", [num_kv_heads, num_tokens,
head_size] in format "huggingface"."""

P = ParamSpec("P")
T = TypeVar("T")

_TOKEN_DIMS = {"vllm": 0, "huggingface": 1}  # of one layer's K or V


def token_dim(fmt: str) -> int:
    """Return which dimension of one layer's K or V counts tokens. Raises ValueError for an unknown format."""
    if fmt not in _TOKEN_DIMS:
        raise ValueError(f"Invalid format: {fmt}")
    return _TOKEN_DIMS[fmt]


@dataclass(frozen=True, order=True)
class CacheEngineKey:
    """Name of one chunk: what its bytes belong to, and the hash of its tokens and of all before them.

    Everything that makes bytes comparable beyond these fields (dtype, shape, tokenizer, LoRA) is not in it:
    the text is that of LMCache 0.1-0.3, byte for byte.
    """

    fmt: str
    model_name: str
    world_size: int
    worker_id: int
    chunk_hash: str

    def to_string(self) -> str:
        """Return "fmt@model@world@worker@hash", the key's name in every remote store."""
        return f"{self.fmt}@{self.model_name}@{self.world_size}@{self.worker_id}@{self.chunk_hash}"

    @staticmethod
    def from_string(text: str) -> CacheEngineKey:
        """Read what ``to_string`` wrote; a model's name may hold an "@" (read from both ends).

        Raises ValueError("Invalid key string…") for anything that ``to_string`` does not write.
        """
        try:
            fmt, *model_parts, world_size, worker_id, chunk_hash = text.split("@")
            key = CacheEngineKey(fmt, "@".join(model_parts), int(world_size), int(worker_id), chunk_hash)
        except ValueError as error:
            raise ValueError(f"Invalid key string: {text!r}") from error
        if key.to_string() != text:  # too few parts, or a number that int() takes: " 1", "+1", "1_0"
            raise ValueError(f"Invalid key string: {text!r}")
        return key


@dataclass
class DiskCacheMetadata:
    """What is known of one chunk on disk."""

    path: str
    size: int
    """Bytes."""
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None


def _lmcache_nvtx_annotate(func: Callable[P, T], domain: str = "lmcache") -> Callable[P, T]:
    """Show calls of ``func`` as ranges "domain.name" in NVIDIA's profilers.

    Costs one look at a flag in a process that has not initialised CUDA.
    """

    @functools.wraps(func)
    def annotated(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return func(*args, **kwargs)
        with torch.cuda.nvtx.range(f"{domain}.{func.__qualname__}"):
            return func(*args, **kwargs)

    return annotated
