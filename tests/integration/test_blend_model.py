"""Blending on a model that learned to read across documents."""

from itertools import pairwise

import numpy as np
import torch

from testing.blend.experiment import FULL, NAIVE, compared, little_cases, name_of, selections
from testing.blend.little import widened
from testing.blend.train import trained_model


def test_divergence_falls_as_the_recompute_ratio_grows():
    ratios = (0, 0.15, 0.5, 1)
    cases, facts = (part[-8:] for part in little_cases(16))  # the 16th fact is spread over documents
    names = [name_of("largest deviation", ratio) for ratio in ratios]
    ways = {name: way for name, way in selections(ratios).items() if name in (NAIVE, *names)}
    comparisons = compared(trained_model(), cases, ways)
    means = [np.mean(comparisons[name].divergence) for name in (NAIVE, *names)]
    assert all(before > after for before, after in pairwise(means))
    assert means[2] <= 0.2 * means[1]
    assert all(comparisons[names[-1]].is_equal)
    assert means[-1] == 0
    assert any(fact.is_spread for fact in facts)
    assert np.mean(np.equal(comparisons[FULL].next_token, [fact.answer for fact in facts])) >= 0.9


def test_wide_heads_compute_the_same_logits():
    tokens = torch.tensor([little_cases(1)[0][0].segments[0]])
    with torch.no_grad():
        logits, wide = (model(tokens).logits for model in (trained_model(), widened()))
    assert torch.allclose(logits, wide, atol=1e-4)
