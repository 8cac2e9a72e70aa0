"""Blending on a model that learned to read across documents; all of it: ``testing.blend.experiment``."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import LlamaForCausalLM

from testing.blend import experiment, prompts
from testing.blend.forward import Forward
from testing.blend.train import CONFIG, TooSlow, trained_model

TRAINING_SECONDS = 300
NUM_PROMPTS = 16


@pytest.fixture(scope="module")
def model():
    try:
        return trained_model(TRAINING_SECONDS)
    except TooSlow:
        pytest.skip(f"the model could not be trained in {TRAINING_SECONDS} s here")


@pytest.mark.timeout(TRAINING_SECONDS + 120)
def test_divergence_falls_with_the_ratio(model):
    ratios = (0, 0.15, 0.5, 1)
    found = experiment.divergences(model, NUM_PROMPTS, ratios)
    means = [found[experiment.name_of(ratio)].mean() for ratio in ratios]
    assert all(before > after for before, after in pairwise(means))
    assert means[1] <= 0.2 * means[0]
    assert found[experiment.name_of(1)].max() < 1e-6


def test_all_computed_anew_is_prefill():
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    model.apply(lambda part: [torch.nn.init.normal_(x, std=0.2) for x in part.parameters(recurse=False)])
    tokens = torch.arange(prompts.VOCAB_SIZE)[:40]
    with torch.no_grad():
        assert torch.allclose(Forward(model).prefill(tokens)[0], model(tokens[None]).logits[0], atol=1e-4)
    found = experiment.divergences(model, 2, (0, 1))
    assert found[experiment.name_of(1)].max() < 1e-6
    assert found[experiment.name_of(0)].min() > 1e-3
