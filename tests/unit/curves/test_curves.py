"""Miss-ratio curves against exact stack distances."""

from __future__ import annotations

import json
import math
import statistics
import tracemalloc
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.curves import HASHES, MissRatioCurve, Sample, Sampler, merged, stack_distances
from tools.simulate import key_hash

KEYS = st.integers(0, 12)
ACCESSES = st.lists(st.tuples(KEYS, st.integers(1, 5)), max_size=200)


def lru_hits(accesses: list[tuple[int, int]], size: int) -> int:
    """The slow obvious reference: an LRU cache of ``size`` bytes, in which each key has the bytes of its last
    access."""
    stack: OrderedDict[int, int] = OrderedDict()
    hits = 0
    for key, num_bytes in accesses:
        if key in stack:
            needed = 0
            for other in reversed(stack):
                needed += stack[other]
                if other == key:
                    break
            hits += needed <= size
            del stack[key]
        stack[key] = num_bytes
    return hits


@given(st.lists(KEYS, max_size=300))
def test_stack_distances_count_distinct_keys(accesses):
    """More accesses than the stack has positions: they move together now and then."""
    expected = []
    for now, key in enumerate(accesses):
        before = accesses[:now]
        since = before[::-1].index(key) if key in before else None
        expected.append(0 if since is None else len({*before[now - since :], key}))
    assert stack_distances(accesses) == expected


@given(ACCESSES)
def test_a_curve_that_tracks_all_keys_is_exact(accesses):
    curve = MissRatioCurve(max_keys=13)
    curve.feed(Sample(0.0, key_hash(key), num_bytes) for key, num_bytes in accesses)
    for exponent in range(7):
        # Distances are counted in steps of 1/32 octave: ask a step further, no other distance is there.
        size = 2**exponent
        hits = curve.hit_ratio(size * (1 + 1 / 64) * 2 ** (1 / 32)).hit_ratio * max(1, len(accesses))
        low, high = lru_hits(accesses, size), lru_hits(accesses, math.ceil(size * 1.1))
        assert low - 1e-6 <= hits <= high + 1e-6


@given(st.lists(KEYS, min_size=1, max_size=300), st.integers(1, 8))
def test_what_is_tracked_stays_within_its_bound(keys, max_keys):
    curve = MissRatioCurve(max_keys)
    for key in keys:
        curve.feed([Sample(0.0, key_hash(key), 1)])
        assert curve.num_keys <= max_keys + len(curve._hot)
    assert 0 < curve.rate <= 1


def zipf(num_requests: int, salt: int) -> list[Sample]:
    """Requests of a few chunks over documents of falling popularity, with one system prompt before all."""
    samples = []
    for request in range(num_requests):
        document = int(2000 ** ((key_hash(request * 7 + salt) / HASHES) ** 0.7)) + 1
        chain = [0, *(document * 100 + chunk for chunk in range(8))]
        samples += [Sample(request * 0.1, key_hash(key), 1000) for key in reversed(chain)]
    return samples


def exact_of(samples: list[Sample]) -> MissRatioCurve:
    curve = MissRatioCurve(max_keys=200_000)
    curve.feed(samples)
    return curve


SIZES = [1000 * 2 ** (i / 2) for i in range(12, 29)]


def rotated(samples: list[Sample], turn: int) -> list[Sample]:
    """The same accesses under other hashes: another sample is drawn of them."""
    return [Sample(time, (key + turn * HASHES // 8) % HASHES, size) for time, key, size in samples]


def test_sampled_curves_come_close_and_their_bounds_hold():
    """A ninth of all accesses go to one key: a curve that left it to chance would be off by 10 points."""
    samples = zipf(3000, 1)
    exact = exact_of(samples)
    errors, within = [], []
    for turn in range(8):
        curve = MissRatioCurve(max_keys=1600)
        curve.feed(rotated(samples, turn))
        curve.count_accesses(len(samples))
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
    keys_of = [[sample for sample in samples if sample.key_hash % 3 == process] for process in range(3)]
    together, alone = MissRatioCurve(800), MissRatioCurve(800)
    together.feed(merged(keys_of))
    alone.feed(sorted(samples, key=lambda sample: sample.time))
    assert together.rate == alone.rate
    for size in SIZES:
        assert together.hit_ratio(size).hit_ratio == pytest.approx(alone.hit_ratio(size).hit_ratio, abs=0.02)


def test_a_sampler_keeps_heads_and_its_share_of_the_rest():
    sampler = Sampler(rate=0.25, max_samples=100_000)
    keys = [
        key_hash(number).to_bytes(32, "big")[:24] + key_hash(number).to_bytes(8, "big")
        for number in range(4000)
    ]
    for first in range(0, 4000, 8):
        sampler.record(float(first), list(reversed(keys[first : first + 8])), 10)
    kept = {sample.key_hash for sample in sampler.since(-1.0)}
    below = {key_hash(number) for number in range(4000) if key_hash(number) < HASHES // 4}
    heads = {key_hash(number) for number in range(0, 4000, 8)}
    assert kept == below | heads
    assert sampler.num_accesses == 4000
    assert all(sample.time > 3000 for sample in sampler.since(3000.0))


def test_a_sampler_with_rate_one_keeps_everything_and_its_ring_is_bounded():
    sampler = Sampler(max_samples=10)
    sampler.record(1.0, [b"\xff" * 32] * 20, 5)
    assert sampler.since(0.0) == [Sample(1.0, HASHES - 1, 5)] * 10


def test_a_key_not_seen_within_the_window_counts_as_new():
    curve = MissRatioCurve(window_seconds=10.0)
    curve.feed([Sample(0.0, 1, 100), Sample(9.0, 1, 100), Sample(30.0, 1, 100)])
    assert curve.hit_ratio(1 << 20).hit_ratio == pytest.approx(1 / 3)


def test_a_hot_key_not_seen_within_the_window_counts_as_new():
    curve = MissRatioCurve(window_seconds=10.0)
    curve.feed(Sample(number / 100, 1, 100) for number in range(100))
    curve.feed(Sample(100.0 * number, 1, 100) for number in range(1, 101))
    assert 1 in curve._hot
    assert curve.hit_ratio(1 << 20).hit_ratio == pytest.approx(99 / 200)


def test_older_accesses_weigh_less():
    curve = MissRatioCurve(half_life_seconds=60.0)
    curve.feed(Sample(0.0, key, 100) for key in range(100))  # all misses, long ago
    curve.feed(Sample(6000.0 + turn, 1000, 100) for turn in range(10))  # one miss, nine hits
    assert curve.hit_ratio(1 << 20).hit_ratio == pytest.approx(0.9, abs=0.02)


def test_weights_survive_a_century_of_half_lives():
    curve = MissRatioCurve(half_life_seconds=0.001)
    for second in (0.0, 1.0, 1e6, 1e9):
        curve.feed([Sample(second, 7, 10), Sample(second, 7, 10)])
        curve.count_accesses(2, second)
    assert 0.0 <= curve.hit_ratio(1000).hit_ratio <= 1.0


def test_a_restored_curve_goes_on_as_if_nothing_happened():
    samples = zipf(2000, 3)
    whole, half = MissRatioCurve(500), MissRatioCurve(500)
    whole.feed(samples)
    half.feed(samples[:9000])
    half = MissRatioCurve.from_state(json.loads(json.dumps(half.state())))
    half.feed(samples[9000:])
    assert half.state() == whole.state()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**65) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=150)
@given(st.data())
def test_a_damaged_state_is_refused_with_a_value_error(data):
    curve = MissRatioCurve(8)
    curve.feed(zipf(4, 4))
    state = curve.state()
    field = data.draw(st.sampled_from(sorted(state)))
    state[field] = data.draw(JSON)
    try:
        restored = MissRatioCurve.from_state(state)
    except ValueError:
        return
    assert 0.0 <= restored.hit_ratio(1000).hit_ratio <= 1.0


def test_memory_stays_within_four_mebibytes():
    samples = [Sample(0.0, key_hash(number), 1 << 26) for number in range(20_000)]
    tracemalloc.start()
    try:
        curve = MissRatioCurve()
        curve.feed(samples)
        assert curve.num_keys == 16_000
        assert tracemalloc.get_traced_memory()[0] <= 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "options", [{"rate": 0.0}, {"rate": 1.1}, {"max_keys": 0}, {"half_life_seconds": 0.0}]
)
def test_nonsense_is_refused(options):
    with pytest.raises(ValueError, match=r"rate|positive"):
        MissRatioCurve(**options)


def test_nothing_is_known_of_nothing():
    assert MissRatioCurve().hit_ratio(1 << 30) == (0.0, 0.0, 1.0)
