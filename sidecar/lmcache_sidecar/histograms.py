"""Histograms of durations as plain numbers, so that the count of an engine's call takes little time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """Durations by bucket."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: upper bounds in seconds, ascending."""
        self.seconds = 0.0
        """Sum of all durations."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, seconds: float) -> None:
        """Count a duration."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.seconds += seconds

    def buckets(self) -> list[tuple[str, int]]:
        """Return upper bounds, each with the number of durations up to it."""
        return list(zip([*map(str, self._bounds), "+Inf"], accumulate(self._counts), strict=True))
