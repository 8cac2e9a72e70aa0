"""Keys of the chunks of a prompt, in the format of LMCache 0.1-0.3.

A prompt is cut into chunks of ``chunk_size`` tokens; the last chunk may be shorter. A chunk's hash is the
SHA-256 of the previous chunk's hash (hex) and of its own tokens as little-endian 64-bit integers. A short
last chunk therefore has a key of its own, and a longer prompt cannot reuse it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable

import torch

from lmcache.config import LMCacheEngineMetadata
from lmcache.storage_backend.abstract_backend import LMCBackendInterface
from lmcache.utils import CacheEngineKey, KVCache, token_dim


class PromptKeys:
    """Converts the tokens of a prompt to the keys of its chunks."""

    def __init__(self, metadata: LMCacheEngineMetadata, chunk_size: int) -> None:
        """Use chunks of ``chunk_size`` tokens; ``metadata`` gives the other fields of each key."""
        self.metadata = metadata
        self.chunk_size = chunk_size
        self._init_hash = ""  # the hash before a prompt's first chunk

    def _make_key(self, chunk_hash: str, fmt: str) -> CacheEngineKey:
        metadata = self.metadata
        return CacheEngineKey(fmt, metadata.model_name, metadata.world_size, metadata.worker_id, chunk_hash)

    def _get_init_hash(self) -> str:
        return self._init_hash

    def _hash(self, tokens: torch.Tensor, prefix_hash: str) -> str:
        """Return the hash (hex) of one chunk [num_tokens] that follows ``prefix_hash``."""
        return _digest(_token_bytes(tokens), prefix_hash)

    def _chunk_tokens(self, tokens: torch.Tensor) -> Iterable[torch.Tensor]:
        """Cut tokens [num_tokens] into chunks; the last one may be shorter."""
        return (tokens[start : start + self.chunk_size] for start in range(0, len(tokens), self.chunk_size))

    def _prefix_hash(self, token_chunks: Iterable[torch.Tensor], num_skip_chunk: int = 0) -> list[str]:
        """Return the hashes of all chunks after the first ``num_skip_chunk``."""
        return self._chain(map(_token_bytes, token_chunks))[num_skip_chunk:]

    def _chain(self, chunks: Iterable[memoryview]) -> list[str]:
        hashes = itertools.accumulate(
            chunks, lambda before, chunk: _digest(chunk, before), initial=self._get_init_hash()
        )
        return list(hashes)[1:]

    def _keys(self, tokens: torch.Tensor) -> list[CacheEngineKey]:
        """Return the keys of all chunks; tokens on a GPU are copied once."""
        all_bytes = _token_bytes(tokens)
        step = self.chunk_size * (len(all_bytes) // len(tokens) if len(tokens) else 1)
        chunks = (all_bytes[start : start + step] for start in range(0, len(all_bytes), step))
        return [self._make_key(chunk_hash, self.metadata.fmt) for chunk_hash in self._chain(chunks)]


class LegacyChunks(PromptKeys):
    """Methods of the LMCache 0.1-0.3 engine that handle KV as one tensor [num_layers, 2, …].

    Programs written for that API may call them. ``LMCacheEngine`` itself stores layer by layer.
    """

    engine_: LMCBackendInterface
    """Storage backend."""

    def _tuple_kv_to_blob(self, kv_tensors: KVCache) -> torch.Tensor:
        """Copy (K, V) per layer into one tensor [num_layers, 2, …]."""
        return torch.stack([torch.stack((layer[0], layer[1])) for layer in kv_tensors])

    def _blob_to_tuple_kv(self, blob: torch.Tensor) -> KVCache:
        """Return (K, V) per layer, views of [num_layers, 2, …]."""
        return tuple((layer[0], layer[1]) for layer in blob.unbind())

    def _slice_kv_at(self, start_idx: int, kv_tensors: torch.Tensor, fmt: str) -> list[torch.Tensor]:
        """Cut [num_layers, 2, …] into chunks from token ``start_idx`` on, each contiguous."""
        dim = 2 + token_dim(fmt)
        rest = kv_tensors.narrow(dim, start_idx, kv_tensors.shape[dim] - start_idx)
        return [chunk.contiguous() for chunk in torch.split(rest, self.chunk_size, dim)]

    def _chunk_kv(self, kv_tensors: torch.Tensor, fmt: str) -> Iterable[torch.Tensor]:
        """Cut [num_layers, 2, …] into chunks, each contiguous."""
        return self._slice_kv_at(0, kv_tensors, fmt)

    def _make_chunks_skip_existing(
        self, tokens: torch.Tensor, kv_tensors: torch.Tensor, fmt: str, num_skip_prefix_chunk: int = 0
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Pair hashes and chunks, starting at the first chunk that is not stored."""
        hashes = self._prefix_hash(self._chunk_tokens(tokens), num_skip_prefix_chunk)
        num_stored = self.engine_.prefix_length([self._make_key(chunk_hash, fmt) for chunk_hash in hashes])
        if num_stored == len(hashes):
            return zip((), (), strict=True)
        chunks = self._slice_kv_at(num_stored * self.chunk_size, kv_tensors, fmt)
        return zip(hashes[num_stored:], chunks, strict=True)

    def _make_chunks(
        self,
        tokens: torch.Tensor,
        kv_tensors: torch.Tensor,
        fmt: str,
        num_skip_prefix_chunk: int = 0,
        skip_existing: bool = True,
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Pair hashes and chunks, of all tokens or starting at the first chunk that is not stored."""
        if skip_existing:
            return self._make_chunks_skip_existing(tokens, kv_tensors, fmt, num_skip_prefix_chunk)
        if num_skip_prefix_chunk != 0:
            raise AssertionError("When skip_existing is False, no chunk can be skipped")
        hashes = self._prefix_hash(self._chunk_tokens(tokens))
        return zip(hashes, self._chunk_kv(kv_tensors, fmt), strict=True)


def _digest(chunk: memoryview, prefix_hash: str) -> str:
    digest = hashlib.sha256(prefix_hash.encode("ascii"))
    digest.update(chunk)
    return digest.hexdigest()


def _token_bytes(tokens: torch.Tensor) -> memoryview:
    """Return the bytes to hash for tokens: integers of any width are hashed as 64-bit integers."""
    if not tokens.is_floating_point():
        tokens = tokens.to(torch.int64)
    return memoryview(tokens.cpu().numpy().tobytes())
