"""The library's engine: stores and retrieves the KV cache of token sequences.

``lmcache.prompt_keys`` describes how tokens become keys.

The engine looks up chunks before it copies any, and copies only what is missing. To store, it copies from
the caller's tensors straight into the backend's memory. To retrieve, it copies from there straight into one
tensor that the caller owns.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch

from lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache.logging import init_logger
from lmcache.prompt_keys import LegacyChunks
from lmcache.storage_backend import CreateStorageBackend, tensors
from lmcache.storage_backend.chunks import ChunkSource
from lmcache.storage_backend.tensors import OutputPool
from lmcache.utils import KVCache, _lmcache_nvtx_annotate, token_dim

logger = init_logger(__name__)


class LMCacheEngine(LegacyChunks):
    """A KV cache for the token sequences of one engine process. All methods are thread-safe.

    ``hit_tokens_count`` and ``miss_tokens_count`` count the tokens that ``retrieve`` found and did not find.
    ``hit_rate`` is the share of tokens found, or 0.0 before the first call. ``engine_`` is the storage
    backend.
    """

    def __init__(self, config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata) -> None:
        """Build the storage backend that ``config`` describes.

        Raises the exceptions of ``CreateStorageBackend``.
        """
        super().__init__(metadata, config.chunk_size)
        self.config = config
        self.save_decode_cache = config.save_decode_cache
        self.miss_tokens_count = 0
        self.hit_tokens_count = 0
        self.hit_rate = 0.0
        self._counts_lock = threading.Lock()  # protects the three counters above
        self._outputs = OutputPool(config.max_local_cache_size)
        self.engine_ = CreateStorageBackend(config, metadata)

    @_lmcache_nvtx_annotate
    def store(
        self,
        tokens: torch.Tensor,
        kv_tensors_raw: KVCache,
        kv_tensors_mask: torch.Tensor | None = None,
        skip_existing: bool = True,
        blocking: bool = True,
    ) -> None:
        """Store the KV cache of ``tokens`` [num_tokens], integers.

        ``kv_tensors_raw`` holds (K, V) per layer, for the tokens where the mask is True, without a batch
        dimension. K and V are [num_tokens, num_kv_heads, head_size] in format "vllm" and [num_kv_heads,
        num_tokens, head_size] in format "huggingface".

        ``kv_tensors_mask`` is bool, [num_tokens]: False for a whole number of leading chunks, then True. None
        means True for all tokens.

        With ``skip_existing``, the leading chunks that are already stored are not overwritten.

        With ``blocking`` False, the call may return before the chunks are stored. In both cases the caller
        may change the tensors after the call.

        Raises AssertionError if the lengths of tokens, mask and KV don't match. Raises ValueError if the mask
        has a hole, if layers differ in shape or dtype, if the KV does not match ``metadata.kv_shape`` (apart
        from the number of tokens), or if the format is unknown. If the storage fails, chunks are not stored;
        the call does not raise.
        """
        num_masked = _num_masked(tokens, kv_tensors_mask)
        num_chunks_masked, remainder = divmod(num_masked, self.chunk_size)
        _require(remainder == 0, "Store KV mask should align to chunk size")
        _require(
            skip_existing or num_masked == 0, "When skip_existing is False, the mask must cover all tokens"
        )
        _require(
            len(tokens) == self._num_tokens_in_kv(kv_tensors_raw, self.metadata.fmt) + num_masked,
            "Number of tokens in the kv cache does not match the input tokens",
        )
        keys = self._keys(tokens)
        request = keys[-1].chunk_hash if keys else None
        with tensors.plain():
            self.engine_.touch(keys, request)
            first = num_chunks_masked
            if skip_existing:
                first += self.engine_.prefix_length(keys[num_chunks_masked:])
            if first == len(keys):
                return
            sources = self._sources(kv_tensors_raw, (first - num_chunks_masked) * self.chunk_size)
            num_put = self.engine_.put_chunks(
                zip(keys[first:], sources, strict=True), blocking=blocking, request=request
            )
        logger.debug("Stored %d chunks; skipped %d stored before", num_put, first - num_chunks_masked)

    @_lmcache_nvtx_annotate
    def retrieve(
        self, tokens: torch.Tensor, mask: torch.Tensor | None = None, return_tuple: bool = True
    ) -> tuple[KVCache | torch.Tensor, torch.Tensor]:
        """Return the KV cache of the longest stored prefix of ``tokens``, and a mask of the tokens it covers.

        ``mask`` is bool, [num_tokens]: False for any number of leading tokens whose KV you don't need, then
        True. None means True for all tokens.

        The KV is (K, V) per layer or, with ``return_tuple`` False, one tensor [num_layers, 2, …]. It is on
        the backend's ``dst_device``, and the caller owns it. If nothing is stored, the KV is ``()``. The
        returned mask is bool, [num_tokens], on the device of ``tokens``.

        Raises AssertionError if the mask has another length. Raises ValueError if the mask has a hole or the
        format is unknown. A storage failure is a miss.
        """
        num_masked = _num_masked(tokens, mask)
        blob = self._retrieve(tokens, num_masked)
        num_found = 0 if blob is None else blob.shape[2 + token_dim(self.metadata.fmt)]
        with tensors.plain():
            offsets = torch.arange(len(tokens), device=tokens.device) - num_masked
            is_found = (offsets >= 0) & (offsets < num_found)
            if blob is None:
                return (), is_found
            return self._blob_to_tuple_kv(blob) if return_tuple else blob, is_found

    @_lmcache_nvtx_annotate
    def retrieve_into(self, tokens: torch.Tensor, out: torch.Tensor) -> int:
        """Copy the KV of the longest stored prefix to the start of ``out``; return its number of tokens.

        ``out`` is one tensor that can hold the KV of ``tokens``, such as ``empty`` returns, or a slice of
        one. A storage failure is a miss.
        """
        blob = self._retrieve(tokens, _num_masked(tokens, None), out)
        return 0 if blob is None else blob.shape[2 + token_dim(self.metadata.fmt)]

    def _retrieve(
        self, tokens: torch.Tensor, num_masked: int, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return the stored KV after the masked tokens as one tensor, in ``out`` if given."""
        dim = 2 + token_dim(self.metadata.fmt)
        first, num_dropped = divmod(num_masked, self.chunk_size)
        keys = self._keys(tokens)
        blob = None
        if num_masked < len(tokens):
            request = keys[-1].chunk_hash
            with tensors.plain():
                with self.engine_.prefix(keys[first:], request) as chunks:
                    usable = self._usable(chunks, len(tokens) - first * self.chunk_size)
                    blob = self._join(usable, num_dropped, dim, out)
                self.engine_.touch(keys[:first], request)  # the head of a prompt is touched last
        num_found = 0 if blob is None else blob.shape[dim]
        self._count(num_found, len(tokens) - num_masked - num_found)
        logger.debug("Retrieved %d of %d tokens", num_found, len(tokens) - num_masked)
        return blob

    def empty(self, num_tokens: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an uninitialized tensor [num_layers, 2, …] for the KV of ``num_tokens`` tokens.

        It is on the backend's ``dst_device``. ``dtype`` defaults to the dtype in the metadata.
        """
        with tensors.plain():
            dtype = dtype or self.metadata.kv_dtype
            return self._outputs.empty(self._shape(num_tokens), dtype, self.engine_.dst_device)

    def salted(self, salt: str) -> LMCacheEngine:
        """Return an engine that shares this engine's storage, but no chunks with this or any other salt.

        The new engine has its own hit and miss counters. Closing either engine closes the storage.
        """
        other = copy.copy(self)
        other._init_hash = hashlib.sha256((self._init_hash + salt).encode()).hexdigest()
        other.miss_tokens_count, other.hit_tokens_count, other.hit_rate = 0, 0, 0.0
        return other

    @_lmcache_nvtx_annotate
    def lookup(self, tokens: torch.Tensor) -> int:
        """Return the number of leading tokens that are stored: whole chunks, or all of ``tokens``."""
        return min(self.engine_.prefix_length(self._keys(tokens)) * self.chunk_size, len(tokens))

    def close(self) -> None:
        """Complete pending stores, wait for running calls, and close the storage.

        Afterwards ``retrieve`` and ``lookup`` find nothing, and ``store`` stores nothing.
        """
        self.engine_.close()
        self._outputs.close()

    # ---- KV ----

    def _num_tokens_in_kv(self, kv_tensors: KVCache | torch.Tensor, fmt: str) -> int:
        """Return the number of tokens of (K, V) per layer. Raises ValueError if ``fmt`` is unknown."""
        return int(kv_tensors[0][0].shape[token_dim(fmt)])

    def _sources(self, kv: KVCache, first_token: int) -> Iterator[ChunkSource]:
        """Yield the chunks of ``kv`` from ``first_token`` on, without copying."""
        parts = [part for layer in kv for part in (layer[0], layer[1])]
        if any(part.shape != parts[0].shape or part.dtype != parts[0].dtype for part in parts):
            raise ValueError("all layers' K and V must have the same shape and dtype")
        dim = token_dim(self.metadata.fmt)
        num_left = parts[0].shape[dim] - first_token
        shape = [len(kv), 2, *parts[0].shape]
        if shape != self._shape(parts[0].shape[dim]):
            raise ValueError(f"KV of shape {shape} does not match metadata.kv_shape {self.metadata.kv_shape}")
        pieces = [
            torch.split(part.narrow(dim, first_token, num_left), self.chunk_size, dim) for part in parts
        ]
        return map(ChunkSource.of_layers, zip(*pieces, strict=True))

    def _shape(self, num_tokens: int) -> list[int]:
        """Return the shape of one tensor with the KV of ``num_tokens`` tokens."""
        num_layers, kv, _, num_heads, head_size = self.metadata.kv_shape
        inner = [num_tokens, num_heads] if token_dim(self.metadata.fmt) == 0 else [num_heads, num_tokens]
        return [num_layers, kv, *inner, head_size]

    def _usable(self, chunks: Sequence[torch.Tensor], num_tokens: int) -> list[torch.Tensor]:
        """Return the leading chunks whose shape and dtype fit this model and their number of tokens."""
        usable: list[torch.Tensor] = []
        for index, chunk in enumerate(chunks):
            length = min(self.chunk_size, num_tokens - index * self.chunk_size)
            if list(chunk.shape) != self._shape(length) or chunk.dtype != chunks[0].dtype:
                details = f"shape {list(chunk.shape)}, {chunk.dtype}"
                logger.warning("Ignored a stored chunk that does not fit %d tokens: %s", length, details)
                break
            usable.append(chunk)
        return usable

    def _join(
        self, chunks: Sequence[torch.Tensor], num_dropped: int, dim: int, out: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Copy chunks into one tensor, without the first ``num_dropped`` tokens; None if there are none."""
        if not chunks:
            return None
        num_tokens = sum(chunk.shape[dim] for chunk in chunks) - num_dropped
        blob = self.empty(num_tokens, chunks[0].dtype) if out is None else out.narrow(dim, 0, num_tokens)
        start = 0
        for index, chunk in enumerate(chunks):
            part = chunk if index else chunk.narrow(dim, num_dropped, chunk.shape[dim] - num_dropped)
            tensors.copy(blob.narrow(dim, start, part.shape[dim]), part)
            start += part.shape[dim]
        tensors.synchronize(blob)
        return blob

    def _count(self, num_hits: int, num_misses: int) -> None:
        with self._counts_lock:
            self.hit_tokens_count += num_hits
            self.miss_tokens_count += num_misses
            if total := self.hit_tokens_count + self.miss_tokens_count:
                self.hit_rate = self.hit_tokens_count / total


class LMCacheEngineBuilder:
    """Registry of the engines of this process, by name. All methods are thread-safe."""

    _engines: ClassVar[dict[str, tuple[LMCacheEngine, LMCacheEngineConfig, LMCacheEngineMetadata]]] = {}
    _lock = threading.Lock()  # serializes writes to _engines

    @classmethod
    def get_or_create(
        cls, instance_id: str, config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata
    ) -> LMCacheEngine:
        """Return the engine with this name; create it if it does not exist.

        Raises ValueError if the engine exists with another configuration or other metadata.
        """
        with cls._lock:
            if instance_id not in cls._engines:
                # The registry stores copies, because the caller may change its objects afterwards.
                entry = LMCacheEngine(config, metadata), copy.copy(config), copy.copy(metadata)
                cls._engines[instance_id] = entry
            engine, *settings = cls._engines[instance_id]
            if settings != [config, metadata]:
                raise ValueError(
                    f"Instance {instance_id} already exists with a different configuration or metadata."
                )
            return engine

    @classmethod
    def get(cls, instance_id: str) -> LMCacheEngine | None:
        """Return the engine with this name, or None."""
        return cls._engines.get(instance_id, (None,))[0]

    @classmethod
    def destroy(cls, instance_id: str) -> None:
        """Remove the engine with this name from the registry, and close it.

        Does nothing if there is no such engine. Removes the engine even if closing it raises.
        """
        with cls._lock:
            engine = cls._engines.pop(instance_id, (None,))[0]
        if engine is not None:
            engine.close()


def _num_masked(tokens: torch.Tensor, mask: torch.Tensor | None) -> int:
    """Return the number of leading tokens that the mask excludes. Raises ValueError for another mask."""
    _require(tokens.dim() == 1, f"Invalid shape of tokens: {tokens.shape}")
    if mask is None:
        return 0
    _require(mask.dim() == 1, f"Invalid shape of mask: {mask.shape}")
    _require(len(tokens) == len(mask), "token length does not match mask length")
    mask = mask.cpu().bool()
    num_masked = len(mask) - int(mask.sum())
    if not bool(mask[num_masked:].all()):
        raise ValueError("Invalid mask: it must be a suffix mask (False for leading tokens, then True)")
    return num_masked


def _require(condition: bool, message: str) -> None:
    """Raise AssertionError, as the LMCache 0.1-0.3 API does; unlike ``assert``, also under ``python -O``."""
    if not condition:
        raise AssertionError(message)
