"""Selections of the retrieved tokens that are recomputed: they trade computing time for accuracy.

A segment that was computed alone has KV without attention to the segments before it. Recomputing a token
corrects its own K and V, and thereby what later tokens read. Only the selection of all tokens makes blended
KV exact.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch.nn.functional import pad

BEFORE_LAYERS = -1
"""Value of a selection's ``layer`` if it needs no layer's K or V."""


@dataclass(frozen=True)
class Candidates:
    """The tokens of one batch of prompts, with everything that a selection may use.

    All tensors are on one device.
    """

    is_valid: torch.Tensor
    """bool ``[num_tokens]``: whether the token's K and V were retrieved. Other tokens are always computed."""
    original_positions: torch.Tensor
    """int64 ``[num_tokens]``: the position within its segment at which the token's K was stored."""
    query_start_loc: torch.Tensor
    """int64 ``[num_requests + 1]``: the start of each request, followed by the number of tokens."""
    deviation: torch.Tensor | None = None
    """float32 ``[num_tokens]``: mean squared difference of retrieved and fresh V at the selection's layer; 0
    for tokens that are not valid; None before all layers."""
    attention: torch.Tensor | None = None
    """float32 ``[num_tokens]``: attention of the questions to each token when all KV is reused. It is the sum
    over layers of the largest attention weight; None unless the selection sets ``reads_attention``."""

    @cached_property
    def request(self) -> torch.Tensor:
        """int64 ``[num_tokens]``: the number of the request that each token belongs to."""
        counts = self.query_start_loc.diff()
        return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)

    @cached_property
    def shift(self) -> torch.Tensor:
        """int64 ``[num_tokens]``: each token's position in the prompt minus the position it was stored at."""
        positions = torch.arange(len(self.is_valid), device=self.is_valid.device)
        return positions - self.query_start_loc[self.request] - self.original_positions

    @cached_property
    def segments(self) -> list[tuple[int, int, int]]:
        """(start, end, shift) of each run of valid tokens that were stored consecutively."""
        marks = torch.stack((self.is_valid.long(), self.request, self.shift))
        breaks = (marks[:, 1:] != marks[:, :-1]).any(0).nonzero().flatten() + 1
        bounds = [0, *breaks.tolist(), len(self.is_valid)]
        shifts, valid = self.shift.tolist(), self.is_valid.tolist()
        return [
            (start, end, shifts[start]) for start, end in pairwise(bounds) if end > start and valid[start]
        ]


class Selection(abc.ABC):
    """Selects the tokens to recompute. To write your own, implement ``select``.

    A selection holds no state of a request, so one object can serve all requests, from any thread.
    """

    layer: int = BEFORE_LAYERS
    """Layer at which retrieved and fresh V are compared. K and V of the layers up to it are computed for all
    tokens. With ``BEFORE_LAYERS`` nothing is compared, and nothing is computed for unselected tokens."""
    reads_attention: bool = False
    """Whether the selection needs the questions' attention. The engine then first computes all tokens that
    are not valid, over the reused KV."""

    @abc.abstractmethod
    def select(self, tokens: Candidates) -> torch.Tensor:
        """Return a bool mask ``[num_tokens]`` of the tokens to recompute, on the candidates' device.

        Tokens that are not valid are always computed; their value in the mask does not matter.
        """


class _Ranked(Selection):
    """Selects the ``int(n * ratio)`` tokens with the highest score of each request's n valid tokens."""

    def __init__(self, ratio: float, run_tokens: int = 1) -> None:
        """Select the share ``ratio`` of each request's valid tokens.

        The selection takes whole runs of ``run_tokens`` successive tokens, by the mean of their scores; of
        the last run, it takes as many tokens as the share allows. Runs cost accuracy, but attention kernels
        of GPUs need less time for a few long runs than for many single tokens.

        Raises ValueError if ``ratio`` is not 0 to 1, or ``run_tokens`` is less than 1.
        """
        if not 0 <= ratio <= 1:
            raise ValueError(f"Invalid recompute_ratio: {ratio} (must be 0 to 1)")
        if run_tokens < 1:
            raise ValueError(f"Invalid run_tokens: {run_tokens} (must be 1 or more)")
        self.ratio = ratio
        self.run_tokens = run_tokens

    @abc.abstractmethod
    def score(self, tokens: Candidates) -> torch.Tensor:
        """Return the score of each token, float32 ``[num_tokens]``, 0 or more."""

    def select(self, tokens: Candidates) -> torch.Tensor:
        score = self.score(tokens)
        if self.run_tokens > 1:
            score = mean_of_runs(score, tokens, self.run_tokens)
        return highest(score, tokens, self.ratio)


class LargestDeviation(_Ranked):
    """Selects the tokens whose V deviates most from V in this prompt (CacheBlend, Yao et al., EuroSys 2025).

    It costs the first layers for all tokens (two layers with ``layer`` 1) and one comparison of V. Use it if
    segments depend on one another, and the position of a token does not show whether it does.
    """

    def __init__(self, ratio: float, layer: int = 1, run_tokens: int = 1) -> None:
        """Select the share ``ratio`` (0 to 1) of each request's valid tokens, by their V at ``layer``.

        ``layer`` is at least 1: in layer 0, V depends on the token alone. The selection takes whole runs of
        ``run_tokens`` successive tokens. Raises ValueError if a value is out of range.
        """
        super().__init__(ratio, run_tokens)
        if layer < 1:
            raise ValueError(f"Invalid layer: {layer} (must be 1 or more)")
        self.layer = layer

    def score(self, tokens: Candidates) -> torch.Tensor:
        """Return the deviation."""
        assert tokens.deviation is not None, "the executor compares V at the selection's layer"
        return tokens.deviation


class FirstTokens(_Ranked):
    """Selects the same share of each segment: its first tokens (EPIC's LegoLink, Hu et al., ICML 2025).

    It costs only the selected tokens: no layer is computed for the others. Later tokens attend strongly to
    the beginning of a prompt. In a segment that was computed alone, its first tokens wrongly have that role.
    A segment at the position at which it was stored has nothing before it, and is selected last.
    """

    def score(self, tokens: Candidates) -> torch.Tensor:
        """Return the closeness of each token to the start of its segment, from 2 (first token) down to 1.

        In a segment that was not moved, it is 1 or less.
        """
        score = torch.zeros(len(tokens.is_valid), device=tokens.is_valid.device)
        for start, end, shift in tokens.segments:
            falling = 1 - torch.arange(end - start, device=score.device) / (end - start)
            score[start:end] = falling + float(shift != 0)
        return score


class MostAttended(_Ranked):
    """Selects the tokens to which the question attends most when all KV is reused.

    The question's tokens are computed one more time: first over the reused KV, in all layers, to measure
    their attention. The measure is the largest weight among heads and the last 128 of these tokens, summed
    over layers. No layer is computed for unselected tokens. Use it if the question is short compared with its
    documents: tokens that the question ignores need no correction. A segment at the position at which it was
    stored is selected last.
    """

    reads_attention = True

    def score(self, tokens: Candidates) -> torch.Tensor:
        """Return the attention to each token; 0 in a segment that was not moved."""
        assert tokens.attention is not None, "the engine computes the questions' attention first"
        return tokens.attention.where(tokens.shift != 0, 0)


class NoTokens(Selection):
    """Selects nothing: all retrieved KV is reused, with K rotated to its new position.

    This is the cheapest selection, but the answer differs wherever segments depend on one another. Use it if
    only one segment matters to the question, or as a baseline for comparisons.
    """

    def select(self, tokens: Candidates) -> torch.Tensor:
        """Return False for all."""
        return torch.zeros_like(tokens.is_valid)


class AllTokens(Selection):
    """Selects all tokens: equals a full prefill, bit for bit. Use it for comparisons only."""

    def select(self, tokens: Candidates) -> torch.Tensor:
        """Return True for all."""
        return torch.ones_like(tokens.is_valid)


def tokens_to_compute(selection: Selection, tokens: Candidates) -> torch.Tensor:
    """Return a bool mask ``[num_tokens]`` of the tokens to compute.

    These are the selected tokens, all that are not valid, and those with a NaN in ``deviation`` or
    ``attention``, because their KV can be damaged.

    Raises ValueError if the selection returns something else than a mask.
    """
    is_selected = selection.select(tokens)
    if is_selected.dtype != torch.bool or is_selected.shape != tokens.is_valid.shape:
        kind = f"{is_selected.dtype} {list(is_selected.shape)}"
        raise ValueError(f"a selection must be a bool mask [{len(tokens.is_valid)}], not {kind}")
    is_computed = is_selected | ~tokens.is_valid
    for measure in (tokens.deviation, tokens.attention):
        if measure is not None:
            is_computed |= measure.isnan()
    return is_computed


def highest(score: torch.Tensor, tokens: Candidates, ratio: float) -> torch.Tensor:
    """Return a bool mask ``[num_tokens]`` of the valid tokens with the highest ``score``.

    It selects ``int(n * ratio)`` of each request's n valid tokens. ``score`` is float ``[num_tokens]``, 0 or
    more. Of tokens with equal scores the first are selected. Tokens with a NaN score are not ranked.
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


def mean_of_runs(score: torch.Tensor, tokens: Candidates, run_tokens: int) -> torch.Tensor:
    """Return for each token the mean score of its run, float ``[num_tokens]``.

    A request's first run begins at its first token. Tokens that are not valid and tokens with a NaN score do
    not count in the mean, and NaN stays NaN.
    """
    request, starts = tokens.request, tokens.query_start_loc
    position = torch.arange(len(score), device=score.device) - starts[request]
    num_runs = (starts.diff() + run_tokens - 1) // run_tokens
    run = (num_runs.cumsum(0) - num_runs)[request] + position // run_tokens
    is_counted = tokens.is_valid & ~score.isnan()
    # One row per run: sums of rows have a fixed order, so that all ranks select the same tokens.
    table = score.new_zeros(2, int(num_runs.sum()), run_tokens)
    table[:, run, position % run_tokens] = torch.stack((score.where(is_counted, 0), is_counted.to(score)))
    sums = table.sum(-1)
    means: torch.Tensor = sums[0] / sums[1].clamp(min=1)
    return means[run].where(~score.isnan(), torch.nan)


_SELECTIONS: dict[str, type[Selection]] = {
    "attended": MostAttended,
    "deviation": LargestDeviation,
    "first": FirstTokens,
    "none": NoTokens,
    "all": AllTokens,
}
NAMES = tuple(_SELECTIONS)
"""Names of the selections in requests and settings."""


def selection_of(name: str, ratio: float, run_tokens: int = 1) -> Selection:
    """Return the selection with one of the ``NAMES``, for single tokens or for runs of ``run_tokens``.

    Raises ValueError for another name, or a value out of range.
    """
    if name not in _SELECTIONS:
        raise ValueError(f"Invalid selection: {name!r} (must be one of {', '.join(NAMES)})")
    kind = _SELECTIONS[name]
    return kind(ratio, run_tokens=run_tokens) if issubclass(kind, _Ranked) else kind()
