"""A language model without weights: KV bytes and answers follow from the tokens so far, and can be checked.

The KV of a token is a digest of all tokens up to it, of the weights' version and of the layer. So any byte
that attention would read can be compared with what it must be, and a wrong block, a block that was never
loaded and one that was overwritten all show.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

CELL = 8
"""Bytes of KV per token and layer."""

VOCABULARY = 250

Content = Mapping[int, bytes]
"""What KV depends on beside tokens, an adapter or a picture, by the place of the first token it changes."""

Cells = npt.NDArray[np.uint8]


class TokenChain:
    """One request's tokens as the runner knows them, with a digest per token."""

    def __init__(self, tokens: Sequence[int], weights: bytes, content: Content | None = None) -> None:
        self.tokens = list(tokens)
        self.content = content or {}
        self.num_computed = 0
        self.weights = weights
        self._digests: list[bytes] = []

    def cells(self, drafts: Sequence[int] = ()) -> Cells:
        """``[tokens and drafts, CELL]``: the KV of layer 0."""
        digests = self._digests
        self._extend(digests, self.tokens)
        if drafts:
            digests = list(digests)
            self._extend(digests, [*self.tokens, *drafts])
        return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, CELL)

    def continuation(self, drafts: Sequence[int] = ()) -> list[int]:
        """What the model samples: after the last token, then after each draft as long as it was right."""
        cells = self.cells(drafts)
        sampled = [_sample(cells[len(self.tokens) - 1])]
        for number, draft in enumerate(drafts):
            if draft != sampled[-1]:
                break
            sampled.append(_sample(cells[len(self.tokens) + number]))
        return sampled

    def _extend(self, digests: list[bytes], tokens: Sequence[int]) -> None:
        for place in range(len(digests), len(tokens)):
            before = digests[-1] if digests else b"weights" + self.weights
            here = tokens[place].to_bytes(4, "little") + self.content.get(place, b"")
            digests.append(hashlib.blake2b(before + here, digest_size=CELL).digest())


def answer(prompt: Sequence[int], num_tokens: int, weights: bytes = b"") -> list[int]:
    """The right answer to a prompt."""
    sequence = TokenChain(prompt, weights)
    for _ in range(num_tokens):
        sequence.tokens += sequence.continuation()
    return sequence.tokens[len(prompt) :]


def layer_cells(cells: Cells, layer: int, group: int = 0, shard: int = 0) -> Cells:
    """The same tokens' KV in another layer, KV group, or shard of the heads."""
    return cells ^ np.uint8((layer * 0x35 ^ group * 0x4B ^ shard * 0x63) & 0xFF)


def _sample(cell: Cells) -> int:
    return 4 + int(cell[-1]) % VOCABULARY
