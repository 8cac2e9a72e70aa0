"""Retrieves the segments of a prompt, each of which was stored by itself, and lays them side by side."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch

from lmcache.blend.interfaces import BlendRetriever, BlendRetrieverResult, BlendRetrieverTask
from lmcache.config import LMCacheEngineMetadata
from lmcache.logging import init_logger
from lmcache.utils import token_dim

if TYPE_CHECKING:
    from lmcache.cache_engine import LMCacheEngine

logger = init_logger(__name__)

_NUM_WORKERS = 4  # enough to overlap waiting for a remote storage with copying


class _Hit(NamedTuple):
    start: int
    """Of its segment among all tokens."""
    length: int
    """Tokens, from the segment's start."""
    kv: torch.Tensor
    """[num_layers, 2, ...], one layer's K or V as the format says."""


class SPTBlendRetrieverTask(BlendRetrieverTask):
    """The retrieval of a batch's segments. A segment whose retrieval fails counts as not stored."""

    def __init__(
        self, token_segments: Sequence[torch.Tensor], tasks: Sequence[Future[Any]], fmt: str
    ) -> None:
        """``tasks``: of each segment what ``LMCacheEngine.retrieve`` returns, the KV as one tensor."""
        assert len(token_segments) == len(tasks), "The number of token segments and tasks should match."
        self.token_segments = token_segments
        self.tasks = tasks
        self.fmt = fmt
        self._num_tokens = sum(len(segment) for segment in token_segments)

    def result(self, layer_id: int) -> BlendRetrieverResult:
        """Wait for all segments, then return one layer; the tensors are the caller's own.

        They are ``[num_tokens, num_kv_heads, head_size]`` in the format "vllm" and ``[num_kv_heads,
        num_tokens, head_size]`` in "huggingface". Raises IndexError for a layer that the stored KV lacks.
        """
        k, v = (self._layer(layer_id, k_or_v) for k_or_v in (0, 1)) if self._hits else (None, None)
        return BlendRetrieverResult(k, v, *(mask.clone() for mask in self._validity))

    @cached_property
    def _hits(self) -> list[_Hit]:
        hits, start = [], 0
        for segment, task in zip(self.token_segments, self.tasks, strict=True):
            try:
                kv, is_retrieved = task.result()
            except Exception as error:
                logger.warning("a segment of %d tokens could not be retrieved: %r", len(segment), error)
            else:
                if length := int(is_retrieved.sum()):
                    hits.append(_Hit(start, length, kv))
            start += len(segment)
        return hits

    @cached_property
    def _validity(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The valid mask, and the original positions: a segment was stored from position 0."""
        valid_mask = torch.zeros(self._num_tokens, dtype=torch.int)
        original_positions = torch.zeros(self._num_tokens, dtype=torch.int)
        for start, length, _ in self._hits:
            valid_mask[start : start + length] = 1
            original_positions[start : start + length] = torch.arange(length)
        return valid_mask, original_positions.to(self._hits[0].kv.device if self._hits else "cpu")

    def _layer(self, layer_id: int, k_or_v: int) -> torch.Tensor:
        dim = token_dim(self.fmt)
        shape = list(self._hits[0].kv[layer_id, k_or_v].shape)
        shape[dim] = self._num_tokens
        layer = self._hits[0].kv.new_empty(shape)
        for start, length, kv in self._hits:
            layer.narrow(dim, start, length).copy_(kv[layer_id, k_or_v])
        return layer


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
        tasks = [self._pool.submit(self.cache_engine.retrieve, segment, None, False) for segment in segments]
        return SPTBlendRetrieverTask(segments, tasks, self.metadata.fmt)

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
