"""Samplers, which keep heads and keys under a threshold in a bounded ring."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.curves import HASHES, Kept, Sampler
from tools.simulate import key_hash


def joined(keys: list[int]) -> bytes:
    return b"".join(key.to_bytes(8, "big") for key in keys)


def keys_of(request: Kept) -> list[int]:
    return [int.from_bytes(request.keys[at : at + 8], "big") for at in range(0, len(request.keys), 8)]


def test_a_sampler_keeps_heads_and_its_share_of_the_rest():
    sampler = Sampler(rate=0.25, max_samples=100_000)
    keys = [key_hash(number) for number in range(4000)]
    for first in range(0, 4000, 8):
        sampler.record(float(first), joined(keys[first : first + 8][::-1]), b"-------m")
    kept = {key for request in sampler.since(0)[1] for key in keys_of(request)}
    below = {key_hash(number) for number in range(4000) if key_hash(number) < HASHES // 4}
    heads = {key_hash(number) for number in range(0, 4000, 8)}
    assert kept == below | heads
    assert all(request.tiers.endswith(b"m") for request in sampler.since(0)[1])
    assert sampler.position == len(kept)


def test_a_sampler_with_rate_one_keeps_everything_and_its_ring_is_bounded():
    sampler = Sampler(max_samples=10)
    for time in range(5):
        sampler.record(float(time), b"\xff" * 32, b"em--")
    kept = [Kept(float(time), HASHES, b"\xff" * 32, b"em--") for time in (3, 4)]
    assert sampler.since(0) == (12, kept)
    assert sampler.since(13) == (16, kept[1:])
    assert sampler.since(99) == (20, [])
    assert sampler.num_dropped == 12


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, HASHES - 1), max_size=9), st.floats(0.01, 1.0)), max_size=30),
    st.integers(1, 40),
    st.integers(0, 100),
    st.floats(0.01, 1.0),
)
def test_a_sampler_keeps_what_a_list_would(requests, max_samples, since, rate):
    sampler, expected = Sampler(max_samples=max_samples), []
    for time, (keys, kept_rate) in enumerate(requests):
        sampler.rate = kept_rate
        sampler.record(float(time), joined(keys), bytes(range(len(keys))))
        bound = int(kept_rate * HASHES)
        kept = [(key, at) for at, key in enumerate(keys) if key < bound or at == len(keys) - 1]
        expected += [(time, bound, kept)] if kept else []
    position = sum(len(kept) for _, _, kept in expected)
    assert sampler.position == position
    left = []
    for time, bound, kept in reversed(expected):
        position -= len(kept)
        if sampler.position - position > max_samples or position < since:
            break
        left.insert(0, (float(time), bound, kept))
    first, requests_kept = sampler.since(since)
    assert [
        (one.time, one.bound, list(zip(keys_of(one), one.tiers, strict=True))) for one in requests_kept
    ] == left
    assert first + sum(len(one.tiers) for one in requests_kept) == sampler.position
    lower = int(rate * HASHES)
    for one, (_, bound, kept) in zip(requests_kept, left, strict=True):
        fewer = one.below(lower)
        pairs = [pair for pair in kept[:-1] if pair[0] < lower] + kept[-1:] if lower < bound else kept
        assert list(zip(keys_of(fewer), fewer.tiers, strict=True)) == pairs
        assert fewer.bound == min(lower, bound)


def test_a_ring_that_is_too_small_keeps_fewer_keys_for_longer():
    """Who asks once a minute misses nothing from then on; and where less comes again, more is kept."""
    sampler, time, number = Sampler(max_samples=4096, kept_seconds=240.0), 0.0, 0
    position, lost = 0, []

    def serve(seconds: float, per_second: int) -> None:
        nonlocal time, number, position
        for second in range(int(seconds)):
            for _ in range(per_second):
                number += 1
                keys = [key_hash(100 * number + at) for at in range(30)]
                sampler.record(time, joined(keys), b"-" * 30)
            time += 1.0
            if second % 60 == 59:
                first, _ = sampler.since(position)
                lost.append(first - position)
                position = sampler.position

    serve(1800, 10)
    assert any(lost)
    assert not any(lost[-15:])
    assert sampler.rate < 0.2
    few = sampler.rate
    serve(7200, 1)
    assert not any(lost[-120:])
    assert sampler.rate > few


def test_a_ring_that_is_full_of_requests_keeps_more_than_one_key_of_each():
    """The last is always kept: halving what else is would not make the ring last any longer."""
    sampler, number, position = Sampler(max_samples=4096, kept_seconds=480.0), 0, 0
    lost = []
    for second in range(1200):
        for _ in range(10):
            number += 1
            sampler.record(float(second), joined([key_hash(100 * number + at) for at in range(8)]), b"-" * 8)
        if second % 60 == 59:
            first, _ = sampler.since(position)
            lost.append(first - position)
            position = sampler.position
    assert sampler.rate >= 1 / 16
    assert not any(lost[-10:])
