"""Statistics of the blending benchmark: means, shares, their errors, and answers."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from benchmarks.blend import mean, share, time_figures
from testing.blend.experiment import FULL, NAIVE, Comparison
from testing.blend.timing import Seconds


def test_mean_has_the_standard_error_of_its_sample():
    assert (mean([1.0, 3.0]), mean([5.0] * 9)) == ((2.0, 1.0), (5.0, 0.0))
    with pytest.raises(ValueError, match="1 values have no standard error"):
        mean([1.0])


def test_share_is_the_quotient_of_means():
    assert share([1.0, 2.0, 6.0], [2.0, 4.0, 12.0]) == (
        0.5,
        0.0,
    )  # the prompts differ, but the share is equal
    assert share([1.0, 1.0], [1.0, 3.0]).value == 0.5  # not the mean of 1 and 1/3


def test_share_error_equals_the_bootstrap_error():
    rng = np.random.default_rng(0)
    whole = rng.lognormal(0, 0.5, 60)
    part = whole * rng.uniform(0.2, 0.8, 60)
    estimate = share(part, whole)
    chosen = rng.integers(0, 60, (20_000, 60))
    error = (part[chosen].mean(1) / whole[chosen].mean(1)).std()
    assert estimate.error == pytest.approx(error, rel=0.1)
    independent_error = (part[chosen].mean(1) / whole[chosen[:, ::-1]][::-1].mean(1)).std()
    assert independent_error > 1.5 * error  # the error of independent prompts


def test_comparison_returns_divergence_and_agreement_with_full_prefill():
    full = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    blended = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    comparison = Comparison()
    comparison.add(blended, full)
    comparison.add(full + 0, full)
    expected = (0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)) / 2
    assert comparison.divergence == pytest.approx([expected, 0], abs=1e-7)
    assert comparison.is_equal == [False, True]
    assert comparison.agreement == [0.5, 1.0]  # the first of equal values
    assert comparison.next_token == [0, 0]


def test_times_are_compared_with_full_prefill_and_reading():
    seconds = Seconds(first_token={FULL: [4.0] * 6}, reading=[0.5] * 6)
    for name, first, parts in ((NAIVE, 0.4, {"rotate": 0.25}), ("kind", 2.0, {"rotate": 0.05, "mask": 0.04})):
        seconds.first_token[name], seconds.blending[name] = [first] * 6, [parts] * 6
    time_results = [(figure.value, figure.holds) for figure in time_figures(seconds)]
    assert time_results == [(10, None), (50, False), (50, None), (pytest.approx(18), True)]
    assert json.loads(json.dumps(asdict(seconds)))["blending"]["kind"][0] == {"rotate": 0.05, "mask": 0.04}
