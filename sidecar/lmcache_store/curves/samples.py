"""Samples of requests for a curve, and the sampler that records them on the hot path."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import NamedTuple

HASHES = 1 << 64
"""Exclusive upper bound of key hashes, which are uniformly distributed."""


class Lookup(NamedTuple):
    """The sampled keys of one request. A cache looks up all of them before it touches any."""

    time: float
    """Time in seconds, of any clock that all samplers share."""
    keys: Sequence[int]
    """Hashes of the keys, below HASHES, tail first."""
    num_bytes: int
    """Bytes of each object in a cache."""
    stream: Hashable = None
    """Identifier of the cache that was looked up."""


class SampledRequest(NamedTuple):
    """The samples of one request."""

    time: float
    """Seconds since 1970."""
    bound: int
    """Hash below which keys were sampled; the head of the request was sampled in any case."""
    keys: bytes
    """The first 8 bytes of each key, big-endian, tail first."""
    tiers: bytes
    """One letter per key: the tier where it was found."""

    def below(self, bound: int) -> SampledRequest:
        """Return the samples of the same request under a lower bound."""
        if bound >= self.bound:
            return self
        return SampledRequest(self.time, bound, *_below(bound, self.keys, self.tiers))


class Sampler:
    """A bounded ring of samples: the heads of requests, and keys below a threshold. Runs on the hot path.

    A request's position is the number of samples before it, including samples that have left the ring.
    """

    def __init__(self, rate: float = 1.0, max_samples: int = 1 << 16, kept_seconds: float = 0.0) -> None:
        """Sample the share ``rate`` of all keys. Raises ValueError if it is not in (0, 1].

        If requests would leave the ring before ``kept_seconds``, the sampler halves its rate. If they stay
        four times as long, it doubles the rate again, up to ``rate``.
        """
        self.num_dropped = 0
        """Samples that have left the ring, which is also the position of the first sample in the ring."""
        self.position = 0
        """Position of the next request."""
        self._ring: deque[SampledRequest] = deque()
        self._starts: deque[int] = deque()  # positions of the requests in the ring
        self._max_samples, self._kept_seconds = max_samples, kept_seconds
        self._rate_factor = 1.0  # of the requested rate
        self.rate = rate

    @property
    def rate(self) -> float:
        """Share of keys that is sampled from now on."""
        return self.bound / HASHES

    @rate.setter
    def rate(self, rate: float) -> None:
        self._requested_rate = rate
        self.bound = threshold_of(rate * self._rate_factor)

    def record(self, time: float, keys: bytes, tiers: bytes) -> None:
        """Sample a request.

        ``keys`` has 8 bytes per key, big-endian, tail first. ``tiers`` has one letter per key: the tier where
        it was found.
        """
        if not tiers:
            return
        sampled_keys, tiers = _below(self.bound, keys, tiers)
        self._ring.append(SampledRequest(time, self.bound, sampled_keys, tiers))
        self._starts.append(self.position)
        self.position += len(tiers)
        while self.position - self.num_dropped > self._max_samples:
            oldest, _ = self._ring.popleft(), self._starts.popleft()
            self.num_dropped += len(oldest.tiers)
            # Requests that were sampled with another bound don't show how long this one lets them stay.
            if self._kept_seconds and oldest.bound == self.bound:
                self._adapt(time - oldest.time)

    def _adapt(self, seconds: float) -> None:
        # One key of each request is always sampled, so a lower rate does not help if the ring is full of
        # these.
        if 0 <= seconds < self._kept_seconds and 2 * len(self._ring) < self._max_samples:
            self._rate_factor = max(self._rate_factor / 2, 1 / 1024)
        elif seconds > 4 * self._kept_seconds:
            self._rate_factor = min(self._rate_factor * 2, 1.0)
        self.rate = self._requested_rate

    def since(self, position: int) -> tuple[int, list[SampledRequest]]:
        """Return the samples of all requests from ``position`` on, and the position of the first of them."""
        index = bisect_left(self._starts, position)
        num_requests = len(self._starts) - index
        first = self._starts[index] if num_requests else self.position
        return first, list(islice(reversed(self._ring), num_requests))[::-1]  # most calls need few requests


def _below(bound: int, keys: bytes, tiers: bytes) -> tuple[bytes, bytes]:
    """Return the keys below the bound and the last key (the head), with their tiers."""
    if bound >= HASHES:
        return keys, tiers
    low, last = bound.to_bytes(8, "big"), len(tiers) - 1
    first = low[0]  # comparing the first byte is enough for most keys
    chosen = [i for i, byte in enumerate(keys[:-8:8]) if byte <= first and keys[8 * i : 8 * i + 8] < low]
    chosen.append(last)
    return b"".join([keys[8 * i : 8 * i + 8] for i in chosen]), bytes([tiers[i] for i in chosen])


def threshold_of(rate: float) -> int:
    """Return the hash below which keys are sampled at this rate. Raises ValueError."""
    if not 0 < rate <= 1:
        raise ValueError(f"rate {rate}: the share of sampled keys must be more than 0 and at most 1")
    return max(1, int(rate * HASHES))
