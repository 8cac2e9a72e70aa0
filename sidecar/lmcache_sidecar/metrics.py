"""/metrics: counts of calls, and the stats, in Prometheus' text format.

Imported at the first scrape: the library is a fifth of the sidecar's start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from lmcache_sidecar.calls import CallCounts

_process = ProcessCollector(registry=CollectorRegistry())


class Family(NamedTuple):
    """A metric that is read from the stats."""

    name: str  # a counter if it ends in _total
    path: str  # of a number, or, if there is a label, of numbers by the label's value
    label: str
    about: str

    def metric(self, stats: Mapping[str, Any]) -> Metric:
        """Its samples; a part of the stats that is not there (yet) reads as 0."""
        kind = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        metric = kind(self.name, self.about, labels=[self.label] if self.label else [])
        value: Any = stats
        for key in self.path.split("."):
            value = (value or {}).get(key)
        for name, number in (value or {}).items() if self.label else [("", value or 0)]:
            metric.add_metric([name] if self.label else [], number)
        return metric


FAMILIES = tuple(
    Family(f"lmcache_{name}", path, label, about)
    for name, path, label, about in (
        ("uptime_seconds", "uptime_seconds", "", "Seconds since the start"),
        ("clients", "num_clients", "state", "Clients; quarantined: stream lost, death not proven"),
        ("memory_tier_capacity_bytes", "memory.capacity_bytes", "", "Bytes when all is populated"),
        ("memory_tier_ready_bytes", "memory.ready_bytes", "", "Populated bytes"),
        ("memory_tier_bytes", "memory.used_bytes", "", "Bytes of rows in use, counted as whole rows"),
        ("memory_tier_rows", "memory.used_rows", "", "Rows (chunks of all ranks) in use"),
        ("memory_tier_leased_rows", "memory.leased_rows", "", "Rows under a lease"),
        ("quarantined_slots", "memory.quarantined_slots", "", "Slots whose reuse is not proven safe"),
        ("memory_tier_hits_total", "memory.hits", "", "Rows that lookups found in memory"),
        ("memory_tier_misses_total", "memory.misses", "", "Rows that lookups did not find there"),
        ("memory_tier_refused_total", "memory.refused", "", "Reservations without a row to free"),
        ("memory_tier_removals_total", "memory.removed", "reason", "Rows that left, by reason"),
        ("remote_tier_up", "remote.is_reachable", "", "1 if the remote tier answers, as far as known"),
        ("remote_tier_operations_total", "remote.operations", "result", "Columns read or written"),
        ("unsettled_rows", "num_unsettled_rows", "", "Rows still to be checksummed or written through"),
        ("writes_total", "writes", "result", "Rows written through, or why not"),
        ("promotions_total", "promotions", "result", "Rows brought up from the remote tier, or verified"),
    )
)


class _One(Collector):
    """A registry of one metric, so that the text is made metric by metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return [self._metric]


def _calls(calls: CallCounts) -> Iterator[Metric]:
    about = "Time from a call's arrival to its answer, in the sidecar, in seconds"
    seconds = HistogramMetricFamily("lmcache_request_seconds", about, labels=["method"])
    for method, total in calls.seconds.items():
        seconds.add_metric([method], calls.buckets(method), total)
    yield seconds
    about = "Calls by gRPC status; Attach when its stream ends"
    ended = CounterMetricFamily("lmcache_requests", about, labels=["method", "code"])
    for labels, number in calls.ended.items():
        ended.add_metric(labels, number)
    yield ended


async def render(calls: CallCounts, stats: Mapping[str, Any]) -> bytes:
    """The whole text, family by family: other tasks run in between, so that no lookup waits for a scrape."""
    parts = []
    for metric in (*_calls(calls), *(family.metric(stats) for family in FAMILIES), *_process.collect()):
        parts.append(generate_latest(_One(metric)))
        await asyncio.sleep(0)
    return b"".join(parts)
