"""Which accesses are kept for a curve: what a sampler on the hot path writes down of a request."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
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


class Sampler:
    """What runs on the hot path: a bounded ring of accesses to heads, and to keys under a threshold."""

    def __init__(self, rate: float = 1.0, max_samples: int = 1 << 16) -> None:
        """Raise ValueError for a ``rate`` (share of keys) that is not in (0, 1]."""
        self.num_accesses = 0  # all of them, sampled or not
        threshold = threshold_of(rate)
        self._bound = threshold.to_bytes(8, "big") if threshold < HASHES else b"\xff" * 9
        self._ring: deque[Lookup] = deque()
        self._room = max_samples

    def record(self, time: float, keys: Sequence[bytes], num_bytes: int) -> None:
        """Note a request for keys, given tail first; they end in 8 uniformly distributed bytes."""
        self.num_accesses += len(keys)
        bound = self._bound
        kept = [tail for key in keys if (tail := key[-8:]) < bound]
        if keys and keys[-1][-8:] >= bound:
            kept.append(keys[-1][-8:])
        self._room -= len(kept)
        self._ring.append(Lookup(time, [int.from_bytes(tail, "big") for tail in kept], num_bytes))
        while self._room < 0:
            self._room += len(self._ring.popleft().keys)

    def since(self, time: float) -> list[Lookup]:
        """Return what is kept of the requests after ``time``, oldest first."""
        return [lookup for lookup in self._ring if lookup.time > time]


def merged(streams: Iterable[Iterable[Lookup]]) -> Iterable[Lookup]:
    """Merge what several samplers kept, each in the order of time, into one."""
    return heapq.merge(*streams, key=lambda lookup: lookup.time)


def threshold_of(rate: float) -> int:
    """Return below what hashes are sampled. Raises ValueError."""
    if not 0 < rate <= 1:
        raise ValueError(f"rate {rate}: the share of keys that is sampled lies in (0, 1]")
    return max(1, int(rate * HASHES))
