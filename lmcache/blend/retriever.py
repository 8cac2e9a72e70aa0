"""Retrieval of the separately stored segments of a prompt into one contiguous tensor."""

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
"""``(k, shift, layer_id)``: rotates K of consecutive tokens of one layer by ``shift`` positions, in place."""

_NUM_WORKERS = 4  # enough to overlap waits for remote storage with copies


class SPTBlendRetrieverTask(BlendRetrieverTask):
    """The retrieval of a batch's segments. A segment whose retrieval fails counts as not stored."""

    def __init__(
        self, kv: torch.Tensor | None, dim: int, lengths: list[Future[int] | int], places: list[int]
    ) -> None:
        """Track the retrieval of segments into ``kv``.

        ``kv`` has all layers of all tokens, ``[num_layers, 2, ...]``; its dimension ``dim`` counts tokens.
        None means that nothing is retrieved. ``lengths`` gives, for each segment, the number of leading
        tokens that are stored, now or in future. ``places`` gives the start of each segment, followed by the
        number of tokens.
        """
        self._kv, self._dim, self._lengths, self._places = kv, dim, lengths, places

    def result(self, layer_id: int) -> BlendRetrieverResult:
        """Wait for all segments, then return one layer. The caller may change the tensors.

        They are ``[num_tokens, num_kv_heads, head_size]`` in format "vllm" and ``[num_kv_heads, num_tokens,
        head_size]`` in format "huggingface". Further calls for a layer return the same tensors. Raises
        IndexError for a layer that the stored KV does not have.
        """
        valid_mask, original_positions = (mask.clone() for mask in self._validity)
        if self._kv is None or not valid_mask.any():
            return BlendRetrieverResult(None, None, valid_mask, original_positions)
        k, v = self._kv[layer_id].unbind()
        return BlendRetrieverResult(k, v, valid_mask, original_positions.to(self._kv.device))

    def missing(self) -> list[int]:
        """Wait for all segments, then return the indices of those that were looked up and are incomplete.

        Returns an empty list if there is no memory for ``fill``.
        """
        return [
            segment
            for segment, (start, end) in enumerate(pairwise(self._places))
            if isinstance(self._lengths[segment], Future) and self._num_found(segment) < end - start
        ]

    def fill(self, segment: int, kv: KVCache) -> None:
        """Supply the KV of a missing segment, (K, V) per layer. Call it before the first ``result``."""
        assert self._kv is not None
        start, end = self._places[segment : segment + 2]
        for layer, (k, v) in zip(self._kv.narrow(self._dim, start, end - start), kv, strict=True):
            layer[0].copy_(k)
            layer[1].copy_(v)
        self._lengths[segment] = end - start

    def move(self, shift: Shift, starts: Sequence[int]) -> None:
        """Rotate the K of each segment, in place, to its position in the prompt.

        ``starts`` gives the position of each segment's first token in its prompt. Call it once, after missing
        segments were filled.
        """
        if self._kv is None:
            return
        dim = self._dim - 2
        for layer_id, (k, _) in enumerate(self._kv):
            for segment, (place, start) in enumerate(zip(self._places, starts, strict=False)):
                num_tokens = self._num_found(segment)
                if num_tokens and start:
                    shift(k.narrow(dim, place, num_tokens), start, layer_id)

    @cached_property
    def _validity(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The valid mask, and the original positions (each segment was stored from position 0)."""
        valid_mask = torch.zeros(self._places[-1], dtype=torch.int)
        original_positions = torch.zeros(self._places[-1], dtype=torch.int)
        for segment, start in enumerate(self._places[:-1]):
            end = start + self._num_found(segment)
            valid_mask[start:end] = 1
            original_positions[start:end] = torch.arange(end - start)
        return valid_mask, original_positions

    def _num_found(self, segment: int) -> int:
        """Wait for a segment, then return the number of its leading tokens that were found."""
        length = self._lengths[segment]
        return length.result() if isinstance(length, Future) else length


class SPTBlendRetriever(BlendRetriever):
    """Retrieves prompts whose segments are separated by a SPecial Token, or a sequence of special tokens.

    ``[x, x, spt, y, y, y]`` is retrieved as ``[x, x]`` and ``[y, y, y]``, each of which was stored
    separately.
    """

    @overload
    def __init__(self, cache_engine: LMCacheEngine, metadata: LMCacheEngineMetadata) -> None: ...

    @overload
    def __init__(
        self, spt: Sequence[int], cache_engine: LMCacheEngine, metadata: LMCacheEngineMetadata
    ) -> None: ...

    def __init__(self, *args: Any, **named: Any) -> None:
        """Retrieve from ``cache_engine``.

        ``spt`` holds the token ids of the separator; ``drop_spt_and_get_indices`` needs it. Raises ValueError
        for an unknown format in ``metadata``.
        """
        names = ("spt", "cache_engine", "metadata")[-(len(args) + len(named)) :]
        arguments = dict(zip(names, args, strict=False)) | named
        self.spt: list[int] = list(arguments.get("spt", ()))
        self.cache_engine: LMCacheEngine = arguments["cache_engine"]
        self.metadata: LMCacheEngineMetadata = arguments["metadata"]
        token_dim(self.metadata.fmt)  # raises ValueError for an unknown format
        self._pool = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="blend-retriever")

    def new_request(
        self, full_prompts: list[torch.Tensor], indices: list[list[int]]
    ) -> SPTBlendRetrieverTask:
        """Start the retrieval, and return immediately. Segments may be empty.

        Raises ValueError if prompts and indices differ in number, or if indices are not ascending or not
        inside the prompt.
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
        """Start the retrieval of consecutive segments into one tensor, and return immediately.

        ``is_wanted`` is False for segments that are not to be looked up; they count as not stored.
        """
        dim = 2 + token_dim(self.metadata.fmt)
        wanted = [True] * len(segments) if is_wanted is None else is_wanted
        places = [0, *accumulate(map(len, segments))]
        kv = self._memory(places[-1]) if any(wanted) else None
        lengths = [
            self._pool.submit(self._fill, kv.narrow(dim, start, len(segment)), segment)
            if kv is not None and wanted[index]
            else 0
            for index, (start, segment) in enumerate(zip(places, segments, strict=False))
        ]
        return SPTBlendRetrieverTask(kv, dim, lengths, places)

    def close(self) -> None:
        """Wait for running retrievals, then end the threads."""
        self._pool.shutdown()

    def _memory(self, num_tokens: int) -> torch.Tensor | None:
        try:
            return self.cache_engine.empty(num_tokens)
        except Exception as error:
            logger.warning("Retrieved nothing: no memory for the KV of %d tokens: %r", num_tokens, error)
            return None

    def _fill(self, place: torch.Tensor, segment: torch.Tensor) -> int:
        """Copy a segment's stored KV to ``place``; return the number of leading tokens that were found."""
        try:
            return self.cache_engine.retrieve_into(segment, place)
        except Exception as error:
            logger.warning("Could not retrieve a segment of %d tokens: %r", len(segment), error)
            return 0

    def drop_spt_and_get_indices(self, prompt: list[int]) -> tuple[list[int], list[int]]:
        """Return the prompt without its separators, and the starts of its second and further segments.

        Raises ValueError if the retriever was created without a separator.
        """
        if not self.spt:
            raise ValueError("this retriever has no separator: pass spt when you create it")
        tokens: list[int] = []
        starts: list[int] = []
        index = 0
        while index < len(prompt):
            if prompt[index : index + len(self.spt)] == self.spt:
                starts.append(len(tokens))
                index += len(self.spt)
            else:
                tokens.append(prompt[index])
                index += 1
        return tokens, starts
