"""Miss-ratio curves against exact stack distances."""

from __future__ import annotations

import json
import math
import random
import statistics
import tracemalloc
from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.curves import (
    HASHES,
    Lookup,
    MissRatioCurve,
    RecencyStack,
    Window,
    merged,
)
from tools.simulate import key_hash, stack_distances

KEYS = st.integers(0, 12)
REQUESTS = st.lists(st.tuples(st.lists(KEYS, max_size=6, unique=True), st.integers(1, 5)), max_size=60)


def lru_hits(requests: list[tuple[list[int], int]], size: int) -> int:
    """The slow obvious reference: an LRU cache of ``size`` bytes, in which each key has the bytes of its last
    access; a request is looked up before any of it is touched."""
    stack: OrderedDict[int, int] = OrderedDict()
    hits = 0
    for keys, num_bytes in requests:
        for key in keys:
            if key in stack:
                order = list(stack)
                hits += sum(stack[other] for other in order[order.index(key) :]) <= size
        for key in keys:
            stack.pop(key, None)
            stack[key] = num_bytes
    return hits


@given(st.lists(st.lists(KEYS, max_size=6, unique=True), max_size=80))
def test_stack_distances_count_distinct_keys_before_a_request_is_touched(requests):
    expected, before = [], []
    for keys in requests:
        for key in keys:
            since = before[::-1].index(key) if key in before else None
            expected.append(0 if since is None else len(set(before[len(before) - since - 1 :])))
        before += keys
    assert stack_distances(requests) == expected


@pytest.mark.parametrize(("num_keys", "most"), [(50, 3), (1500, 3), (4000, 1), (20_000, 3000)])
def test_a_stack_outlives_its_positions(num_keys, most):
    """More accesses than it has positions: keys move together, and room is made for more."""
    stack, model, chance = RecencyStack(), OrderedDict(), random.Random(num_keys)
    for _ in range(3000 if most < 10 else 20):
        keys = [chance.randrange(num_keys) for _ in range(chance.randint(1, most))]  # some of them twice
        order = {key: age for age, key in enumerate(reversed(model), 1)}
        assert stack.access(keys, 1) == [order.get(key, -1) for key in keys]
        for key in keys:
            model.pop(key, None)
            model[key] = 1
        if chance.random() < 0.3 and len(model) > 1000:
            stack.forget_beyond(len(model) - 1)
            model.popitem(last=False)
        assert len(stack) == stack.num_bytes == len(model)
    assert set(stack) == set(model)


RATES = st.sampled_from([0.01, 0.1, 0.5, 1.0])


@given(REQUESTS)
def test_a_curve_that_tracks_all_keys_is_exact(requests):
    curve = MissRatioCurve(max_keys=13)
    for keys, num_bytes in requests:
        curve.feed([Lookup(0.0, [key_hash(key) for key in keys], num_bytes)])
    total = sum(len(keys) for keys, _ in requests)
    for exponent in range(7):
        # Distances are counted in steps of 1/16 octave: ask a step further, no other distance is there.
        size = 2**exponent
        hits = curve.hit_ratio(size * 2 ** (1 / 16)).hit_ratio * max(1, total)
        low, high = lru_hits(requests, size), lru_hits(requests, math.ceil(size * 1.1))
        assert low - 1e-6 <= hits <= high + 1e-6


@given(st.lists(KEYS, min_size=1, max_size=300), st.integers(1, 8), st.booleans())
def test_what_is_tracked_stays_within_its_bound(keys, max_keys, shared):
    curve = MissRatioCurve(max_keys, shared=shared)
    for number, key in enumerate(keys):
        curve.feed([Lookup(0.0, [key_hash(key)], 1, number % 3)])
        assert curve.num_keys <= max_keys + 4 * len(curve._hot)
    assert 0 < curve.rate <= 1
    for stream in range(3):
        curve.forget(stream)
    assert curve.num_keys == (len(curve._shared) if shared else 0)


@given(
    st.lists(
        st.tuples(st.lists(KEYS, min_size=1, max_size=5, unique=True), st.integers(0, 2000), RATES),
        min_size=1, max_size=30,
    ),
    st.integers(1, 40),
)  # fmt: skip
def test_a_threshold_follows_what_is_offered_within_its_bound(steps, max_keys):
    curve, time = MissRatioCurve(max_keys, shared=True), 0.0
    for keys, seconds, rate in steps:
        time += seconds
        curve.feed([Lookup(time, [key_hash(key) for key in keys], 10, len(keys) % 2)])
        curve.limit(rate, max_keys)
        stacks = curve._all_stacks()
        assert curve.num_keys == sum(map(len, stacks)) <= max_keys + 4 * len(curve._hot)
        assert curve.rate <= rate
        assert curve.rate <= curve.wanted_rate <= 1
        for stack in stacks:
            weighty = [key for key in stack if key < curve._threshold and key not in curve._hot]
            assert stack.num_bytes == 10 * len(weighty)


def test_a_threshold_that_rises_again_tells_the_same():
    """As if all keys had been tracked all the time, though for two hours one in ten was."""
    lookups = [lookup._replace(time=lookup.time * 10) for lookup in zipf(14_000, 3)]
    curve, low, exact = (MissRatioCurve(200_000, half_lives=[math.inf]) for _ in range(3))
    for start in range(0, len(lookups), 100):
        for one in (curve, low, exact):
            one.feed(lookups[start : start + 100])
        curve.limit(0.1 if start < 7000 else 1.0, 200_000)
        low.limit(0.1, 200_000)
        if start == 10_900:  # an hour later
            assert curve.rate == 1
            for one in (curve, exact):
                one.windows[0].restart(-math.inf)
        elif start < 10_500:  # nothing is counted yet of what is learned
            assert curve.rate == low.rate == pytest.approx(0.1)
            assert curve.hit_ratio(100_000) == low.hit_ratio(100_000)
        if start == 10_700:
            assert curve.rate == 1
            ratio, least, most = curve.hit_ratio(100_000)
            assert least + 0.01 < ratio < most - 0.01, "most of that is from a sample"
    for size in (10_000, 100_000, 1_000_000, 4_000_000):
        assert curve.hit_ratio(size).hit_ratio == pytest.approx(exact.hit_ratio(size).hit_ratio, abs=0.005)


def test_room_that_runs_out_costs_first_what_is_only_learned():
    lookups = zipf(4000, 3)
    curve = MissRatioCurve(10_000)
    curve.limit(0.1, 10_000)
    curve.feed(lookups)
    curve.limit(1.0, 10_000)
    assert curve.wanted_rate > 0.2
    curve.limit(1.0, curve.num_keys + 40)
    curve.feed(zipf(100, 4))
    assert (curve.rate, curve.wanted_rate < 0.2) == (pytest.approx(0.1), True)


def test_ghosts_beyond_the_largest_size_are_forgotten():
    """However many keys go by, those of two caches of 100 are tracked, and of the shared one."""
    curve = MissRatioCurve(largest_bytes=100.0, shared=True)
    for number in range(3000):
        curve.feed([Lookup(0.0, [key_hash(number)], 1, number % 2)])
        curve.feed([Lookup(0.0, [key_hash(number - 90)], 1, number % 2)])
    assert curve.num_keys == 300
    assert curve.rate == 1
    assert curve.hit_ratio(99).hit_ratio == pytest.approx(0.48, abs=0.02)
    assert curve.new_bytes == 3090


def zipf(num_requests: int, salt: int) -> list[Lookup]:
    """Requests of a few chunks over documents of falling popularity, with one system prompt before all."""
    lookups = []
    for request in range(num_requests):
        document = int(2000 ** ((key_hash(request * 7 + salt) / HASHES) ** 0.7)) + 1
        chain = [0, *(document * 100 + chunk for chunk in range(8))]
        keys = [key_hash(key) for key in reversed(chain)]
        lookups.append(Lookup(request * 0.1, keys, 1000))
    return lookups


def exact_of(lookups: list[Lookup]) -> MissRatioCurve:
    curve = MissRatioCurve(max_keys=200_000)
    curve.feed(lookups)
    return curve


def num_accesses(lookups: list[Lookup]) -> int:
    return sum(len(lookup.keys) for lookup in lookups)


SIZES = [1000 * 2 ** (i / 2) for i in range(12, 29)]


def rotated(lookups: list[Lookup], turn: int) -> list[Lookup]:
    """The same accesses under other hashes: another sample is drawn of them."""
    return [
        lookup._replace(keys=[(key + turn * HASHES // 8) % HASHES for key in lookup.keys])
        for lookup in lookups
    ]


def test_sampled_curves_come_close_and_their_bounds_hold():
    """A ninth of all accesses go to one key: a curve that left it to chance would be off by 10 points."""
    samples = zipf(3000, 1)
    exact = exact_of(samples)
    errors, within = [], []
    for turn in range(8):
        curve = MissRatioCurve(max_keys=1600)
        curve.feed(rotated(samples, turn))
        curve.count_accesses(num_accesses(samples))
        assert curve.rate < 0.3
        for size in SIZES:
            estimate, true = curve.hit_ratio(size), exact.hit_ratio(size).hit_ratio
            errors.append(abs(estimate.hit_ratio - true))
            within.append(estimate.low <= true <= estimate.high)
    assert max(errors) < 0.03
    assert statistics.mean(errors) < 0.01
    assert statistics.mean(within) > 0.9


def test_samplers_of_several_processes_make_one_curve():
    samples = zipf(3000, 2)
    keys_of = [[lookup for lookup in samples if lookup.keys[0] % 3 == process] for process in range(3)]
    together, alone = MissRatioCurve(800), MissRatioCurve(800)
    together.feed(merged(keys_of))
    alone.feed(sorted(samples, key=lambda lookup: lookup.time))
    assert together.rate == alone.rate
    for size in SIZES:
        assert together.hit_ratio(size).hit_ratio == pytest.approx(alone.hit_ratio(size).hit_ratio, abs=0.02)


def test_older_accesses_weigh_less():
    curve = MissRatioCurve(half_lives=[60.0, math.inf])
    curve.feed(Lookup(0.0, [key], 100) for key in range(100))  # all misses, long ago
    curve.feed(Lookup(6000.0 + turn, [1000], 100) for turn in range(10))  # one miss, nine hits
    assert curve.hit_ratio(1 << 20).hit_ratio == pytest.approx(0.9, abs=0.02)
    assert curve.windows[1].hit_ratio(1 << 20).hit_ratio == pytest.approx(9 / 110)


def test_weights_survive_a_century_of_half_lives():
    curve = MissRatioCurve(half_lives=[0.001])
    for second in (0.0, 1.0, 1e6, 1e9):
        curve.feed([Lookup(second, [7], 10), Lookup(second, [7], 10)])
        curve.count_accesses(2, second)
    assert 0.0 <= curve.hit_ratio(1000).hit_ratio <= 1.0
    assert curve.windows[0].num_accesses == pytest.approx(2)


def test_a_window_tells_traffic_per_hour_and_what_was_measured():
    window = Window(3600.0, 1.0, 2.0**40)
    for minute in range(600):
        window.count(60.0 * minute, 1000, 250, seconds=60.0)
    assert window.accesses_per_hour == pytest.approx(60_000)
    assert window.measured_hits == pytest.approx(0.25)
    assert window.num_accesses == pytest.approx(60_000 / math.log(2), rel=0.02)
    window.restart(40_000.0)
    window.count(39_999.0, 1000, 0, seconds=60.0)
    assert (window.num_accesses, window.accesses_per_hour, window.measured_hits) == (0, 0, 0)


def test_a_shared_cache_has_credit_for_what_is_not_hit_nearer():
    """Two caches of 4 keys: "a" sees key 1 often, and key 2 behind 8 others; "b" sees 1 after "a" did."""
    curve = MissRatioCurve(shared=True)
    curve.own_bytes = 4.0
    for turn in range(100):
        others = [key_hash(1000 + 8 * turn + i) for i in range(8)]
        for stream, keys in (("a", [1, 2]), ("a", others[:2]), ("a", [1]), ("a", others[2:]), ("b", [1])):
            curve.feed([Lookup(float(turn), keys, 1, stream)])
        curve.forget("b")
    total = 100 * 12
    own, shared, pooled = (
        windows[0].hit_ratio(16.0).hit_ratio * total
        for windows in (curve.windows, curve.shared_windows, curve.pooled_windows)
    )
    # In 16 keys of its own "a" finds 1 twice and 2 once a turn.
    assert own == pytest.approx(300, abs=5)
    # Behind 4 of its own: 2, and 1 after the 8 others; and 1 for "b", whose own cache is always new.
    assert shared == pytest.approx(300, abs=5)
    assert pooled == pytest.approx(400, abs=5)
    # "b" asked for 1 a moment ago, but 2 is farther away.
    assert curve.shared_windows[0].hit_ratio(8.5).hit_ratio * total == pytest.approx(200, abs=5)


def test_a_clock_that_is_set_back_does_not_stop_the_count():
    window = Window(3600.0, 1.0, 2.0**20)
    window.count(1e9, 1000)
    window.count(1000.0, 1000)
    window.count(4600.0, 1000)
    assert window.num_accesses == pytest.approx(2000)


@pytest.mark.parametrize("num_keys", [100, 400, 1600, 2350])
def test_bounds_of_a_difference_hold(num_keys):
    """50 samples of the same accesses, so that the smaller size holds so many of the keys sampled."""
    samples = zipf(2000, 5)
    total, size = num_accesses(samples), 2_500_000
    rate = num_keys * samples[0].num_bytes / size
    truth = exact_of(samples).windows[0].between(size, 2 * size).share
    hashes = np.array([lookup.keys for lookup in samples], np.uint64)
    within = []
    for turn in range(50):
        others = hashes + np.uint64(turn * HASHES // 50)
        kept = others < np.uint64(rate * HASHES)
        kept[:, -1] = True  # heads
        curve = MissRatioCurve(rate=rate)
        for lookup, keys, mask in zip(samples, others, kept, strict=True):
            curve.feed([lookup._replace(keys=keys[mask].tolist())])
        curve.count_accesses(total)
        share, error = curve.windows[0].between(size, 2 * size)
        within.append(abs(share - truth) <= error)
    assert statistics.mean(within) >= 0.9


def test_a_restored_window_answers_as_before_and_is_small():
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
    # What came before only tells what is in the caches.
    restored.counts_from = samples[999].time
    restored.feed(samples)
    restored.count_accesses(9000, 199.0)
    half.feed(samples[1000:])
    half.count_accesses(9000, 199.0)
    for size in SIZES:
        assert restored.hit_ratio(size) == pytest.approx(half.hit_ratio(size), abs=1e-4)


def test_an_empty_window_is_kept_and_restored():
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


@settings(max_examples=150)
@given(st.data())
def test_a_damaged_state_is_refused_with_a_value_error(data):
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


def test_memory_stays_within_four_mebibytes():
    samples = [Lookup(0.0, [key_hash(number)], 1 << 26) for number in range(20_000)]
    tracemalloc.start()
    try:
        curve = MissRatioCurve()
        curve.feed(samples)
        assert 14_000 < curve.num_keys <= 16_000
        assert tracemalloc.get_traced_memory()[0] <= 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "options",
    [
        {"rate": 0.0}, {"rate": 1.1}, {"max_keys": 0}, {"half_lives": [0.0]}, {"half_lives": []},
        {"smallest_bytes": 5.0, "largest_bytes": 4.0},
    ],
)  # fmt: skip
def test_nonsense_is_refused(options):
    with pytest.raises(ValueError, match=r"rate|positive|below"):
        MissRatioCurve(**options)


def test_nothing_is_known_of_nothing():
    assert MissRatioCurve().hit_ratio(1 << 30) == (0.0, 0.0, 1.0)
