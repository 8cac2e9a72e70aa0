"""Figures of the benchmark of SGLang's host pool: which pools are measured, and what their bars are."""

from benchmarks import sglang_pool
from benchmarks.sglang_pool import POOLS, RECOMMENDED, Outcome


def outcome(mode, ratio, hit_share=1.0):
    return Outcome(mode, ratio, 76.0, hit_share, 0.5, [0.2, 0.9, 0.3])


def test_recommended_pool_has_the_bar():
    figures = list(sglang_pool.figures([outcome(mode, ratio) for mode in POOLS for ratio in POOLS[mode]]))
    (barred,) = (figure for figure in figures if figure.bar)
    assert f"{RECOMMENDED[0]} {RECOMMENDED[1]}" in barred.what
    assert barred.holds


def test_lost_hits_of_the_recommended_pool_miss_the_bar():
    (figure,) = sglang_pool.figures([outcome(*RECOMMENDED, hit_share=0.94)])
    assert (figure.value, figure.unit, figure.holds) == (94, "%", False)
