"""Answers prompts of several segments whose KV is computed once, alone, and reused in any order and mix.

    blended = BlendedModel(model, engine, tokenizer)  # the engine's configuration has enable_blending
    output = blended.generate([*documents, question], max_new_tokens=32)  # token ids of each, or one text

Blended KV is approximate and is therefore never stored. The engine stores the KV of segments under a separate
salt (``SEGMENT_SALT``), so that no lookup of a whole prompt finds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from lmcache.blend.executor import CacheBlendImpl
from lmcache.blend.interfaces import BlendRetrieverTask
from lmcache.blend.retriever import SPTBlendRetriever
from lmcache.blend.selection import MostAttended, NoTokens, Selection
from lmcache.cache_engine import LMCacheEngine
from lmcache.huggingface.blending import BlendedCache, BlendingPass, QuestionAttention, add_hooks
from lmcache.huggingface.cached import CachedModel, obstacle_of_model
from lmcache.huggingface.prompts import Prompt, PromptSplitter
from lmcache.logging import init_logger
from lmcache.utils import KVCache
from lmcache_client.blend.attention import MAX_OBSERVED
from lmcache_client.blend.rotation import Angles

logger = init_logger(__name__)

SEGMENT_SALT = "lmcache blend segment"
"""``cache_salt`` of the KV of segments."""
FAMILIES = ("gemma", "llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Values of transformers' ``model_type`` whose forward pass can be blended."""
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary types, by transformers' names, whose frequencies don't depend on the length of the prompt."""


@dataclass
class Prefilled:
    """The result of a prefill for one prompt."""

    logits: torch.Tensor
    """Logits of the prompt's last tokens, ``[num_logits, vocab_size]``."""
    cache: DynamicCache
    """KV of all tokens of the prompt, approximate if anything was reused."""


class BlendedModel:
    """Generates from segments whose KV was computed separately. A cache fault costs time, never an answer.

    The last segment (the question) is always computed in its place. In these cases the prompt is answered
    exactly instead, as by ``CachedModel``, and a log line gives the reason:

    - Blending is not enabled.
    - The prompt has fewer tokens than ``blend_min_tokens``, or more than the model's window.
    - The prompt has only one segment.
    - ``CachedModel`` can't cache the arguments of ``generate``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: LMCacheEngine,
        tokenizer: PreTrainedTokenizerBase | None = None,
        selection: Selection | None = None,
    ) -> None:
        """``tokenizer``: needed for prompts as text. ``selection``: chooses the tokens to recompute. Default:
        the tokens that the question attends to most, a share of ``blend_recompute_ratio``.

        Raises ValueError, with the reason, if the model can't be blended or the engine's metadata does not
        match it.
        """
        self._exact = CachedModel(model, engine)
        try:
            if obstacle := _obstacle(model):
                raise ValueError(obstacle)
            self._shift = RotaryShift(model)
        except ValueError as error:
            raise ValueError(f"{type(model).__name__} can't be blended: {error}") from error
        self.model, self.engine, self.tokenizer = model, engine, tokenizer
        self.config = engine.config
        self.selection = selection or MostAttended(self.config.blend_recompute_ratio)
        if self.selection.layer >= self._num_layers - 1:
            raise ValueError(
                f"the selection's layer {self.selection.layer} leaves none of {self._num_layers} to save: "
                "use a selection of an earlier layer, such as selection=FirstTokens(0.15)"
            )
        self._splitter = PromptSplitter(model, tokenizer, self.config.blend_separator)
        self._special = self._splitter.special_tokens
        prefix = self._special if self.config.blend_add_special_in_precomp else []
        self._segment_prefix = torch.tensor(prefix, dtype=torch.long)
        self.segments = engine.salted(f"{SEGMENT_SALT} {prefix}")
        """A view of the engine that stores and finds the KV of segments, and counts its hits and misses."""
        self._retriever = SPTBlendRetriever(self.segments, engine.metadata)
        self._close = weakref.finalize(self, _remove_hooks, add_hooks(model), self._retriever)

    def generate(self, prompt: Prompt, **kwargs: Any) -> Any:
        """Return what ``model.generate`` returns for the joined segments, with the same ``kwargs``.

        Hidden states and attentions, if requested, are those of the tokens that each layer computed.
        Raises ValueError for a text without a tokenizer, for a segment that is neither a text nor a list of
        token ids, and for a prompt without tokens.
        """
        segments = self.split(prompt)
        if kwargs.get("past_key_values", ...) is None:
            del kwargs["past_key_values"]
        input_ids = torch.cat(segments)[None].to(self.model.device)
        obstacle = self._obstacle_of_prompt(segments) or self._exact.obstacle_of_call(input_ids, kwargs)
        if obstacle:
            logger.info("The prompt is computed exactly, not blended: %s", obstacle)
            return self._exact.generate(input_ids, **kwargs)
        cache = BlendedCache(self._begin([segments], [True]), self._num_layers)
        return self.model.generate(input_ids, past_key_values=cache, **kwargs)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Prompt], num_logits: int = 1) -> list[Prefilled]:
        """Compute several prompts in one forward pass, packed side by side, without influence on each other.

        ``num_logits``: number of last tokens of each prompt to return logits for, at most the length of its
        last segment. Prompts that ``generate`` would not blend are computed exactly. To continue from a
        result, crop the last token of its cache and call
        ``model.generate(input_ids, past_key_values=prefilled.cache)``.

        Raises ValueError as ``generate`` does, and for ``num_logits`` out of range.
        """
        split = [self.split(prompt) for prompt in prompts]
        if not 1 <= num_logits <= min((len(segments[-1]) for segments in split), default=0):
            raise ValueError(
                f"Invalid num_logits: {num_logits} (must be 1 to the length of the shortest last segment)"
            )
        blending = self._begin(split, [self._obstacle_of_prompt(segments) is None for segments in split])
        cache = BlendedCache(blending, self._num_layers)
        hidden = self._forward(split, blending, cache)
        ends = torch.searchsorted(blending.selected, blending.query_start_loc[1:])
        head = self.model.get_output_embeddings()
        starts = blending.query_start_loc.tolist()
        return [
            Prefilled(head(hidden[end - num_logits : end]), _part(cache, start, stop))
            for end, start, stop in zip(ends.tolist(), starts, starts[1:], strict=False)
        ]

    def precompute(self, segments: Prompt) -> int:
        """Compute and store the KV of segments that are not stored yet, and return their number of tokens.

        Includes the last segment. A segment longer than the model's window is of no use: prompts that contain
        it are not blended.

        Raises ValueError for a text without a tokenizer, for a segment that is neither a text nor a list of
        token ids, and for a model that was changed so that it can't be blended any more.
        """
        if obstacle := _obstacle(self.model):
            raise ValueError(f"{type(self.model).__name__} can't be blended: {obstacle}")
        unique = {tuple(segment.tolist()): segment for segment in self._splitter.segments(segments)}
        missing = [segment for segment in unique.values() if not self._is_stored(segment)]
        for segment in missing:
            self._compute(segment)
        return sum(map(len, missing))

    def split(self, prompt: Prompt) -> list[torch.Tensor]:
        """Return the prompt's segments without empty ones, int64 token ids ``[num_tokens]`` on the CPU.

        Each text is tokenized separately, and separators are not part of the prompt. If the first segment is
        a text, the tokenizer's special tokens become a segment before it. So a document has the same tokens
        wherever it occurs. Raises ValueError as ``generate`` does.
        """
        return self._splitter.split(prompt)

    def close(self) -> None:
        """Remove the hooks from the model and end the threads; later answers are exact.

        The engine stays open. Must not be called while another thread computes a prompt.
        """
        self._close()

    def __enter__(self) -> BlendedModel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _num_layers(self) -> int:
        return int(self.engine.metadata.kv_shape[0])

    def _obstacle_of_prompt(self, segments: list[torch.Tensor]) -> str | None:
        num_tokens = sum(map(len, segments))
        window = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if not self.config.enable_blending:
            return "enable_blending is off in the engine's configuration"
        if not self._documents(segments):
            return "the prompt has no document before its last segment"
        if segments[0][: len(self._segment_prefix)].tolist() != self._segment_prefix.tolist():
            # All its documents would lack the tokens that they attend to most.
            return "the prompt does not begin with the special tokens that precede stored segments"
        if not self._close.alive:
            return "the BlendedModel was closed"
        if obstacle := _obstacle(self.model):  # checked in every call, because a model can be changed
            return obstacle
        if num_tokens < self.config.blend_min_tokens:
            return f"{num_tokens} tokens are fewer than blend_min_tokens ({self.config.blend_min_tokens})"
        if window is not None and num_tokens > window:
            return f"{num_tokens} tokens are more than the model's window ({window})"
        return None

    def _begin(self, prompts: list[list[torch.Tensor]], is_blended: list[bool]) -> BlendingPass:
        """Start a pass over prompts side by side, with the KV of the segments to reuse.

        Segments that are not stored are computed alone, stored, and added to the retrieved KV.
        """
        segments = [segment for prompt in prompts for segment in prompt]
        is_wanted: list[bool] = []
        for prompt, is_reused in zip(prompts, is_blended, strict=True):
            documents = self._documents(prompt) if is_reused else []
            is_wanted += (number in documents for number in range(len(prompt)))
        task = self._retriever.retrieve(segments, is_wanted)
        computed: dict[tuple[int, ...], KVCache] = {}
        for number in task.missing():
            tokens = tuple(segments[number].tolist())
            if tokens not in computed:
                computed[tokens] = self._compute(segments[number])
            task.fill(number, computed[tokens])
        starts = (accumulate(map(len, prompt[:-1]), initial=0) for prompt in prompts)
        task.move(self._shift, list(chain.from_iterable(starts)))
        lengths = [sum(map(len, prompt)) for prompt in prompts]
        if not self.selection.reads_attention:
            return self._pass(task, lengths, self.selection)
        attention = self._attention(task, prompts, is_blended, lengths)
        return self._pass(task, lengths, self.selection, attention)

    def _pass(
        self,
        task: BlendRetrieverTask,
        lengths: list[int],
        selection: Selection,
        attention: torch.Tensor | None = None,
    ) -> BlendingPass:
        ratio = self.config.blend_recompute_ratio
        executor = CacheBlendImpl(ratio, selection=selection, in_place=True, k_is_placed=True)
        is_eager = self.model.config._attn_implementation == "eager"
        dtype = self.model.dtype if is_eager else None
        return BlendingPass(task, executor, lengths, self.model.device, dtype, attention)

    @torch.no_grad()
    def _attention(
        self,
        task: BlendRetrieverTask,
        prompts: list[list[torch.Tensor]],
        is_blended: list[bool],
        lengths: list[int],
    ) -> torch.Tensor:
        """Compute the questions over the reusable KV. Return how strongly their last tokens attend to each
        token, float32 ``[num_tokens]``."""
        observed = [
            min(len(prompt[-1]), MAX_OBSERVED) if is_reused else 0
            for prompt, is_reused in zip(prompts, is_blended, strict=True)
        ]
        is_question = torch.cat(
            [torch.arange(-length, 0) >= -number for length, number in zip(lengths, observed, strict=True)]
        ).to(self.model.device)
        if not task.result(0).valid_mask.any():  # all tokens will be computed: no scores are needed
            return torch.zeros(len(is_question), device=is_question.device)
        blending = self._pass(task, lengths, NoTokens())
        cache = BlendedCache(blending, self._num_layers)
        cache.observer = QuestionAttention(blending, is_question)
        self._forward(prompts, blending, cache)
        return cache.observer.total

    def _forward(
        self, prompts: list[list[torch.Tensor]], blending: BlendingPass, cache: BlendedCache
    ) -> torch.Tensor:
        """Compute prompts side by side; return the last hidden states of the selected tokens."""
        tokens = torch.cat([segment for segments in prompts for segment in segments]).to(self.model.device)
        hidden: torch.Tensor = self.model.get_decoder()(
            input_ids=tokens[None],
            position_ids=blending.positions[None],
            attention_mask=blending.mask() if len(prompts) > 1 else None,
            past_key_values=cache,
        ).last_hidden_state[0]
        return hidden

    def _documents(self, segments: list[torch.Tensor]) -> list[int]:
        """Return the numbers of segments whose KV is reused: all but the last and the special tokens."""
        return [number for number, tokens in enumerate(segments[:-1]) if tokens.tolist() != self._special]

    def _is_stored(self, tokens: torch.Tensor) -> bool:
        try:
            return self.segments.lookup(tokens) == len(tokens)
        except Exception as error:
            logger.warning("Computing a segment of %d tokens: its lookup failed: %r", len(tokens), error)
            return False

    @torch.no_grad()
    def _compute(self, tokens: torch.Tensor) -> KVCache:
        """Compute a segment's KV alone, ``[num_kv_heads, num_tokens, head_size]`` per layer, and store it.

        With ``blend_add_special_in_precomp``, special tokens precede the segment at negative positions. The
        segment's K then has the same positions as without them.
        """
        num_special = len(self._segment_prefix)
        cache = DynamicCache()
        self.model.get_decoder()(
            input_ids=torch.cat((self._segment_prefix, tokens))[None].to(self.model.device),
            position_ids=torch.arange(-num_special, len(tokens), device=self.model.device)[None],
            past_key_values=cache,
        )
        kv = tuple((x.keys[0, :, num_special:], x.values[0, :, num_special:]) for x in cache.layers)
        try:
            self.segments.store(tokens, kv)
        except Exception as error:
            logger.warning("A segment of %d tokens is used but not stored: %r", len(tokens), error)
        return kv


def _obstacle(model: PreTrainedModel) -> str | None:
    """Return why the model can't be blended; None if it can."""
    if obstacle := obstacle_of_model(model):
        return obstacle
    if model.config.model_type not in FAMILIES:
        return f"model type {model.config.model_type} is not one of {', '.join(FAMILIES)}"
    if (attention := model.config._attn_implementation) not in ("sdpa", "eager"):
        return f"attn_implementation {attention} can't compute selected tokens: load the model with sdpa"
    return None


def _part(cache: DynamicCache, start: int, end: int) -> DynamicCache:
    """Return the KV of the prompt at tokens ``start`` to ``end`` of packed prompts."""
    layers = ((layer.keys, layer.values) for layer in cache.layers)
    return DynamicCache([(keys[:, :, start:end], values[:, :, start:end]) for keys, values in layers])


def _remove_hooks(hooks: list[RemovableHandle], retriever: SPTBlendRetriever) -> None:
    for hook in hooks:
        hook.remove()
    retriever.close()


class RotaryShift:
    """Rotates K in place, from its position p to position p + shift.

    One rotation by the difference of positions replaces a rotation back and one forward.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ValueError if the type of the model's rotary embedding is not supported."""
        decoder = model.get_decoder()
        rotary = getattr(decoder, "rotary_emb", None)
        rope_type = getattr(rotary, "rope_type", None)
        if rotary is None or rope_type not in _ROPE_TYPES:
            raise ValueError(f"its rotary embedding is {rope_type}, not one of {', '.join(_ROPE_TYPES)}")
        self._frequencies: torch.Tensor = rotary.inv_freq.float()
        self._is_rotated = [getattr(layer.self_attn, "use_rope", True) for layer in decoder.layers]

    def __call__(self, k: torch.Tensor, shift: int, layer_id: int) -> None:
        """Rotate ``k`` ``[..., num_tokens, head_size]`` of one layer. The halves of a head form the pairs."""
        if not self._is_rotated[layer_id]:
            return
        angles = (self._frequencies * shift).to(k.device)
        Angles(angles.cos(), angles.sin()).rotate(k.movedim(-2, 0))
