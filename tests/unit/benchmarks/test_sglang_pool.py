"""Figures of the benchmark of SGLang's host pool: which pools are measured, and what their bars are."""

from benchmarks import sglang_pool
from benchmarks.sglang_engines import HIT_TOKENS, PROMPT_TOKENS
from benchmarks.sglang_pool import DEVICE_TOKENS, NUM_PROMPTS, POOLS, RECOMMENDED, Outcome


def outcome(mode, ratio, hit_share=1.0):
    return Outcome(mode, ratio, 76.0, hit_share, 0.5, [0.2, 0.9, 0.3])


def test_smallest_buffer_holds_no_prompt_and_the_next_holds_one():
    smallest, small = (ratio * DEVICE_TOKENS for ratio in sorted(POOLS["buffer_only"])[:2])
    assert smallest < HIT_TOKENS < small < 2 * HIT_TOKENS


def test_engine_holds_half_of_the_prompts():
    assert NUM_PROMPTS // 2 * PROMPT_TOKENS < DEVICE_TOKENS < (NUM_PROMPTS // 2 + 1) * PROMPT_TOKENS


def test_recommended_pool_has_the_bar():
    figures = list(sglang_pool.figures([outcome(mode, ratio) for mode in POOLS for ratio in POOLS[mode]]))
    (barred,) = (figure for figure in figures if figure.bar)
    assert f"{RECOMMENDED[0]} {RECOMMENDED[1]}" in barred.what
    assert barred.holds


def test_lost_hits_of_the_recommended_pool_miss_the_bar():
    (figure,) = sglang_pool.figures([outcome(*RECOMMENDED, hit_share=0.94)])
    assert (figure.value, figure.unit, figure.holds) == (94, "%", False)


def test_table_shows_the_median_and_the_last_first_token():
    assert outcome("cache", 2.0).row() == ("cache", "2", "76 MB", "100%", "50%", "300 ms", "900 ms")
