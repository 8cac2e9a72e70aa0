"""Types that the whole library shares: KV caches, keys, metadata of chunks on disk."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch

KVCache = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""(K, V) per layer. K and V are [num_tokens, num_kv_heads, head_size] in format "vllm" and [num_kv_heads,
num_tokens, head_size] in format "huggingface"."""

P = ParamSpec("P")
T = TypeVar("T")

_TOKEN_DIMS = {"vllm": 0, "huggingface": 1}  # of one layer's K or V


def token_dim(fmt: str) -> int:
    """Return the dimension of one layer's K or V that counts tokens.

    Raises ValueError for an unknown format.
    """
    if fmt not in _TOKEN_DIMS:
        raise ValueError(f"Invalid format: {fmt}")
    return _TOKEN_DIMS[fmt]


@dataclass(frozen=True, order=True)
class CacheEngineKey:
    """Key of one chunk: the engine it belongs to, and the hash of all tokens up to the chunk's end.

    Its text is that of LMCache 0.1-0.3, byte for byte. It therefore does not cover dtype, shape, tokenizer or
    LoRA, although chunks that differ in these are not interchangeable.
    """

    fmt: str
    model_name: str
    world_size: int
    worker_id: int
    chunk_hash: str

    def to_string(self) -> str:
        """Return "fmt@model@world@worker@hash", the name of the chunk in every remote store."""
        return f"{self.fmt}@{self.model_name}@{self.world_size}@{self.worker_id}@{self.chunk_hash}"

    @staticmethod
    def from_string(text: str) -> CacheEngineKey:
        """Parse the text that ``to_string`` returns; the name of the model may contain "@".

        Raises ValueError("Invalid key string…") for any other text.
        """
        try:
            fmt, *model_parts, world_size, worker_id, chunk_hash = text.split("@")
            key = CacheEngineKey(fmt, "@".join(model_parts), int(world_size), int(worker_id), chunk_hash)
        except ValueError as error:
            raise ValueError(f"Invalid key string: {text!r}") from error
        if key.to_string() != text:  # too few parts, or a spelling that int() accepts: " 1", "+1", "1_0"
            raise ValueError(f"Invalid key string: {text!r}")
        return key


@dataclass
class DiskCacheMetadata:
    """Metadata of one chunk on disk."""

    path: str
    size: int
    """Bytes that count against the capacity."""
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None


def _lmcache_nvtx_annotate(func: Callable[P, T], domain: str = "lmcache") -> Callable[P, T]:
    """Make calls of ``func`` appear as ranges "domain.name" in NVIDIA's profilers.

    In a process that has not initialized CUDA, each call only checks one flag.
    """

    @functools.wraps(func)
    def annotated(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return func(*args, **kwargs)
        with torch.cuda.nvtx.range(f"{domain}.{func.__qualname__}"):
            return func(*args, **kwargs)

    return annotated
