"""A language model without weights: KV bytes and answers follow from the tokens so far, so tests can check
them.

The KV of a token is a digest of all tokens up to it, of the version of the weights, and of the layer. Tests
compare every byte that attention would read with the expected byte. That reveals wrong blocks, blocks that
were never loaded, and blocks that were overwritten.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

CELL = 8
"""Bytes of KV for each token and layer."""

VOCABULARY = 250

Content = Mapping[int, bytes]
"""Inputs of KV besides tokens, such as adapters or pictures, by position of the first affected token."""

Cells = npt.NDArray[np.uint8]


class TokenChain:
    """One request's tokens as the runner knows them, with a digest for each token."""

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
        """Tokens that the model samples: after the last token, and after each right draft."""
        cells = self.cells(drafts)
        sampled = [_sample(cells[len(self.tokens) - 1])]
        for number, draft in enumerate(drafts):
            if draft != sampled[-1]:
                break
            sampled.append(_sample(cells[len(self.tokens) + number]))
        return sampled

    def _extend(self, digests: list[bytes], tokens: Sequence[int]) -> None:
        for position in range(len(digests), len(tokens)):
            previous = digests[-1] if digests else b"weights" + self.weights
            token = tokens[position].to_bytes(4, "little") + self.content.get(position, b"")
            digests.append(hashlib.blake2b(previous + token, digest_size=CELL).digest())


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
