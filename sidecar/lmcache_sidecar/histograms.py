"""Histograms of durations, as plain numbers: calls of engines are counted in them on the hot path."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Exemplar(NamedTuple):
    """One measurement of a bucket, with the trace that shows it."""

    trace_id: str
    seconds: float
    time: float
    """Seconds since 1970."""


class Histogram:
    """Durations by bucket."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: upper bounds in seconds, ascending."""
        self.seconds = 0.0
        """Sum of all durations."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._exemplars: dict[int, Exemplar] = {}  # the latest of each bucket

    def observe(self, seconds: float, trace_id: str = "") -> None:
        """Count a duration. ``trace_id``: trace that shows it; empty: there is none."""
        number = bisect_left(self._bounds, seconds)
        self._counts[number] += 1
        self.seconds += seconds
        if trace_id:
            self._exemplars[number] = Exemplar(trace_id, seconds, time.time())

    def buckets(self) -> list[tuple[str, int, Exemplar | None]]:
        """Return upper bounds, each with the number of durations up to it, and an exemplar of the bucket."""
        bounds = [*map(str, self._bounds), "+Inf"]
        exemplars = map(self._exemplars.get, range(len(bounds)))
        return list(zip(bounds, accumulate(self._counts), exemplars, strict=True))
