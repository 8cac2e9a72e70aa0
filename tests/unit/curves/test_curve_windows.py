"""Windows of miss-ratio curves: weights of older accesses, measured traffic, and saved state."""

import json
import math
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_store.curves import Lookup, MissRatioCurve, Window
from tests.harness.scope import examples
from tests.harness.zipf_lookups import SIZES, zipf


def test_older_accesses_have_less_weight():
    curve = MissRatioCurve(half_lives=[60.0, math.inf])
    curve.feed(Lookup(0.0, [key], 100) for key in range(100))  # old accesses, all misses
    curve.feed(Lookup(6000.0 + turn, [1000], 100) for turn in range(10))  # a miss and nine hits
    assert curve.hit_ratio(1 << 20).hit_ratio == pytest.approx(0.9, abs=0.02)
    assert curve.windows[1].hit_ratio(1 << 20).hit_ratio == pytest.approx(9 / 110)


def test_weights_stay_finite_over_many_half_lives():
    curve = MissRatioCurve(half_lives=[0.001])
    for second in (0.0, 1.0, 1e6, 1e9):
        curve.feed([Lookup(second, [7], 10), Lookup(second, [7], 10)])
        curve.count_accesses(2, second)
    assert 0.0 <= curve.hit_ratio(1000).hit_ratio <= 1.0
    assert curve.windows[0].num_accesses == pytest.approx(2)


def test_window_reports_traffic_per_hour_and_measured_hits():
    window = Window(3600.0, 1.0, 2.0**40)
    for minute in range(600):
        window.count(60.0 * minute, 1000, 250, seconds=60.0)
    assert window.accesses_per_hour == pytest.approx(60_000)
    assert window.measured_hits == pytest.approx(0.25)
    assert window.num_accesses == pytest.approx(60_000 / math.log(2), rel=0.02)
    window.restart(40_000.0)
    window.count(39_999.0, 1000, 0, seconds=60.0)
    assert (window.num_accesses, window.accesses_per_hour, window.measured_hits) == (0, 0, 0)


def test_clock_set_back_does_not_stop_the_count():
    window = Window(3600.0, 1.0, 2.0**20)
    window.count(1e9, 1000)
    window.count(1000.0, 1000)
    window.count(4600.0, 1000)
    assert window.num_accesses == pytest.approx(2000)


def test_restored_window_answers_as_before_and_is_small():
    samples = zipf(2000, 3)
    make = partial(MissRatioCurve, half_lives=[600.0], smallest_bytes=1000.0, largest_bytes=1000.0 * 2**14)
    whole, half = make(), make()
    whole.feed(samples)
    half.feed(samples[:1000])
    half.count_accesses(9000, 99.0)
    state = json.dumps(half.windows[0].state())
    assert len(state) <= 64 << 10
    restored = make()
    restored.windows[0].restore(json.loads(state))
    for size in SIZES:
        assert restored.hit_ratio(size) == pytest.approx(half.hit_ratio(size), abs=1e-4)
    # Accesses before ``counts_from`` only fill the caches.
    restored.counts_from = samples[999].time
    restored.feed(samples)
    restored.count_accesses(9000, 199.0)
    half.feed(samples[1000:])
    half.count_accesses(9000, 199.0)
    for size in SIZES:
        assert restored.hit_ratio(size) == pytest.approx(half.hit_ratio(size), abs=1e-4)


def test_empty_window_can_be_saved_and_restored():
    window = Window(60.0, 1.0, 1e6)
    window.restore(json.loads(json.dumps(window.state())))
    window.count(1000.0, 5)
    assert window.num_accesses == 5
    assert window.hit_ratio(1000).hit_ratio == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**65) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=examples(150))
@given(st.data())
def test_damaged_state_raises_value_error(data):
    curve = MissRatioCurve(8, half_lives=[60.0], largest_bytes=1e6)
    curve.feed(zipf(4, 4))
    state = curve.windows[0].state()
    field = data.draw(st.sampled_from(sorted(state)))
    state[field] = data.draw(JSON)
    window = Window(60.0, 1.0, 1e6)
    try:
        window.restore(state)
    except ValueError:
        assert window.num_accesses == 0
        return
    assert 0.0 <= window.hit_ratio(1000).hit_ratio <= 1.0
