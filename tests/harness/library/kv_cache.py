"""KV caches of small models, and a backend with exactly the methods that the LMCache 0.1-0.3 API requires."""

from collections.abc import Sequence

import torch

from lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata, LMCacheMemPoolMetadata
from lmcache.storage_backend.abstract_backend import LMCBackendInterface
from lmcache.utils import CacheEngineKey, KVCache

LAYERS, HEADS, HEAD_SIZE, CHUNK = 4, 2, 32, 16  # a full chunk has four pages
FORMATS = ("vllm", "huggingface")


def make_config(local_device: str | None = "cpu", **changes: object) -> LMCacheEngineConfig:
    """A small cache: 64 MiB, chunks of 16 tokens, no remote server."""
    fields = {"chunk_size": CHUNK, "max_local_cache_size": 1 / 16, "remote_url": None, "remote_serde": None}
    return LMCacheEngineConfig.from_defaults(local_device=local_device, **{**fields, **changes})


def make_metadata(fmt: str = "vllm") -> LMCacheEngineMetadata:
    return LMCacheEngineMetadata("org/model", 1, 0, fmt, torch.float16, (LAYERS, 2, CHUNK, HEADS, HEAD_SIZE))


def make_pool(
    num_chunks: float = 4096, shape: Sequence[int] | None = None, dtype: torch.dtype = torch.float16
) -> LMCacheMemPoolMetadata:
    """A pool for this many full chunks of ``make_chunk``, by default 64 MiB."""
    size = num_chunks * make_chunk().nbytes / 1024**3
    return LMCacheMemPoolMetadata(torch.Size(shape or make_metadata().kv_shape), dtype, size)


def make_tokens(num_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 1000, (num_tokens,), generator=torch.Generator().manual_seed(seed))


def make_kv(num_tokens: int, fmt: str = "vllm", seed: int = 0, dtype: torch.dtype = torch.float16) -> KVCache:
    """Random KV without a NaN. Different seeds give different bytes."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, HEADS, HEAD_SIZE) if fmt == "vllm" else (HEADS, num_tokens, HEAD_SIZE)
    return tuple(
        (torch.randn(shape, generator=generator).to(dtype), torch.randn(shape, generator=generator).to(dtype))
        for _ in range(LAYERS)
    )


def cut(kv: KVCache, fmt: str, start: int, stop: int | None = None) -> KVCache:
    """The KV of tokens ``start`` .. ``stop - 1``."""
    if fmt == "vllm":
        return tuple((k[start:stop], v[start:stop]) for k, v in kv)
    return tuple((k[:, start:stop], v[:, start:stop]) for k, v in kv)


def is_same(first: KVCache, second: KVCache) -> bool:
    """Whether both are equal to the byte, including dtypes and shapes."""
    return len(first) == len(second) and all(
        a.dtype == b.dtype and torch.equal(a, b)
        for first_layer, second_layer in zip(first, second, strict=True)
        for a, b in zip(first_layer, second_layer, strict=True)
    )


def make_key(name: str, fmt: str = "vllm") -> CacheEngineKey:
    return CacheEngineKey(fmt, "org/model", 1, 0, name)


def make_chunk(num_tokens: int = CHUNK, seed: int = 0, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((LAYERS, 2, num_tokens, HEADS, HEAD_SIZE), generator=generator).to(dtype)


class DictBackend(LMCBackendInterface):
    """A user's backend: the documented methods over a dict."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.chunks: dict[CacheEngineKey, torch.Tensor] = {}
        self.is_closed = False

    def put(self, key: CacheEngineKey, kv_chunk: torch.Tensor, blocking: bool = True) -> None:
        self.chunks[key] = kv_chunk

    def contains(self, key: CacheEngineKey) -> bool:
        return key in self.chunks

    def get(self, key: CacheEngineKey) -> torch.Tensor | None:
        return self.chunks.get(key)

    def remove(self, key: CacheEngineKey) -> None:
        del self.chunks[key]

    def close(self) -> None:
        self.is_closed = True
