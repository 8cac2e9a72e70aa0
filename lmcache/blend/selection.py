"""Which tokens of retrieved KV are computed again: the part of blending that trades time for closeness.

The KV of a segment that was computed alone lacks what the segments before it would have told its tokens.
Recomputing a token mends its own K and V, and through them what later tokens read. None of these selections
makes blended KV exact, but for the one that selects everything.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch.nn.functional import pad

BEFORE_LAYERS = -1
"""A selection's ``layer`` when it needs no layer's K or V."""


@dataclass(frozen=True)
class Candidates:
    """The tokens of one batch of prompts, as far as a selection may look at them; all on one device."""

    is_valid: torch.Tensor
    """bool ``[num_tokens]``: the token's K and V were retrieved. The others are computed in any case."""
    original_positions: torch.Tensor
    """int64 ``[num_tokens]``: the position within its segment that a token's K was stored at."""
    query_start_loc: torch.Tensor
    """int64 ``[num_requests + 1]``: where each request starts, and the number of tokens."""
    deviation: torch.Tensor | None = None
    """float32 ``[num_tokens]``: mean squared difference of retrieved and fresh V at the selection's layer, 0
    where not valid; None before all layers."""
    attention: torch.Tensor | None = None
    """float32 ``[num_tokens]``: how strongly the questions look at each token when everything is reused, the
    sum over layers of the largest attention weight; None unless the selection ``reads_attention``."""

    @cached_property
    def request(self) -> torch.Tensor:
        """int64 ``[num_tokens]``: the number of the request that each token belongs to."""
        counts = self.query_start_loc.diff()
        return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)

    @cached_property
    def shift(self) -> torch.Tensor:
        """int64 ``[num_tokens]``: by how many positions each token stands further on than it was stored."""
        positions = torch.arange(len(self.is_valid), device=self.is_valid.device)
        return positions - self.query_start_loc[self.request] - self.original_positions

    @cached_property
    def segments(self) -> list[tuple[int, int, int]]:
        """(start, end, shift) of each run of valid tokens that were stored side by side."""
        marks = torch.stack((self.is_valid.long(), self.request, self.shift))
        breaks = (marks[:, 1:] != marks[:, :-1]).any(0).nonzero().flatten() + 1
        bounds = [0, *breaks.tolist(), len(self.is_valid)]
        shifts, valid = self.shift.tolist(), self.is_valid.tolist()
        return [
            (start, end, shifts[start]) for start, end in pairwise(bounds) if end > start and valid[start]
        ]


class Selection(abc.ABC):
    """Says which tokens are computed again. Write your own by ``select`` alone.

    It holds no state of a request: one object serves all, from any thread.
    """

    layer: int = BEFORE_LAYERS
    """The layer whose retrieved and fresh V are compared; K and V of the layers up to it are computed for all
    tokens. ``BEFORE_LAYERS``: it compares none, and nothing is computed for tokens that are not selected.
    """
    reads_attention: bool = False
    """Has the engine to compute first, over reused KV, what is computed in any case, to see what the
    questions attend to?"""

    @abc.abstractmethod
    def select(self, tokens: Candidates) -> torch.Tensor:
        """Return a bool mask ``[num_tokens]``, on the candidates' device. What is not valid is computed
        whatever it says of it."""


class _Ranked(Selection):
    """Of each request's n valid tokens the ``int(n * ratio)`` with the highest score."""

    def __init__(self, ratio: float) -> None:
        """Raises ValueError for a ratio out of 0 to 1."""
        if not 0 <= ratio <= 1:
            raise ValueError(f"Invalid recompute_ratio: {ratio} (must be 0 to 1)")
        self.ratio = ratio

    @abc.abstractmethod
    def score(self, tokens: Candidates) -> torch.Tensor:
        """Return float32 ``[num_tokens]``, 0 or more."""

    def select(self, tokens: Candidates) -> torch.Tensor:
        return highest(self.score(tokens), tokens, self.ratio)


class LargestDeviation(_Ranked):
    """The tokens whose V deviates most from what it is in this prompt (CacheBlend, Yao et al., EuroSys 2025).

    Costs the first layers for all tokens (with ``layer`` 1, two of them) and one comparison of V. Right when
    segments lean on one another, and which of their tokens do can't be told from their places.
    """

    def __init__(self, ratio: float, layer: int = 1) -> None:
        """Compute ``ratio`` (0 to 1) of each request's valid tokens again, chosen at ``layer`` (1 or more: in
        layer 0 V depends on the token alone).

        Raises ValueError for either out of range.
        """
        super().__init__(ratio)
        if layer < 1:
            raise ValueError(f"Invalid layer: {layer} (must be 1 or more)")
        self.layer = layer

    def score(self, tokens: Candidates) -> torch.Tensor:
        """Return the deviation."""
        assert tokens.deviation is not None, "the executor compares V at the selection's layer"
        return tokens.deviation


class FirstTokens(_Ranked):
    """The first tokens of each segment, the same share of each (EPIC's LegoLink, Hu et al., ICML 2025).

    Costs nothing beyond the tokens themselves: no layer is computed for the others. What it mends is that
    each segment's first tokens took the part of the prompt's beginning, to which later ones attend strongly.
    A segment that stands where it was stored has nothing before it, and comes last.
    """

    def score(self, tokens: Candidates) -> torch.Tensor:
        """Return how near to its segment's start each token is: from 2 (the first) down to 1; at most 1 in a
        segment that was not moved."""
        score = torch.zeros(len(tokens.is_valid), device=tokens.is_valid.device)
        for start, end, shift in tokens.segments:
            falling = 1 - torch.arange(end - start, device=score.device) / (end - start)
            score[start:end] = falling + float(shift != 0)
        return score


class MostAttended(_Ranked):
    """The tokens that the question attends to most, were everything reused.

    Costs the question's tokens once more: they are computed first over the reused KV, in all layers, to see
    their attention (its largest weight among heads and the last 128 of these tokens, summed over layers).
    Then no layer is computed for tokens that are not selected. Right when the question is short beside its
    documents: what it does not look at need not be mended. A segment that stands where it was stored comes
    last.
    """

    reads_attention = True

    def score(self, tokens: Candidates) -> torch.Tensor:
        """Return the attention; 0 in a segment that was not moved."""
        assert tokens.attention is not None, "the engine computes the questions' attention first"
        return tokens.attention.where(tokens.shift != 0, 0)


class NoTokens(Selection):
    """None: all retrieved KV is reused as it is, K rotated to its new place.

    The cheapest, and a different answer wherever segments lean on one another. Right for segments of which
    only one matters to the question, and as what others are compared with.
    """

    def select(self, tokens: Candidates) -> torch.Tensor:
        """Return False for all."""
        return torch.zeros_like(tokens.is_valid)


class AllTokens(Selection):
    """All: a full prefill, bit for bit, that reads stored KV for nothing. Right for comparisons only."""

    def select(self, tokens: Candidates) -> torch.Tensor:
        """Return True for all."""
        return torch.ones_like(tokens.is_valid)


def highest(score: torch.Tensor, tokens: Candidates, ratio: float) -> torch.Tensor:
    """Return a bool mask ``[num_tokens]`` of the valid tokens to compute.

    Of each request's n valid ones the ``int(n * ratio)`` of the highest ``score`` (float ``[num_tokens]``, 0
    or more), of equal ones the first. A score that is NaN takes its token out of the ranking.
    """
    is_valid = tokens.is_valid & ~score.isnan()
    request, starts = tokens.request, tokens.query_start_loc
    num_valid = pad(is_valid.cumsum(0), (1, 0))[starts].diff()
    quota = (num_valid.double() * ratio).long()  # float64, so that it is Python's int(n * ratio)
    order = score.where(is_valid, -1).argsort(descending=True, stable=True)
    order = order[request[order].argsort(stable=True)]  # by request, then the highest first
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - starts[request]
    return is_valid & (rank < quota[request])
