"""Which accesses are kept for a curve: what a sampler on the hot path writes down of a request."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

HASHES = 1 << 64
"""Key hashes are below this, uniformly distributed."""


class Lookup(NamedTuple):
    """The sampled keys of one request: a cache looks for all of them before it touches any."""

    time: float
    """Seconds, of any clock that all samplers share."""
    keys: Sequence[int]
    """Hashes, below HASHES, tail first."""
    num_bytes: int
    """That each object takes in a cache."""
    stream: Hashable = None
    """Whose cache it is that was asked."""


class Kept(NamedTuple):
    """What a sampler keeps of one request."""

    time: float
    """Seconds since 1970."""
    bound: int
    """Keys below it were sampled, and the head."""
    keys: bytes
    """8 of each, big end first, tail first."""
    tiers: bytes
    """A letter for each."""

    def below(self, bound: int) -> Kept:
        """Return what would have been kept with a lower bound."""
        if bound >= self.bound:
            return self
        return Kept(self.time, bound, *_below(bound, self.keys, self.tiers))


class Sampler:
    """What runs on the hot path: a bounded ring of accesses to heads, and to keys under a threshold.

    A request's position is the number of samples before it, those included that left the ring.
    """

    def __init__(self, rate: float = 1.0, max_samples: int = 1 << 16, kept_seconds: float = 0.0) -> None:
        """Raise ValueError for a ``rate`` (share of keys) that is not in (0, 1].

        ``kept_seconds``: fewer keys are kept, by halves, where requests would leave the ring sooner; and more
        again where they stay four times as long.
        """
        self.num_dropped = 0
        """Samples that left the ring, which is the position of the first that is there."""
        self.position = 0
        """Of the next request."""
        self._ring: deque[Kept] = deque()
        self._starts: deque[int] = deque()  # their positions
        self._max_samples, self._kept_seconds = max_samples, kept_seconds
        self._share = 1.0  # of the rate that was asked for
        self.rate = rate

    @property
    def rate(self) -> float:
        """Share of keys that is kept of requests from now on."""
        return self.bound / HASHES

    @rate.setter
    def rate(self, rate: float) -> None:
        self._asked = rate
        self.bound = threshold_of(rate * self._share)

    def record(self, time: float, keys: bytes, tiers: bytes) -> None:
        """Note a request; 8 bytes of each key, big end first, tail first, and a letter where it was found."""
        if not tiers:
            return
        kept, tiers = _below(self.bound, keys, tiers)
        self._ring.append(Kept(time, self.bound, kept, tiers))
        self._starts.append(self.position)
        self.position += len(tiers)
        while self.position - self.num_dropped > self._max_samples:
            oldest, _ = self._ring.popleft(), self._starts.popleft()
            self.num_dropped += len(oldest.tiers)
            # Those that were kept by another bound tell nothing of this one.
            if self._kept_seconds and oldest.bound == self.bound:
                self._adapt(time - oldest.time)

    def _adapt(self, seconds: float) -> None:
        # One key of each request is always kept: a ring full of requests does not get any longer.
        if 0 <= seconds < self._kept_seconds and 2 * len(self._ring) < self._max_samples:
            self._share = max(self._share / 2, 1 / 1024)
        elif seconds > 4 * self._kept_seconds:
            self._share = min(self._share * 2, 1.0)
        self.rate = self._asked

    def since(self, position: int) -> tuple[int, list[Kept]]:
        """Return the position of the first request from ``position`` on, and what is kept of all of them."""
        at = bisect_left(self._starts, position)
        num_kept = len(self._starts) - at
        first = self._starts[at] if num_kept else self.position
        return first, list(islice(reversed(self._ring), num_kept))[::-1]  # mostly few are asked for


def _below(bound: int, keys: bytes, tiers: bytes) -> tuple[bytes, bytes]:
    """Keys below the bound, and the last, with their tiers."""
    if bound >= HASHES:
        return keys, tiers
    low, last = bound.to_bytes(8, "big"), len(tiers) - 1
    first = low[0]  # most keys differ in the first byte
    kept = [at for at, byte in enumerate(keys[:-8:8]) if byte <= first and keys[8 * at : 8 * at + 8] < low]
    kept.append(last)
    return b"".join([keys[8 * at : 8 * at + 8] for at in kept]), bytes([tiers[at] for at in kept])


def merged(streams: Iterable[Iterable[Lookup]]) -> Iterable[Lookup]:
    """Merge what several samplers kept, each in the order of time, into one."""
    return heapq.merge(*streams, key=lambda lookup: lookup.time)


def threshold_of(rate: float) -> int:
    """Return below what hashes are sampled. Raises ValueError."""
    if not 0 < rate <= 1:
        raise ValueError(f"rate {rate}: the share of keys that is sampled lies in (0, 1]")
    return max(1, int(rate * HASHES))
