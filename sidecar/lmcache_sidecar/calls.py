"""Counts of the engine's calls, kept as plain numbers: a call must not pay for its statistics."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from itertools import accumulate

import grpc

_BOUNDS_SECONDS = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0)


class CallCounts:
    """Calls of the engine by method."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.ended: Counter[tuple[str, str]] = Counter()  # (method, name of the gRPC status)
        self._buckets: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(_BOUNDS_SECONDS) + 1))

    def took(self, method: str, seconds: float) -> None:
        """A call was answered."""
        self._buckets[method][bisect_left(_BOUNDS_SECONDS, seconds)] += 1
        self.seconds[method] += seconds

    def count(self, method: str, code: grpc.StatusCode) -> None:
        """A call ended."""
        self.ended[method, code.name] += 1

    def buckets(self, method: str) -> list[tuple[str, int]]:
        """Upper bounds in seconds, and how many calls took no longer."""
        return [
            (str(bound), number)
            for bound, number in zip(
                (*_BOUNDS_SECONDS, "+Inf"), accumulate(self._buckets[method]), strict=True
            )
        ]
