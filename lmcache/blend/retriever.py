"""Retrieves the segments of a prompt, each of which was stored by itself, and lays them side by side."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch

from lmcache.blend.interfaces import BlendRetriever, BlendRetrieverResult, BlendRetrieverTask
from lmcache.config import LMCacheEngineMetadata
from lmcache.logging import init_logger
from lmcache.storage_backend import tensors
from lmcache.utils import KVCache, token_dim

if TYPE_CHECKING:
    from lmcache.cache_engine import LMCacheEngine

logger = init_logger(__name__)

_NUM_WORKERS = 4  # enough to overlap waiting for a remote storage with copying


class Segment(NamedTuple):
    """A part of a prompt, whose KV was computed with nothing before it."""

    tokens: torch.Tensor
    """Token ids ``[num_tokens]``."""
    kv: KVCache | None = None
    """Its KV when the caller has it, (K, V) per layer; None: look it up."""
    is_reusable: bool = True
    """False: neither; its tokens are to be computed."""


class SPTBlendRetrieverTask(BlendRetrieverTask):
    """The retrieval of a batch's segments. A segment whose retrieval fails counts as not stored."""

    def __init__(self, kv: torch.Tensor | None, lengths: list[Future[int] | int], places: list[int]) -> None:
        """``kv``: all layers of all tokens, ``[num_layers, 2, ...]``; None: nothing is there.

        ``lengths``: of each segment, how many leading tokens are there, now or later. ``places``: where each
        segment starts, and the number of tokens.
        """
        self._kv, self._lengths, self._places = kv, lengths, places

    def result(self, layer_id: int) -> BlendRetrieverResult:
        """Wait for all segments, then return one layer; its tensors are the caller's own to change.

        They are ``[num_tokens, num_kv_heads, head_size]`` in the format "vllm" and ``[num_kv_heads,
        num_tokens, head_size]`` in "huggingface", and the same ones when a layer is asked for again. Raises
        IndexError for a layer that the stored KV lacks.
        """
        valid_mask, original_positions = (mask.clone() for mask in self._validity)
        if self._kv is None or not valid_mask.any():
            return BlendRetrieverResult(None, None, valid_mask, original_positions)
        k, v = self._kv[layer_id].unbind()
        return BlendRetrieverResult(k, v, valid_mask, original_positions.to(self._kv.device))

    @cached_property
    def _validity(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The valid mask, and the original positions: a segment was stored from position 0."""
        valid_mask = torch.zeros(self._places[-1], dtype=torch.int)
        original_positions = torch.zeros(self._places[-1], dtype=torch.int)
        for start, length in zip(self._places, self._lengths, strict=False):
            end = start + (length if isinstance(length, int) else length.result())
            valid_mask[start:end] = 1
            original_positions[start:end] = torch.arange(end - start)
        return valid_mask, original_positions


class SPTBlendRetriever(BlendRetriever):
    """Retrieves prompts whose segments were divided by a SPecial Token, or a sequence of them.

    ``[x, x, spt, y, y, y]`` is retrieved as ``[x, x]`` and ``[y, y, y]``, each stored by itself before.
    """

    @overload
    def __init__(self, cache_engine: LMCacheEngine, metadata: LMCacheEngineMetadata) -> None: ...

    @overload
    def __init__(
        self, spt: Sequence[int], cache_engine: LMCacheEngine, metadata: LMCacheEngineMetadata
    ) -> None: ...

    def __init__(self, *args: Any, **named: Any) -> None:
        """``spt``: token ids of the separator; without it ``drop_spt_and_get_indices`` can't be used.

        Raises ValueError for an unknown format in ``metadata``.
        """
        names = ("spt", "cache_engine", "metadata")[-(len(args) + len(named)) :]
        given = dict(zip(names, args, strict=False)) | named
        self.spt: list[int] = list(given.get("spt", ()))
        self.cache_engine: LMCacheEngine = given["cache_engine"]
        self.metadata: LMCacheEngineMetadata = given["metadata"]
        token_dim(self.metadata.fmt)  # raises
        self._pool = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="blend-retriever")

    def new_request(
        self, full_prompts: list[torch.Tensor], indices: list[list[int]]
    ) -> SPTBlendRetrieverTask:
        """Start retrieving, and return at once. Segments may be empty.

        Raises ValueError when prompts and indices differ in number, or when indices fall or leave the prompt.
        """
        segments: list[Segment] = []
        for prompt, starts in zip(full_prompts, indices, strict=True):
            if [0, *starts, len(prompt)] != sorted([0, *starts, len(prompt)]):
                raise ValueError(f"Invalid indices for a prompt of {len(prompt)} tokens: {starts}")
            segments += map(Segment, prompt.tensor_split(starts))
        return self.retrieve(segments)

    def retrieve(self, segments: Sequence[Segment]) -> SPTBlendRetrieverTask:
        """Start retrieving segments that stand side by side, each straight to its place; return at once."""
        dim = 2 + token_dim(self.metadata.fmt)
        segments = [segment for segment in segments if len(segment.tokens)]
        places = [0, *accumulate(len(segment.tokens) for segment in segments)]
        kv = self._place(segments, places[-1])
        lengths = [
            self._pool.submit(self._fill, kv.narrow(dim, start, len(segment.tokens)), segment)
            if segment.is_reusable and kv is not None
            else 0
            for start, segment in zip(places, segments, strict=False)
        ]
        return SPTBlendRetrieverTask(kv, lengths, places)

    def close(self) -> None:
        """End the threads; what is under way is finished."""
        self._pool.shutdown()

    def _place(self, segments: Sequence[Segment], num_tokens: int) -> torch.Tensor | None:
        """Return memory for the KV of so many tokens; None: nothing is to be retrieved, or there is none."""
        if not any(segment.is_reusable for segment in segments):
            return None
        try:
            return self.cache_engine.empty(num_tokens)
        except Exception as error:
            logger.warning("no memory for the KV of %d tokens, nothing is retrieved: %r", num_tokens, error)
            return None

    def _fill(self, place: torch.Tensor, segment: Segment) -> int:
        """Put a segment's KV in its place; return how many leading tokens of it there are."""
        try:
            if segment.kv is None:
                return self.cache_engine.retrieve_into(segment.tokens, place)
            for layer, (k, v) in zip(place, segment.kv, strict=True):
                layer[0].copy_(k)
                layer[1].copy_(v)
            tensors.synchronize(place)
        except Exception as error:
            logger.warning("a segment of %d tokens could not be retrieved: %r", len(segment.tokens), error)
            return 0
        return len(segment.tokens)

    def drop_spt_and_get_indices(self, prompt: list[int]) -> tuple[list[int], list[int]]:
        """Return the prompt without its separators, and where in it the second and further segments start.

        Raises ValueError when the retriever was made without a separator.
        """
        if not self.spt:
            raise ValueError("this retriever was made without a separator")
        tokens: list[int] = []
        starts: list[int] = []
        at = 0
        while at < len(prompt):
            if prompt[at : at + len(self.spt)] == self.spt:
                starts.append(len(tokens))
                at += len(self.spt)
            else:
                tokens.append(prompt[at])
                at += 1
        return tokens, starts
