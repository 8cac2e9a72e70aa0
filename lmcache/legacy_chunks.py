"""Methods of the LMCache 0.1-0.3 engine that handle KV as one tensor [num_layers, 2, …].

Programs written for that API may call them. ``LMCacheEngine`` itself stores layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lmcache.prompt_keys import PromptKeys
from lmcache.storage_backend.abstract_backend import LMCBackendInterface
from lmcache.utils import KVCache, token_dim


class LegacyChunks(PromptKeys):
    """Converts KV between (K, V) per layer and one tensor, and cuts that tensor into chunks."""

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
