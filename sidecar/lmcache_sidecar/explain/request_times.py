"""Histograms of requests' times, for ``/metrics``."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from lmcache_sidecar.explain.requests import ExplainedRequest
from lmcache_sidecar.histograms import Histogram

_BOUNDS_SECONDS = (
    1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0
)  # fmt: skip


class Family(NamedTuple):
    """Histograms of one metric, by the value of its label."""

    name: str
    about: str
    label: str
    """Name of the label; empty: the metric has none."""
    by_value: defaultdict[str, Histogram]

    @classmethod
    def make(cls, name: str, about: str, label: str = "") -> Family:
        """Return a family without measurements."""
        return cls(name, about, label, defaultdict(lambda: Histogram(_BOUNDS_SECONDS)))

    @property
    def seconds(self) -> float:
        """Sum of all durations."""
        return sum(histogram.seconds for histogram in self.by_value.values())


class RequestHistograms:
    """Times of the requests that engines have reported."""

    def __init__(self) -> None:
        self.lookup = Family.make(
            "lmcache_request_lookup_seconds",
            "Seconds from a request's first lookup to its answer, or until the request went on without it",
        )
        self.wait = Family.make(
            "lmcache_request_wait_seconds",
            "Seconds for which requests were held back for rows or for the engine's memory; 0: not at all",
        )
        self.load = Family.make(
            "lmcache_request_load_seconds",
            "Seconds of requests' loads without the wait, by the slowest tier of their rows; blended: with"
            " the time to recompute tokens",
            "tier",
        )
        self.first_token = Family.make(
            "lmcache_request_first_token_seconds",
            "Seconds from a request's arrival to its last prompt token; hit: tokens came from a tier",
            "hit",
        )

    @property
    def families(self) -> tuple[Family, ...]:
        """All metrics."""
        return self.lookup, self.wait, self.load, self.first_token

    def observe(self, request: ExplainedRequest) -> None:
        """Count the times of a request that has ended."""
        times = request.times
        if times is None:
            return
        self.lookup.by_value[""].observe(times.lookup_seconds)
        self.wait.by_value[""].observe(times.wait_seconds)
        if request.load_tier:
            self.load.by_value[request.load_tier].observe(times.load_seconds)
        if times.first_token_seconds:
            hit = "true" if request.source == "tier" else "false"
            self.first_token.by_value[hit].observe(times.first_token_seconds)
