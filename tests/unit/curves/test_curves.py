"""Miss-ratio curves, compared with exact stack distances."""

import math
import random
import statistics
import tracemalloc
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_store.curves import HASHES, Lookup, MissRatioCurve, RecencyStack
from tests.harness.zipf_lookups import SIZES, num_accesses, zipf
from tools.simulate import key_hash, stack_distances

KEYS = st.integers(0, 12)
REQUESTS = st.lists(st.tuples(st.lists(KEYS, max_size=6, unique=True), st.integers(1, 5)), max_size=60)


def lru_hits(requests: list[tuple[list[int], int]], size: int) -> int:
    """Return the hits of an LRU cache of ``size`` bytes, computed in a simple and slow way.

    Each key has the bytes of its last access. A request is looked up before its keys are touched.
    """
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
def test_stack_distances_count_distinct_keys_before_the_request(requests):
    expected, before = [], []
    for keys in requests:
        for key in keys:
            age = before[::-1].index(key) if key in before else None
            expected.append(0 if age is None else len(set(before[len(before) - age - 1 :])))
        before += keys
    assert stack_distances(requests) == expected


@pytest.mark.parametrize(("num_keys", "max_keys"), [(50, 3), (1500, 3), (4000, 1), (20_000, 3000)])
def test_recency_stack_compacts_and_grows_its_positions(num_keys, max_keys):
    """Accesses exceed the positions of the stack, so it compacts its keys and allocates more positions."""
    stack, model, generator = RecencyStack(), OrderedDict(), random.Random(num_keys)
    for _ in range(3000 if max_keys < 10 else 20):
        keys = [
            generator.randrange(num_keys) for _ in range(generator.randint(1, max_keys))
        ]  # may contain duplicates
        order = {key: age for age, key in enumerate(reversed(model), 1)}
        assert stack.access(keys, 1) == [order.get(key, -1) for key in keys]
        for key in keys:
            model.pop(key, None)
            model[key] = 1
        if generator.random() < 0.3 and len(model) > 1000:
            stack.forget_beyond(len(model) - 1)
            model.popitem(last=False)
        assert len(stack) == stack.num_bytes == len(model)
    assert set(stack) == set(model)


RATES = st.sampled_from([0.01, 0.1, 0.5, 1.0])


@given(REQUESTS)
def test_curve_of_all_keys_is_exact(requests):
    curve = MissRatioCurve(max_keys=13)
    for keys, num_bytes in requests:
        curve.feed([Lookup(0.0, [key_hash(key) for key in keys], num_bytes)])
    total = sum(len(keys) for keys, _ in requests)
    for exponent in range(7):
        # Distances are counted in steps of 1/16 octave. The test uses the next step, which adds no other
        # distance.
        size = 2**exponent
        hits = curve.hit_ratio(size * 2 ** (1 / 16)).hit_ratio * max(1, total)
        min_hits, max_hits = lru_hits(requests, size), lru_hits(requests, math.ceil(size * 1.1))
        assert min_hits - 1e-6 <= hits <= max_hits + 1e-6


@given(
    st.lists(
        st.tuples(st.lists(KEYS, min_size=1, max_size=5, unique=True), st.integers(0, 2000), RATES),
        min_size=1, max_size=30,
    ),
    st.integers(1, 40),
)  # fmt: skip
def test_threshold_adapts_within_the_key_limit(steps, max_keys):
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
            counted_keys = [key for key in stack if key < curve._threshold and key not in curve._hot]
            assert stack.num_bytes == 10 * len(counted_keys)
    for stream in range(2):
        curve.forget(stream)
    assert curve.num_keys == len(curve._shared)


@pytest.mark.rotating
def test_raised_sampling_rate_restores_the_exact_curve():
    """The result is as if all keys had been tracked, although for two hours only one in ten was."""
    lookups = [lookup._replace(time=lookup.time * 10) for lookup in zipf(14_000, 3)]
    curve, low, exact = (MissRatioCurve(200_000, half_lives=[math.inf]) for _ in range(3))
    for start in range(0, len(lookups), 100):
        for tracked in (curve, low, exact):
            tracked.feed(lookups[start : start + 100])
        curve.limit(0.1 if start < 7000 else 1.0, 200_000)
        low.limit(0.1, 200_000)
        if start == 10_900:  # an hour later
            assert curve.rate == 1
            for tracked in (curve, exact):
                tracked.windows[0].restart(-math.inf)
        elif start < 10_500:  # the newly tracked keys do not count yet
            assert curve.rate == low.rate == pytest.approx(0.1)
            assert curve.hit_ratio(100_000) == low.hit_ratio(100_000)
        if start == 10_700:
            assert curve.rate == 1
            ratio, low_bound, high_bound = curve.hit_ratio(100_000)
            assert low_bound + 0.01 < ratio < high_bound - 0.01, "most of the curve is from a sample"
    for size in (10_000, 100_000, 1_000_000, 4_000_000):
        assert curve.hit_ratio(size).hit_ratio == pytest.approx(exact.hit_ratio(size).hit_ratio, abs=0.005)


def test_key_limit_drops_newly_tracked_keys_first():
    lookups = zipf(4000, 3)
    curve = MissRatioCurve(10_000)
    curve.limit(0.1, 10_000)
    curve.feed(lookups)
    curve.limit(1.0, 10_000)
    assert curve.wanted_rate > 0.2
    curve.limit(1.0, curve.num_keys + 40)
    curve.feed(zipf(100, 4))
    assert (curve.rate, curve.wanted_rate < 0.2) == (pytest.approx(0.1), True)


def test_keys_beyond_the_largest_size_are_forgotten():
    """Only the keys of two caches of 100 bytes and of the shared cache are tracked."""
    curve = MissRatioCurve(largest_bytes=100.0, shared=True)
    for number in range(3000):
        curve.feed([Lookup(0.0, [key_hash(number)], 1, number % 2)])
        curve.feed([Lookup(0.0, [key_hash(number - 90)], 1, number % 2)])
    assert curve.num_keys == 300
    assert curve.rate == 1
    assert curve.hit_ratio(99).hit_ratio == pytest.approx(0.48, abs=0.02)
    assert curve.new_bytes == 3090


def exact_of(lookups: list[Lookup]) -> MissRatioCurve:
    curve = MissRatioCurve(max_keys=200_000)
    curve.feed(lookups)
    return curve


def rotated(lookups: list[Lookup], rotation: int) -> list[Lookup]:
    """Return the same accesses with other hashes, so that another sample is drawn."""
    return [
        lookup._replace(keys=[(key + rotation * HASHES // 8) % HASHES for key in lookup.keys])
        for lookup in lookups
    ]


def test_sampled_curves_are_close_and_their_bounds_hold():
    """A ninth of all accesses use one key. A sampler that could miss this key would be wrong by 10 points."""
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


def test_shared_cache_counts_only_hits_beyond_the_own_caches():
    """Two caches of 4 keys share a third cache.

    "a" looks up key 1 often, and key 2 after 8 other keys. "b" looks up key 1 after "a".
    """
    curve = MissRatioCurve(shared=True)
    curve.stream_cache_bytes = 4.0
    for turn in range(100):
        other_keys = [key_hash(1000 + 8 * turn + i) for i in range(8)]
        for stream, keys in (
            ("a", [1, 2]),
            ("a", other_keys[:2]),
            ("a", [1]),
            ("a", other_keys[2:]),
            ("b", [1]),
        ):
            curve.feed([Lookup(float(turn), keys, 1, stream)])
        curve.forget("b")
    total = 100 * 12
    separate, shared, pooled = (
        windows[0].hit_ratio(16.0).hit_ratio * total
        for windows in (curve.windows, curve.shared_windows, curve.pooled_windows)
    )
    # With 16 own keys "a" hits key 1 twice and key 2 once per turn.
    assert separate == pytest.approx(300, abs=5)
    # Behind the 4 own keys of "a": key 2, and key 1 after the 8 other keys. For "b", whose own cache is
    # always new: key 1.
    assert shared == pytest.approx(300, abs=5)
    assert pooled == pytest.approx(400, abs=5)
    # "b" looked up key 1 recently, but key 2 is farther away.
    assert curve.shared_windows[0].hit_ratio(8.5).hit_ratio * total == pytest.approx(200, abs=5)


@pytest.mark.rotating
@pytest.mark.parametrize("num_keys", [100, 400, 1600, 2350])
def test_bounds_of_a_difference_hold(num_keys):
    """Compares 50 samples of the same accesses; the smaller size holds ``num_keys`` of the sampled keys."""
    samples = zipf(2000, 5)
    total, size = num_accesses(samples), 2_500_000
    rate = num_keys * samples[0].num_bytes / size
    truth = exact_of(samples).windows[0].between(size, 2 * size).share
    hashes = np.array([lookup.keys for lookup in samples], np.uint64)
    within = []
    for turn in range(50):
        rotated_hashes = hashes + np.uint64(turn * HASHES // 50)
        mask = rotated_hashes < np.uint64(rate * HASHES)
        mask[:, -1] = True  # heads
        curve = MissRatioCurve(rate=rate)
        for lookup, keys, row_mask in zip(samples, rotated_hashes, mask, strict=True):
            curve.feed([lookup._replace(keys=keys[row_mask].tolist())])
        curve.count_accesses(total)
        share, error = curve.windows[0].between(size, 2 * size)
        within.append(abs(share - truth) <= error)
    assert statistics.mean(within) >= 0.9


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
def test_refuses_invalid_options(options):
    with pytest.raises(ValueError, match=r"rate|positive|below"):
        MissRatioCurve(**options)


def test_empty_curve_has_unknown_hit_ratio():
    assert MissRatioCurve().hit_ratio(1 << 30) == (0.0, 0.0, 1.0)
