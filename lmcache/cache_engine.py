"""The engine's side of the library: stores and retrieves the KV cache of token sequences.

**Keys.** A prompt is cut into chunks of ``chunk_size`` tokens, the last one may be shorter. A chunk's hash is
the SHA-256 of the previous chunk's hash (hex) and of its tokens as little-endian 64-bit integers. So a short
last chunk has a key of its own, and is of no use to a longer prompt: that is part of the key's format.

**Copies.** Looking comes first: only what is missing is copied, straight from the caller's tensors into the
backend's memory, and out of it straight into one tensor that is the caller's own.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import torch

from lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache.logging import init_logger
from lmcache.storage_backend import CreateStorageBackend, tensors
from lmcache.storage_backend.chunks import ChunkSource
from lmcache.storage_backend.tensors import OutputPool
from lmcache.utils import CacheEngineKey, KVCache, _lmcache_nvtx_annotate, token_dim

logger = init_logger(__name__)


class LMCacheEngine:
    """Any thread may call it.

    ``hit_tokens_count`` and ``miss_tokens_count`` are tokens that ``retrieve`` was asked for and did or did
    not find; ``hit_rate`` is their ratio, 0.0 before the first. ``engine_`` is the storage backend.
    """

    def __init__(self, config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata) -> None:
        """Build the storage that ``config`` speaks of; raises what ``CreateStorageBackend`` raises."""
        self.config = config
        self.metadata = metadata
        self.chunk_size = config.chunk_size
        self.save_decode_cache = config.save_decode_cache
        self.miss_tokens_count = 0
        self.hit_tokens_count = 0
        self.hit_rate = 0.0
        self._counting = threading.Lock()  # protects the three above
        self._outputs = OutputPool(config.max_local_cache_size)
        self._init_hash = ""  # stands for what comes before a prompt's first chunk
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

        ``kv_tensors_raw`` holds (K, V) per layer, of the tokens where the mask is True, without a batch
        dimension: [num_tokens, num_kv_heads, head_size] in format "vllm", [num_kv_heads, num_tokens,
        head_size] in format "huggingface". ``kv_tensors_mask`` (bool, [num_tokens]) is False for leading
        tokens, whole chunks of them, and True from there on; None: True for all. ``skip_existing``: what is
        stored already, up to the first chunk that is not, stays as it is. The tensors may be changed as soon
        as the call is over, whether ``blocking`` or not.

        Raises AssertionError when lengths don't fit together, and ValueError for a mask with a hole, for
        layers that differ in shape or dtype, for KV that is not of ``metadata.kv_shape`` (whatever its number
        of tokens), and for a format that is unknown. A fault of the storage is a
        chunk that is not stored, never an exception.
        """
        num_masked = _num_masked(tokens, kv_tensors_mask)
        num_chunks_masked, beyond = divmod(num_masked, self.chunk_size)
        _require(beyond == 0, "Store KV mask should align to chunk size")
        _require(
            skip_existing or num_masked == 0,
            "When skip_existing is False, the mask must cover all tokens",
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
        logger.debug("Stored %d chunks, %d were there", num_put, first - num_chunks_masked)

    @_lmcache_nvtx_annotate
    def retrieve(
        self, tokens: torch.Tensor, mask: torch.Tensor | None = None, return_tuple: bool = True
    ) -> tuple[KVCache | torch.Tensor, torch.Tensor]:
        """Return the KV cache of as many leading tokens as are stored, and which tokens these are.

        ``mask`` (bool, [num_tokens]) is False for leading tokens whose KV is not wanted, any number of them,
        and True from there on; None: True for all. The KV is (K, V) per layer, or with ``return_tuple`` False
        one tensor [num_layers, 2, …], on the backend's ``dst_device``, the caller's own; ``()`` when nothing
        was found. The returned mask is bool, [num_tokens], on the device of ``tokens``.

        Raises AssertionError for a mask of another length, and ValueError for one with a hole and for a
        format that is unknown. A fault of the storage is a miss.
        """
        num_masked = _num_masked(tokens, mask)
        blob = self._retrieve(tokens, num_masked)
        num_found = 0 if blob is None else blob.shape[2 + token_dim(self.metadata.fmt)]
        with tensors.plain():
            place = torch.arange(len(tokens), device=tokens.device) - num_masked
            found = (place >= 0) & (place < num_found)
            if blob is None:
                return (), found
            return self._blob_to_tuple_kv(blob) if return_tuple else blob, found

    @_lmcache_nvtx_annotate
    def retrieve_into(self, tokens: torch.Tensor, out: torch.Tensor) -> int:
        """Copy the KV of as many leading tokens as are stored to the first of ``out``; return how many.

        ``out``: one tensor with room for ``tokens``, such as ``empty`` returns, or a part of one. A fault of
        the storage is a miss.
        """
        blob = self._retrieve(tokens, _num_masked(tokens, None), out)
        return 0 if blob is None else blob.shape[2 + token_dim(self.metadata.fmt)]

    def _retrieve(
        self, tokens: torch.Tensor, num_masked: int, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return one tensor with what is stored after the masked tokens, in ``out`` if given."""
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
                self.engine_.touch(keys[:first], request)  # last: they are the head
        num_found = 0 if blob is None else blob.shape[dim]
        self._count(num_found, len(tokens) - num_masked - num_found)
        logger.debug("Retrieved %d of %d tokens", num_found, len(tokens) - num_masked)
        return blob

    def empty(self, num_tokens: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return undefined KV of so many tokens, one tensor [num_layers, 2, …] on the backend's
        ``dst_device``; ``dtype`` None: that of the metadata."""
        with tensors.plain():
            kind = dtype or self.metadata.kv_dtype
            return self._outputs.empty(self._shape(num_tokens), kind, self.engine_.dst_device)

    def salted(self, salt: str) -> LMCacheEngine:
        """Return an engine over the same storage whose names no other salt's engine finds, nor this one.

        It counts hits and misses of its own. Closing either closes the storage.
        """
        other = copy.copy(self)
        other._init_hash = hashlib.sha256((self._init_hash + salt).encode()).hexdigest()
        other.miss_tokens_count, other.hit_tokens_count, other.hit_rate = 0, 0, 0.0
        return other

    @_lmcache_nvtx_annotate
    def lookup(self, tokens: torch.Tensor) -> int:
        """Return how many leading tokens are stored: whole chunks, or all of ``tokens``."""
        return min(self.engine_.prefix_length(self._keys(tokens)) * self.chunk_size, len(tokens))

    def close(self) -> None:
        """Finish what was stored without waiting, wait for calls that are under way, and close the storage.

        After it ``retrieve`` and ``lookup`` find nothing, and ``store`` stores nothing.
        """
        self.engine_.close()
        self._outputs.close()

    # ---- keys ----

    def _make_key(self, chunk_hash: str, fmt: str) -> CacheEngineKey:
        metadata = self.metadata
        return CacheEngineKey(fmt, metadata.model_name, metadata.world_size, metadata.worker_id, chunk_hash)

    def _get_init_hash(self) -> str:
        return self._init_hash

    def _hash(self, tokens: torch.Tensor, prefix_hash: str) -> str:
        """Return the hash (hex) of one chunk [num_tokens] after ``prefix_hash``."""
        return _digest(_token_bytes(tokens), prefix_hash)

    def _chunk_tokens(self, tokens: torch.Tensor) -> Iterable[torch.Tensor]:
        """Cut tokens [num_tokens] into chunks; the last one may be shorter."""
        return (tokens[start : start + self.chunk_size] for start in range(0, len(tokens), self.chunk_size))

    def _prefix_hash(self, token_chunks: Iterable[torch.Tensor], num_skip_chunk: int = 0) -> list[str]:
        """Return the hashes of all chunks but the first ``num_skip_chunk``, which are only hashed."""
        return self._chain(map(_token_bytes, token_chunks))[num_skip_chunk:]

    def _chain(self, chunks: Iterable[memoryview]) -> list[str]:
        hashes = itertools.accumulate(
            chunks, lambda before, chunk: _digest(chunk, before), initial=self._get_init_hash()
        )
        return list(hashes)[1:]

    def _keys(self, tokens: torch.Tensor) -> list[CacheEngineKey]:
        """Return the keys of all chunks; tokens on a GPU are copied once."""
        everything = _token_bytes(tokens)
        step = self.chunk_size * (len(everything) // len(tokens) if len(tokens) else 1)
        chunks = (everything[start : start + step] for start in range(0, len(everything), step))
        return [self._make_key(chunk_hash, self.metadata.fmt) for chunk_hash in self._chain(chunks)]

    # ---- KV ----

    def _num_tokens_in_kv(self, kv_tensors: KVCache | torch.Tensor, fmt: str) -> int:
        """Raises ValueError when ``fmt`` is unknown."""
        return int(kv_tensors[0][0].shape[token_dim(fmt)])

    def _sources(self, kv: KVCache, first_token: int) -> Iterator[ChunkSource]:
        """Cut KV into chunks from ``first_token`` on without copying any of it."""
        parts = [part for layer in kv for part in (layer[0], layer[1])]
        if any(part.shape != parts[0].shape or part.dtype != parts[0].dtype for part in parts):
            raise ValueError("all layers' K and V must have the same shape and dtype")
        dim = token_dim(self.metadata.fmt)
        num_left = parts[0].shape[dim] - first_token
        shape = [len(kv), 2, *parts[0].shape]
        if shape != self._shape(parts[0].shape[dim]):
            raise ValueError(f"KV {shape} is not what metadata.kv_shape says: {self.metadata.kv_shape}")
        pieces = [
            torch.split(part.narrow(dim, first_token, num_left), self.chunk_size, dim) for part in parts
        ]
        return map(ChunkSource.of_layers, zip(*pieces, strict=True))

    def _shape(self, num_tokens: int) -> list[int]:
        """Return the shape of one tensor with the KV of so many tokens."""
        num_layers, kv, _, num_heads, head_size = self.metadata.kv_shape
        inner = [num_tokens, num_heads] if token_dim(self.metadata.fmt) == 0 else [num_heads, num_tokens]
        return [num_layers, kv, *inner, head_size]

    def _usable(self, chunks: Sequence[torch.Tensor], num_tokens: int) -> list[torch.Tensor]:
        """Return the leading chunks that are KV of this model, for the tokens that their keys say."""
        usable: list[torch.Tensor] = []
        for index, chunk in enumerate(chunks):
            length = min(self.chunk_size, num_tokens - index * self.chunk_size)
            if list(chunk.shape) != self._shape(length) or chunk.dtype != chunks[0].dtype:
                logger.warning("Taken as a miss: %s of %s for %d tokens", chunk.shape, chunk.dtype, length)
                break
            usable.append(chunk)
        return usable

    def _join(
        self, chunks: Sequence[torch.Tensor], num_dropped: int, dim: int, out: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Copy chunks into one tensor, without the first ``num_dropped`` tokens; None when there are none."""
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
        with self._counting:
            self.hit_tokens_count += num_hits
            self.miss_tokens_count += num_misses
            if total := self.hit_tokens_count + self.miss_tokens_count:
                self.hit_rate = self.hit_tokens_count / total

    # ---- KV as one tensor: of the LMCache 0.1-0.3 API, not used by the methods above ----

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
        """Cut all of [num_layers, 2, …] into chunks."""
        return self._slice_kv_at(0, kv_tensors, fmt)

    def _make_chunks_skip_existing(
        self, tokens: torch.Tensor, kv_tensors: torch.Tensor, fmt: str, num_skip_prefix_chunk: int = 0
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Pair hashes and chunks, from the first chunk on that is not stored."""
        hashes = self._prefix_hash(self._chunk_tokens(tokens), num_skip_prefix_chunk)
        num_there = self.engine_.prefix_length([self._make_key(chunk_hash, fmt) for chunk_hash in hashes])
        if num_there == len(hashes):
            return zip((), (), strict=True)
        chunks = self._slice_kv_at(num_there * self.chunk_size, kv_tensors, fmt)
        return zip(hashes[num_there:], chunks, strict=True)

    def _make_chunks(
        self,
        tokens: torch.Tensor,
        kv_tensors: torch.Tensor,
        fmt: str,
        num_skip_prefix_chunk: int = 0,
        skip_existing: bool = True,
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Pair hashes and chunks, of all tokens or from the first chunk on that is not stored."""
        if skip_existing:
            return self._make_chunks_skip_existing(tokens, kv_tensors, fmt, num_skip_prefix_chunk)
        _require(num_skip_prefix_chunk == 0, "When skip_existing is False, no chunk can be skipped")
        hashes = self._prefix_hash(self._chunk_tokens(tokens))
        return zip(hashes, self._chunk_kv(kv_tensors, fmt), strict=True)


class LMCacheEngineBuilder:
    """The engines of this process by name; any thread may call it."""

    _engines: ClassVar[dict[str, tuple[LMCacheEngine, LMCacheEngineConfig, LMCacheEngineMetadata]]] = {}
    _lock = threading.Lock()  # protects what is written to _engines

    @classmethod
    def get_or_create(
        cls, instance_id: str, config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata
    ) -> LMCacheEngine:
        """Return the engine of this name, built when there is none.

        Raises ValueError when it exists with another configuration or other metadata.
        """
        with cls._lock:
            if instance_id not in cls._engines:
                # Copies: the caller may change its own afterwards.
                made = LMCacheEngine(config, metadata), copy.copy(config), copy.copy(metadata)
                cls._engines[instance_id] = made
            engine, *made_of = cls._engines[instance_id]
            if made_of != [config, metadata]:
                raise ValueError(
                    f"Instance {instance_id} already exists with a different configuration or metadata."
                )
            return engine

    @classmethod
    def get(cls, instance_id: str) -> LMCacheEngine | None:
        """Return the engine of this name, or None."""
        return cls._engines.get(instance_id, (None,))[0]

    @classmethod
    def destroy(cls, instance_id: str) -> None:
        """Forget the engine of this name, even when closing it raises, and close it; no-op when unknown."""
        with cls._lock:
            engine = cls._engines.pop(instance_id, (None,))[0]
        if engine is not None:
            engine.close()


def _digest(chunk: memoryview, prefix_hash: str) -> str:
    digest = hashlib.sha256(prefix_hash.encode("ascii"))
    digest.update(chunk)
    return digest.hexdigest()


def _token_bytes(tokens: torch.Tensor) -> memoryview:
    """Return what is hashed of tokens: integers of any width count as 64-bit ones."""
    if not tokens.is_floating_point():
        tokens = tokens.to(torch.int64)
    return memoryview(tokens.cpu().numpy().tobytes())


def _num_masked(tokens: torch.Tensor, mask: torch.Tensor | None) -> int:
    """Return the number of leading tokens that the mask leaves out."""
    _require(tokens.dim() == 1, f"Invalid shape of tokens: {tokens.shape}")
    if mask is None:
        return 0
    _require(mask.dim() == 1, f"Invalid shape of mask: {mask.shape}")
    _require(len(tokens) == len(mask), "token length does not match mask length")
    mask = mask.cpu().bool()
    num_masked = len(mask) - int(mask.sum())
    if not bool(mask[num_masked:].all()):
        raise ValueError("Invalid mask: only suffix masks are supported, False first and True from there on")
    return num_masked


def _require(condition: bool, message: str) -> None:
    """Raise AssertionError as the LMCache 0.1-0.3 API does, also under ``python -O``."""
    if not condition:
        raise AssertionError(message)
