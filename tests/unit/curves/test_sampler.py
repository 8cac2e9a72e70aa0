"""Samplers record heads, and keys below a threshold, in a bounded ring."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_store.curves import HASHES, SampledRequest, Sampler
from tests.harness.scope import examples
from tools.simulate import key_hash


def joined(keys: list[int]) -> bytes:
    return b"".join(key.to_bytes(8, "big") for key in keys)


def keys_of(request: SampledRequest) -> list[int]:
    return [
        int.from_bytes(request.keys[offset : offset + 8], "big") for offset in range(0, len(request.keys), 8)
    ]


def test_rate_one_records_all_keys_in_a_bounded_ring():
    sampler = Sampler(max_samples=10)
    for time in range(5):
        sampler.record(float(time), b"\xff" * 32, b"em--")
    expected = [SampledRequest(float(time), HASHES, b"\xff" * 32, b"em--") for time in (3, 4)]
    assert sampler.since(0) == (12, expected)
    assert sampler.since(13) == (16, expected[1:])
    assert sampler.since(99) == (20, [])
    assert sampler.num_dropped == 12


@settings(max_examples=examples(200))
@given(
    st.lists(st.tuples(st.lists(st.integers(0, HASHES - 1), max_size=9), st.floats(0.01, 1.0)), max_size=30),
    st.integers(1, 40),
    st.integers(0, 100),
    st.floats(0.01, 1.0),
)
def test_sampler_matches_a_list(requests, max_samples, since, rate):
    sampler, expected = Sampler(max_samples=max_samples), []
    for time, (keys, request_rate) in enumerate(requests):
        sampler.rate = request_rate
        sampler.record(float(time), joined(keys), bytes(range(len(keys))))
        bound = int(request_rate * HASHES)
        pairs = [(key, tier) for tier, key in enumerate(keys) if key < bound or tier == len(keys) - 1]
        expected += [(time, bound, pairs)] if pairs else []
    position = sum(len(pairs) for _, _, pairs in expected)
    assert sampler.position == position
    remaining = []
    for time, bound, pairs in reversed(expected):
        position -= len(pairs)
        if sampler.position - position > max_samples or position < since:
            break
        remaining.insert(0, (float(time), bound, pairs))
    first, requests_since = sampler.since(since)
    assert [
        (request.time, request.bound, list(zip(keys_of(request), request.tiers, strict=True)))
        for request in requests_since
    ] == remaining
    assert first + sum(len(request.tiers) for request in requests_since) == sampler.position
    lower = int(rate * HASHES)
    for request, (_, bound, pairs) in zip(requests_since, remaining, strict=True):
        reduced = request.below(lower)
        expected_pairs = (
            [pair for pair in pairs[:-1] if pair[0] < lower] + pairs[-1:] if lower < bound else pairs
        )
        assert list(zip(keys_of(reduced), reduced.tiers, strict=True)) == expected_pairs
        assert reduced.bound == min(lower, bound)


class Reader:
    """Requests of ``num_keys`` keys, and a reader that reads once a minute."""

    def __init__(self, num_keys: int, retained_seconds: float) -> None:
        self.sampler = Sampler(max_samples=4096, kept_seconds=retained_seconds)
        self.num_keys, self.seconds, self.number, self.position = num_keys, 0, 0, 0
        self.lost: list[int] = []  # in each minute

    def serve(self, seconds: int, per_second: int) -> None:
        for _ in range(seconds):
            for _ in range(per_second):
                self.number += 1
                keys = [key_hash(100 * self.number + index) for index in range(self.num_keys)]
                self.sampler.record(float(self.seconds), joined(keys), b"-" * self.num_keys)
            self.seconds += 1
            if self.seconds % 60 == 0:
                self.lost.append(self.sampler.since(self.position)[0] - self.position)
                self.position = self.sampler.position


def test_small_ring_lowers_the_rate_until_a_reader_loses_nothing():
    """With less traffic the rate rises again."""
    reader = Reader(num_keys=30, retained_seconds=240.0)
    reader.serve(1800, 10)
    assert any(reader.lost)
    assert not any(reader.lost[-15:])
    low_rate = reader.sampler.rate
    assert low_rate < 0.2
    reader.serve(7200, 1)
    assert not any(reader.lost[-120:])
    assert reader.sampler.rate > low_rate


def test_ring_full_of_requests_keeps_several_keys_per_request():
    """The last key is always recorded, so a lower rate would not make the ring last longer."""
    reader = Reader(num_keys=8, retained_seconds=480.0)
    reader.serve(1200, 10)
    assert reader.sampler.rate >= 1 / 16
    assert not any(reader.lost[-10:])
