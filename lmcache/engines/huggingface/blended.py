"""Prompts of several segments: each one's KV is computed once, alone, and reused in any order and mix.

    blended = BlendedModel(model, engine, tokenizer)  # the engine's configuration has enable_blending
    output = blended.generate([*documents, question], max_new_tokens=32)  # token ids of each, or one text

Blended KV is approximate, so that it is stored nowhere. Segments' KV lies in the engine under names of its
own (``SEGMENT_SALT``), which no lookup of a prompt finds.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
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
from lmcache.engines.huggingface.blending import BlendedCache, BlendingPass, QuestionAttention, add_hooks
from lmcache.engines.huggingface.cached import CachedModel, obstacle_of_model
from lmcache.engines.huggingface.rotary import RotaryShift
from lmcache.logging import init_logger
from lmcache.utils import KVCache

logger = init_logger(__name__)

SegmentOfPrompt = str | Sequence[int] | torch.Tensor
"""A text, or its token ids ``[num_tokens]``."""
Prompt = str | Sequence[SegmentOfPrompt]
"""Segments, or one text in which the configured separator stands between them."""

_MAX_LOOKING = 128
"""Of a question so many last tokens are asked what they attend to: their scores take memory."""
SEGMENT_SALT = "lmcache blend segment"
FAMILIES = ("gemma", "llama", "mistral", "qwen2", "qwen3", "smollm3")
"""transformers' ``model_type``s whose forward pass is blended."""


@dataclass
class Prefilled:
    """What a prefill leaves of one prompt."""

    logits: torch.Tensor
    """Of its last tokens, ``[num_logits, vocab_size]``."""
    cache: DynamicCache
    """KV of all its tokens, approximate if anything was reused."""


class BlendedModel:
    """Generates from segments whose KV was computed apart; a fault of the cache costs time, never an answer.

    The last segment (the question) is always computed in its place. A prompt that can't or shall not be
    blended is answered exactly, as by ``CachedModel``, with a line in the log: blending is not enabled, fewer
    tokens than ``blend_min_tokens`` or more than the model's window, one segment only, arguments of
    ``generate`` that CachedModel does not cache either.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: LMCacheEngine,
        tokenizer: PreTrainedTokenizerBase | None = None,
        selection: Selection | None = None,
    ) -> None:
        """``tokenizer``: for prompts as text. ``selection``: which tokens are computed again; None: a share
        ``blend_recompute_ratio`` of them, those that the question attends to most.

        Raises ValueError, with the reason, for a model that can't be blended, and for an engine whose
        metadata does not fit it.
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
                "give one that selects before, such as selection=FirstTokens(0.15)"
            )
        self._special = self._special_tokens()
        behind = self._special if self.config.blend_add_special_in_precomp else []
        self._behind = torch.tensor(behind, dtype=torch.long)
        self.segments = engine.salted(f"{SEGMENT_SALT} {behind}")
        """The engine by its names of segments; it counts their hits and misses."""
        self._retriever = SPTBlendRetriever(self.segments, engine.metadata)
        self._end = weakref.finalize(self, _end, add_hooks(model), self._retriever)

    def generate(self, prompt: Prompt, **kwargs: Any) -> Any:
        """Return what ``model.generate`` returns for the joined segments, with the same ``kwargs``.

        Hidden states and attentions, if asked for, are those of the tokens that each layer computed.
        Raises ValueError for a text without a tokenizer, for what is no list of token ids, and for a prompt
        without tokens.
        """
        segments = self.split(prompt)
        if kwargs.get("past_key_values", ...) is None:
            del kwargs["past_key_values"]
        input_ids = torch.cat(segments)[None].to(self.model.device)
        obstacle = self._obstacle_of_prompt(segments) or self._exact.obstacle_of_call(input_ids, kwargs)
        if obstacle:
            logger.info("the prompt is not blended: %s", obstacle)
            return self._exact.generate(input_ids, **kwargs)
        cache = BlendedCache(self._begin([segments], [True]), self._num_layers)
        return self.model.generate(input_ids, past_key_values=cache, **kwargs)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Prompt], num_logits: int = 1) -> list[Prefilled]:
        """Compute several prompts in one forward pass, packed side by side; each is as if it were alone.

        ``num_logits``: of how many last tokens of each prompt, at most the length of its last segment. Go on
        from one by ``model.generate(input_ids, past_key_values=prefilled.cache)``, after cropping the
        cache's last token. Prompts that ``generate`` would not blend are computed exactly. Raises ValueError
        as ``generate`` does, and for ``num_logits`` out of range.
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
        """Compute and store the KV of segments that are not stored yet; return how many tokens that were.

        All of them, also the last; those longer than the model's window are in no prompt that is blended.

        Raises ValueError for a text without a tokenizer, for what is no list of token ids, and for a model
        that has been changed so that it can't be blended any more.
        """
        if obstacle := _obstacle(self.model):
            raise ValueError(f"{type(self.model).__name__} can't be blended: {obstacle}")
        split = [segment for segment in map(self._tokens, self._parts(segments)) if len(segment)]
        unique = {tuple(segment.tolist()): segment for segment in split}
        missing = [segment for segment in unique.values() if not self._is_stored(segment)]
        for segment in missing:
            self._compute(segment)
        return sum(map(len, missing))

    def split(self, prompt: Prompt) -> list[torch.Tensor]:
        """Return the prompt's segments without empty ones, int64 token ids ``[num_tokens]`` on the CPU.

        Texts are tokenized one by one, and separators are no part of the prompt. Before a text (a first
        segment that is one) the tokenizer's special tokens are a segment of their own, so that a document has
        the same tokens wherever it stands. Raises ValueError as ``generate`` does.
        """
        parts = self._parts(prompt)
        segments = [self._tokens(part) for part in parts]
        split = [segment for segment in segments if len(segment)]
        if not split:
            raise ValueError("the prompt has no tokens")
        is_text = isinstance(parts[0], str)
        return [torch.tensor(self._special), *split] if is_text and self._special else split

    def close(self) -> None:
        """Take the hooks off the model and end the threads; from now on answers are exact. The engine stays
        open. Not while a prompt is computed in another thread."""
        self._end()

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
            return "it has nothing before its last segment"
        if segments[0][: len(self._behind)].tolist() != self._behind.tolist():
            # All its documents would lack the tokens that they attend to most.
            return "it does not begin with the special tokens that segments were computed behind"
        if not self._end.alive:
            return "it was closed"
        if obstacle := _obstacle(self.model):  # asked again: a model can be changed
            return obstacle
        if num_tokens < self.config.blend_min_tokens:
            return f"its {num_tokens} tokens are fewer than blend_min_tokens ({self.config.blend_min_tokens})"
        if window is not None and num_tokens > window:
            return f"its {num_tokens} tokens are more than the model's window ({window})"
        return None

    def _begin(self, prompts: list[list[torch.Tensor]], is_blended: list[bool]) -> BlendingPass:
        """Start a pass over prompts side by side, with the KV of the segments that are reused.

        What is not stored is computed alone, stored, and put where it was not found.
        """
        segments = [segment for prompt in prompts for segment in prompt]
        is_wanted: list[bool] = []
        for prompt, is_reused in zip(prompts, is_blended, strict=True):
            documents = self._documents(prompt) if is_reused else []
            is_wanted += (at in documents for at in range(len(prompt)))
        task = self._retriever.retrieve(segments, is_wanted)
        computed: dict[tuple[int, ...], KVCache] = {}
        for at in task.missing():
            name = tuple(segments[at].tolist())
            if name not in computed:
                computed[name] = self._compute(segments[at])
            task.fill(at, computed[name])
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
        """Compute the last segments over the KV that is reusable, and return how strongly their last tokens
        look at each token."""
        looking = [
            min(len(prompt[-1]), _MAX_LOOKING) if is_reused else 0
            for prompt, is_reused in zip(prompts, is_blended, strict=True)
        ]
        is_question = torch.cat(
            [torch.arange(-length, 0) >= -number for length, number in zip(lengths, looking, strict=True)]
        ).to(self.model.device)
        if not task.result(0).valid_mask.any():  # all tokens will be computed: look at none before
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
        """Return which segments' KV is reused: all but the last, and but special tokens."""
        return [at for at, tokens in enumerate(segments[:-1]) if tokens.tolist() != self._special]

    def _is_stored(self, tokens: torch.Tensor) -> bool:
        try:
            return self.segments.lookup(tokens) == len(tokens)
        except Exception as error:
            logger.warning("a segment of %d tokens could not be looked up: %r", len(tokens), error)
            return False

    @torch.no_grad()
    def _compute(self, tokens: torch.Tensor) -> KVCache:
        """Compute a segment's KV alone, ``[num_kv_heads, num_tokens, head_size]`` per layer, and store it.

        Behind special tokens, if the configuration says so: these stand before position 0, so that the
        segment's K is at the same positions as without them.
        """
        before = len(self._behind)
        cache = DynamicCache()
        self.model.get_decoder()(
            input_ids=torch.cat((self._behind, tokens))[None].to(self.model.device),
            position_ids=torch.arange(-before, len(tokens), device=self.model.device)[None],
            past_key_values=cache,
        )
        kv = tuple((layer.keys[0, :, before:], layer.values[0, :, before:]) for layer in cache.layers)
        try:
            self.segments.store(tokens, kv)
        except Exception as error:
            logger.warning("a segment of %d tokens could not be stored: %r", len(tokens), error)
        return kv

    def _parts(self, prompt: Prompt) -> Sequence[SegmentOfPrompt]:
        if isinstance(prompt, Mapping):
            raise ValueError("a prompt must be a text or segments: give a tokenizer's input_ids, or the text")
        return prompt.split(self.config.blend_separator) if isinstance(prompt, str) else list(prompt)

    def _special_tokens(self) -> list[int]:
        """What the tokenizer puts before every text; without a tokenizer the model's BOS token, if any."""
        if self.tokenizer is None:
            bos = self.model.config.get_text_config(decoder=True).bos_token_id
            return [] if bos is None else [int(bos)]
        text = "a"
        with_special: list[int] = self.tokenizer(text)["input_ids"]
        plain: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        places = range(len(with_special) - len(plain) + 1)
        return next((with_special[:at] for at in places if with_special[at : at + len(plain)] == plain), [])

    def _tokens(self, segment: SegmentOfPrompt) -> torch.Tensor:
        """Return a segment's token ids as int64 on the CPU. Raises ValueError for what has none."""
        if isinstance(segment, str):
            if self.tokenizer is None:
                raise ValueError("a prompt as text needs a tokenizer: BlendedModel(model, engine, tokenizer)")
            segment = self.tokenizer(segment, add_special_tokens=False)["input_ids"] if segment else []
        try:
            tokens = torch.as_tensor(segment, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"a segment must be a text or a list of token ids: {error}") from error
        if tokens.dim() != 1 or (len(tokens) and (tokens.is_floating_point() or tokens.dtype == torch.bool)):
            given = f"{list(tokens.shape)} of {tokens.dtype}"
            raise ValueError(f"a segment must be a text or a list of token ids, not {given}")
        return tokens.long()


def _obstacle(model: PreTrainedModel) -> str | None:
    """Return why the model can't be blended, None when it can."""
    if obstacle := obstacle_of_model(model):
        return obstacle
    if model.config.model_type not in FAMILIES:
        return f"its family {model.config.model_type} is not one of {', '.join(FAMILIES)}"
    if (attention := model.config._attn_implementation) not in ("sdpa", "eager"):
        return f"attn_implementation {attention} can't compute selected tokens: load the model with sdpa"
    return None


def _part(cache: DynamicCache, start: int, end: int) -> DynamicCache:
    """Return one prompt's KV out of a row of prompts."""
    layers = ((layer.keys, layer.values) for layer in cache.layers)
    return DynamicCache([(keys[:, :, start:end], values[:, :, start:end]) for keys, values in layers])


def _end(hooks: list[RemovableHandle], retriever: SPTBlendRetriever) -> None:
    for hook in hooks:
        hook.remove()
    retriever.close()
