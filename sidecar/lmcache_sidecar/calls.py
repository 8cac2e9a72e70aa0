"""Counts and durations of the engines' calls."""

from __future__ import annotations

from collections import Counter, defaultdict

import grpc

from lmcache_sidecar.histograms import Histogram

_BOUNDS_SECONDS = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0)


class CallStats:
    """Counts and durations of the engines' calls, by method."""

    def __init__(self) -> None:
        self.durations: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(_BOUNDS_SECONDS))
        self.ended: Counter[tuple[str, str]] = Counter()  # (method, name of the gRPC status)

    def observe(self, method: str, seconds: float) -> None:
        """Record the duration of an answered call."""
        self.durations[method].observe(seconds)

    def count(self, method: str, code: grpc.StatusCode) -> None:
        """Count a call that ended, by its gRPC status."""
        self.ended[method, code.name] += 1
