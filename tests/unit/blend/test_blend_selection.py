from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from lmcache_client.blend.selection import (
    NAMES,
    AllTokens,
    Candidates,
    LargestDeviation,
    NoTokens,
    selection_of,
    tokens_to_compute,
)


def candidates(lengths: list[int], is_valid: list[bool], deviation: list[float]) -> Candidates:
    starts = torch.tensor([0, *lengths]).cumsum(0)
    stored_at = torch.zeros(sum(lengths), dtype=torch.long)
    return Candidates(torch.tensor(is_valid), stored_at, starts, torch.tensor(deviation))


def selected(selection: LargestDeviation, tokens: Candidates) -> list[int]:
    return selection.select(tokens).nonzero().flatten().tolist()


def runs_slowly(lengths, is_valid, deviation, ratio, run_tokens) -> list[int]:
    """Select runs in the simple way, one request and run at a time."""
    chosen = []
    for start, end in pairwise(torch.tensor([0, *lengths]).cumsum(0).tolist()):
        runs = []
        for first in range(start, end, run_tokens):
            valid = [i for i in range(first, min(first + run_tokens, end)) if is_valid[i]]
            if valid:
                runs.append((-sum(deviation[i] for i in valid) / len(valid), valid))
        ranked = [i for _, valid in sorted(runs) for i in valid]
        chosen += ranked[: int(len(ranked) * ratio)]
    return sorted(chosen)


@st.composite
def scored(draw) -> tuple[list[int], list[bool], list[float]]:
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=3).filter(any))
    count = sum(lengths)
    is_valid = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    deviation = draw(st.lists(st.integers(0, 1 << 10), min_size=count, max_size=count))
    return lengths, is_valid, [float(x) for x in deviation]


@given(scored(), st.floats(0, 1), st.integers(1, 14))
def test_runs_match_the_simple_selection(prompts, ratio, run_tokens):
    expected = runs_slowly(*prompts, ratio=ratio, run_tokens=run_tokens)
    assert selected(LargestDeviation(ratio, run_tokens=run_tokens), candidates(*prompts)) == expected


def test_runs_are_selected_by_their_mean():
    """Token 2 has the highest score, but the run of tokens 4 to 7 the highest mean."""
    tokens = candidates([8, 5], [True] * 13, [0, 0, 9, 0, 3, 3, 3, 3, 1, 1, 1, 1, 2])
    assert selected(LargestDeviation(0.5, run_tokens=4), tokens) == [4, 5, 6, 7, 8, 12]
    assert selected(LargestDeviation(0.25, run_tokens=1), tokens) == [2, 4, 12]


def test_a_nan_is_not_ranked_and_does_not_hide_its_run():
    tokens = candidates([8], [True] * 8, [0, 0, 0, 0, 7, torch.nan, 7, 7])
    assert selected(LargestDeviation(0.5, run_tokens=4), tokens) == [4, 6, 7]


def test_no_tokens_have_no_runs():
    positions = torch.empty(0, dtype=torch.long)
    nothing = Candidates(positions.bool(), positions, torch.tensor([0, 0]))
    for name in ("attended", "deviation", "first"):
        tokens = replace(nothing, deviation=torch.empty(0), attention=torch.empty(0))
        assert selection_of(name, 0.5, run_tokens=4).select(tokens).tolist() == []


def test_each_name_has_its_selection():
    kinds = [type(selection_of(name, 0.3, run_tokens=4)).__name__ for name in NAMES]
    assert kinds == ["MostAttended", "LargestDeviation", "FirstTokens", "NoTokens", "AllTokens"]
    assert vars(selection_of("attended", 0.3, run_tokens=4)) == {"ratio": 0.3, "run_tokens": 4}
    assert isinstance(selection_of("none", 0.3), NoTokens)
    assert isinstance(selection_of("all", 0.3), AllTokens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("best", 0.3, 1), "Invalid selection: 'best' .must be one of attended, deviation, first, none, all"),
        (("first", 1.1, 1), "Invalid recompute_ratio: 1.1"),
        (("first", float("nan"), 1), "Invalid recompute_ratio: nan"),
        (("first", 0.3, 0), "Invalid run_tokens: 0"),
    ],
)
def test_refuses_other_selections(arguments, message):
    with pytest.raises(ValueError, match=message):
        selection_of(*arguments)


@pytest.mark.parametrize("measure", ["deviation", "attention"])
def test_tokens_with_damaged_or_missing_kv_are_computed(measure):
    nan = torch.nan
    tokens = candidates([6], [True, True, True, False, True, True], [0.0] * 6)
    tokens = replace(tokens, **{measure: torch.tensor([0, nan, 5, 0, nan, 6])})
    assert tokens_to_compute(NoTokens(), tokens).nonzero().flatten().tolist() == [1, 3, 4]
    moved = replace(tokens, original_positions=torch.arange(6) - 1)
    selection = selection_of("attended" if measure == "attention" else "deviation", 0.4)
    assert tokens_to_compute(selection, moved).nonzero().flatten().tolist() == [1, 3, 4, 5]
