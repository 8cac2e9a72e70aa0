"""Ratios with confidence intervals, and the minimum number of rounds."""

import random

import pytest

from benchmarks.report import paired


def test_paired_returns_the_median_ratio():
    ratio = paired([2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 18.0], [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert ratio == (2.0, 2.0, 2.0)


def test_paired_refuses_fewer_than_six_pairs():
    with pytest.raises(ValueError, match="at least 6"):
        paired([1.0] * 5, [1.0] * 5)


@pytest.mark.parametrize("number", [6, 9, 15, 40])
def test_interval_covers_the_true_median_in_95_percent_of_runs(number):
    generator = random.Random(number)
    runs = [
        paired([generator.lognormvariate(0, 1) for _ in range(number)], [1.0] * number) for _ in range(4000)
    ]
    covered_share = sum(run.low <= 1.0 <= run.high for run in runs) / len(runs)
    assert 0.945 <= covered_share <= 0.995
