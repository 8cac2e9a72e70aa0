"""Finds the documents of a text prompt by the text between them::

    prefix SEPARATOR document SEPARATOR document SEPARATOR question

The separator is found as tokens. The connector sees no text, so the tokens must be the same next to any text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from lmcache_client.errors import UnsupportedError

logger = logging.getLogger(__name__)

_NEIGHBOURS = ("The end.", "word", "12", "(a)", "“Größe”", "数据。", "Line\n")
"""Texts next to a separator. Their edges are those that tokenizers often merge with other characters."""
_UNUSABLE = (
    "LMCache Cluster finds no documents by lmcache.blend_separator (%r): %s. vLLM computes the prompts of"
    ' requests with "separator": true exactly.'
)


@dataclass(frozen=True)
class Separator:
    """The configured separator of documents."""

    tokens: tuple[int, ...] = ()
    obstacle: str = "needs lmcache.blend_separator: set it in the engine, or name documents or starts instead"
    """Why prompts can't be split, if there are no tokens."""

    @classmethod
    def load(cls, text: str, model_config: Any) -> Separator:
        """Encode the configured ``text`` as the engine encodes prompts. If that fails, log a warning."""
        if not text:
            return cls()
        try:
            return cls(_encode(text, _tokenizer(model_config)))
        except Exception as error:
            logger.warning(_UNUSABLE, text, error)
            return cls((), "can't be used, as the engine's log said at the start: name documents or starts")

    def places(self, tokens: Sequence[int]) -> Iterator[int]:
        """Yield the positions of the separators in a prompt, in ascending order, without overlap."""
        size, array = len(self.tokens), np.asarray(tokens, np.int64)
        places = np.arange(max(0, len(array) - size + 1))
        for offset, token in enumerate(self.tokens):
            places = places[array[places + offset] == token]
        end = 0
        for place in places.tolist():
            if place >= end:  # a separator such as "--" overlaps itself in "---"
                yield place
                end = place + size


def _tokenizer(model_config: Any) -> Any:
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(model_config)
    if tokenizer is None:
        raise UnsupportedError("vLLM has no tokenizer; start it without --skip-tokenizer-init")
    return tokenizer


def _encode(text: str, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens of a separator. Raises UnsupportedError if they depend on the text next to it."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    tokens = encode(text)
    for left, right in product(_NEIGHBOURS, repeat=2):
        if not tokens or encode(left + text + right) != [*encode(left), *tokens, *encode(right)]:
            raise UnsupportedError(
                f"the tokenizer merges it with text next to it, as in {left + text + right!r}; set it to a"
                " special token of the model, or to text that begins with a blank and ends with a line break"
            )
    return tuple(tokens)
