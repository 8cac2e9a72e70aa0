"""Blending on a model that learned to read across documents."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from testing.blend.experiment import FULL, NAIVE, compared, little_cases, name_of, selections
from testing.blend.train import CONFIG, trained_model


@pytest.fixture(scope="module")
def model():
    return trained_model()


def test_divergence_falls_as_the_recompute_ratio_grows(model):
    ratios = (0, 0.15, 0.5, 1)
    cases, facts = (part[-8:] for part in little_cases(16))  # the 16th fact is spread over documents
    names = [name_of("largest deviation", ratio) for ratio in ratios]
    ways = {name: way for name, way in selections(ratios).items() if name in (NAIVE, *names)}
    comparisons = compared(model, cases, ways)
    means = [np.mean(comparisons[name].divergence) for name in (NAIVE, *names)]
    assert all(before > after for before, after in pairwise(means))
    assert means[2] <= 0.2 * means[1]
    assert all(comparisons[names[-1]].is_equal)
    assert means[-1] == 0
    assert any(fact.is_spread for fact in facts)
    assert np.mean(np.equal(comparisons[FULL].next_token, [fact.answer for fact in facts])) >= 0.9


def test_recomputing_every_token_equals_prefill():
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    model.apply(lambda part: [torch.nn.init.normal_(x, std=0.2) for x in part.parameters(recurse=False)])
    comparisons = compared(model, little_cases(2)[0], selections((0, 1)))
    for name in selections((1,)).keys() - {NAIVE}:
        assert all(comparisons[name].is_equal)
        assert max(comparisons[name].divergence) == 0
    assert min(comparisons[NAIVE].divergence) > 1e-3
    assert min(comparisons[name_of("largest deviation", 0)].divergence) > 1e-3
