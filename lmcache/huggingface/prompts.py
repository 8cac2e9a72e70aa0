"""Splits prompts of several segments into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

SegmentOfPrompt = str | Sequence[int] | torch.Tensor
"""A text, or its token ids ``[num_tokens]``."""
Prompt = str | Sequence[SegmentOfPrompt]
"""Segments, or one text that contains the configured separator between them."""


class PromptSplitter:
    """Turns prompts into segments of token ids, int64 ``[num_tokens]`` on the CPU."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, separator: str
    ) -> None:
        self._tokenizer = tokenizer
        self._separator = separator
        self.special_tokens = self._special_tokens(model)
        """Tokens that precede every text: those of the tokenizer, or without one the model's BOS token."""

    def segments(self, prompt: Prompt) -> list[torch.Tensor]:
        """Return the prompt's segments without empty ones, and without special tokens.

        Raises ValueError for a text without a tokenizer, and for a segment that is neither a text nor a list
        of token ids.
        """
        return [tokens for tokens in map(self._tokens, self._parts(prompt)) if len(tokens)]

    def split(self, prompt: Prompt) -> list[torch.Tensor]:
        """Like ``segments``, with the special tokens as first segment if the prompt begins with a text.

        Raises ValueError also for a prompt without tokens.
        """
        parts = self._parts(prompt)
        segments = self.segments(parts)
        if not segments:
            raise ValueError("the prompt has no tokens")
        is_text = isinstance(parts[0], str)
        return [torch.tensor(self.special_tokens), *segments] if is_text and self.special_tokens else segments

    def _parts(self, prompt: Prompt) -> Sequence[SegmentOfPrompt]:
        if isinstance(prompt, Mapping):
            raise ValueError("a prompt must be a text or segments: give a tokenizer's input_ids, or the text")
        return prompt.split(self._separator) if isinstance(prompt, str) else list(prompt)

    def _special_tokens(self, model: PreTrainedModel) -> list[int]:
        if self._tokenizer is None:
            bos = model.config.get_text_config(decoder=True).bos_token_id
            return [] if bos is None else [int(bos)]
        text = "a"
        with_special: list[int] = self._tokenizer(text)["input_ids"]
        plain: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        starts = range(len(with_special) - len(plain) + 1)
        return next((with_special[:i] for i in starts if with_special[i : i + len(plain)] == plain), [])

    def _tokens(self, segment: SegmentOfPrompt) -> torch.Tensor:
        if isinstance(segment, str):
            if self._tokenizer is None:
                raise ValueError("a prompt as text needs a tokenizer: BlendedModel(model, engine, tokenizer)")
            segment = self._tokenizer(segment, add_special_tokens=False)["input_ids"] if segment else []
        try:
            tokens = torch.as_tensor(segment, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"a segment must be a text or a list of token ids: {error}") from error
        if tokens.dim() != 1 or (len(tokens) and (tokens.is_floating_point() or tokens.dtype == torch.bool)):
            given = f"{list(tokens.shape)} of {tokens.dtype}"
            raise ValueError(f"a segment must be a text or a list of token ids, not {given}")
        return tokens.long()
