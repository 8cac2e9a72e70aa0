"""Retrieves the segments of a prompt, each of which was stored by itself, and lays them side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, overload

import torch

from lmcache.blend.interfaces import BlendRetriever, BlendRetrieverResult, BlendRetrieverTask
from lmcache.config import LMCacheEngineMetadata
from lmcache.logging import init_logger
from lmcache.utils import KVCache, token_dim

if TYPE_CHECKING:
    from lmcache.cache_engine import LMCacheEngine

logger = init_logger(__name__)

Shift = Callable[[torch.Tensor, int, int], None]
"""``(k, shift, layer_id)``: rotate in place K of side by side tokens of one layer by ``shift`` positions."""

_NUM_WORKERS = 4  # enough to overlap waiting for a remote storage with copying


class SPTBlendRetrieverTask(BlendRetrieverTask):
    """The retrieval of a batch's segments. A segment whose retrieval fails counts as not stored."""

    def __init__(
        self, kv: torch.Tensor | None, dim: int, lengths: list[Future[int] | int], places: list[int]
    ) -> None:
        """``kv``: all layers of all tokens, ``[num_layers, 2, ...]``, of which dimension ``dim`` counts
        tokens; None: nothing is there.

        ``lengths``: of each segment, how many leading tokens are there, now or later. ``places``: where each
        segment starts, and the number of tokens.
        """
        self._kv, self._dim, self._lengths, self._places = kv, dim, lengths, places

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

    def missing(self) -> list[int]:
        """Wait for all segments, then return the numbers of those that were wanted and are not whole; none
        when there is no memory to ``fill``."""
        return [
            at
            for at, (start, end) in enumerate(pairwise(self._places))
            if isinstance(self._lengths[at], Future) and self._num_found(at) < end - start
        ]

    def fill(self, at: int, kv: KVCache) -> None:
        """Put a segment's KV, (K, V) per layer, where it was not found, before the first ``result``."""
        assert self._kv is not None
        start, end = self._places[at : at + 2]
        for layer, (k, v) in zip(self._kv.narrow(self._dim, start, end - start), kv, strict=True):
            layer[0].copy_(k)
            layer[1].copy_(v)
        self._lengths[at] = end - start

    def move(self, shift: Shift, starts: Sequence[int]) -> None:
        """Rotate the K of each segment to where it stands: ``starts``, the position of its first token in its
        prompt. In the memory that ``result`` shows, once, after what is missing was filled in."""
        if self._kv is None:
            return
        dim = self._dim - 2
        for layer_id, (k, _) in enumerate(self._kv):
            for at, (place, start) in enumerate(zip(self._places, starts, strict=False)):
                num_tokens = self._num_found(at)
                if num_tokens and start:
                    shift(k.narrow(dim, place, num_tokens), start, layer_id)

    @cached_property
    def _validity(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The valid mask, and the original positions: a segment was stored from position 0."""
        valid_mask = torch.zeros(self._places[-1], dtype=torch.int)
        original_positions = torch.zeros(self._places[-1], dtype=torch.int)
        for at, start in enumerate(self._places[:-1]):
            end = start + self._num_found(at)
            valid_mask[start:end] = 1
            original_positions[start:end] = torch.arange(end - start)
        return valid_mask, original_positions

    def _num_found(self, at: int) -> int:
        """Wait for a segment, then return how many leading tokens of it are there."""
        length = self._lengths[at]
        return length.result() if isinstance(length, Future) else length


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
        segments: list[torch.Tensor] = []
        for prompt, starts in zip(full_prompts, indices, strict=True):
            if [0, *starts, len(prompt)] != sorted([0, *starts, len(prompt)]):
                raise ValueError(f"Invalid indices for a prompt of {len(prompt)} tokens: {starts}")
            segments += (segment for segment in prompt.tensor_split(starts) if len(segment))
        return self.retrieve(segments)

    def retrieve(
        self, segments: Sequence[torch.Tensor], is_wanted: Sequence[bool] | None = None
    ) -> SPTBlendRetrieverTask:
        """Start retrieving segments that stand side by side, each straight to its place; return at once.

        ``is_wanted``: False for a segment that is not looked up, and counts as not stored.
        """
        dim = 2 + token_dim(self.metadata.fmt)
        wanted = [True] * len(segments) if is_wanted is None else is_wanted
        places = [0, *accumulate(map(len, segments))]
        kv = self._memory(places[-1]) if any(wanted) else None
        lengths = [
            self._pool.submit(self._fill, kv.narrow(dim, start, len(segment)), segment)
            if kv is not None and wanted[at]
            else 0
            for at, (start, segment) in enumerate(zip(places, segments, strict=False))
        ]
        return SPTBlendRetrieverTask(kv, dim, lengths, places)

    def close(self) -> None:
        """End the threads; what is under way is finished."""
        self._pool.shutdown()

    def _memory(self, num_tokens: int) -> torch.Tensor | None:
        try:
            return self.cache_engine.empty(num_tokens)
        except Exception as error:
            logger.warning("no memory for the KV of %d tokens, nothing is retrieved: %r", num_tokens, error)
            return None

    def _fill(self, place: torch.Tensor, segment: torch.Tensor) -> int:
        """Put a segment's KV in its place; return how many leading tokens of it there are."""
        try:
            return self.cache_engine.retrieve_into(segment, place)
        except Exception as error:
            logger.warning("a segment of %d tokens could not be retrieved: %r", len(segment), error)
            return 0

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
