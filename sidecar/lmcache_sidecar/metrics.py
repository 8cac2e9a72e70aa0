"""/metrics: counts of calls, and the stats, in Prometheus' text format.

Imported at the first scrape: the library is a fifth of the sidecar's start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from lmcache_sidecar.calls import CallCounts

_process = ProcessCollector(registry=CollectorRegistry())


class Family(NamedTuple):
    """A metric that is read from the stats."""

    name: str  # a counter if it ends in _total
    path: str  # of a number; "*" stands for every key, "a|b" for those, and makes it a label's value
    labels: tuple[str, ...]
    about: str

    def metric(self, stats: Mapping[str, Any]) -> Metric:
        """Its samples; a part of the stats that is not there (yet) reads as 0, or, below a label, as none."""
        kind = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        metric = kind(self.name, self.about, labels=self.labels)
        for values, number in _numbers(stats, self.path.split("."), ()):
            metric.add_metric(values, number)
        return metric


def _numbers(
    stats: Any, path: Sequence[str], labels: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], float]]:
    if not path:
        yield labels, stats or 0
        return
    key, *rest = path
    present = stats or {}
    if key == "*" or "|" in key:
        for value in present if key == "*" else key.split("|"):
            if present.get(value) is not None:
                yield from _numbers(present[value], rest, (*labels, value))
    else:
        yield from _numbers(present.get(key), rest, labels)


_TIERS = "disk|remote"

FAMILIES = tuple(
    Family(f"lmcache_{name}", path, tuple(labels.split()), about)
    for name, path, labels, about in (
        ("uptime_seconds", "uptime_seconds", "", "Seconds since the start"),
        ("ready", "is_ready", "", "1 if engines can attach; else /readyz says why"),
        ("clients", "num_clients.*", "state", "Clients; quarantined: stream lost, death not proven"),
        ("memory_tier_capacity_bytes", "memory.capacity_bytes", "", "Bytes when all is populated"),
        ("memory_tier_ready_bytes", "memory.ready_bytes", "", "Populated bytes"),
        ("memory_tier_bytes", "memory.used_bytes", "", "Bytes of rows in use, counted as whole rows"),
        ("memory_tier_rows", "memory.used_rows", "", "Rows (chunks of all ranks) in use"),
        ("memory_tier_leased_rows", "memory.leased_rows", "", "Rows under a lease"),
        ("quarantined_slots", "memory.quarantined_slots", "", "Slots whose reuse is not proven safe"),
        ("memory_tier_hits_total", "memory.hits", "", "Rows that lookups found in memory"),
        ("memory_tier_misses_total", "memory.misses", "", "Rows that lookups did not find there"),
        ("memory_tier_refused_total", "memory.refused", "", "Reservations without a row to free"),
        ("memory_tier_removals_total", "memory.removed.*", "reason", "Rows that left, by reason"),
        ("memory_tier_tenant_rows", "memory.tenants.*.rows", "tenant", "Of the 32 largest, and others"),
        ("memory_tier_tenant_bytes", "memory.tenants.*.bytes", "tenant", "Of the 32 largest, and others"),
        ("memory_tier_verified_total", "memory.verified", "", "Rows from before a restart, found intact"),
        ("tier_up", f"{_TIERS}.is_reachable", "tier", "1 if the tier answers, as far as known"),
        ("disk_tier_bytes", "disk.used_bytes", "", "Bytes of the volume that the disk tier takes"),
        ("tier_operations_total", f"{_TIERS}.operations.*", "tier result", "Columns read or written"),
        ("tier_writes_total", f"{_TIERS}.writes.*", "tier result", "Rows written through, or why not"),
        ("tier_promotions_total", f"{_TIERS}.promotions.*", "tier result", "Rows brought up, or why not"),
        ("tier_queued_loads", f"{_TIERS}.num_queued_loads", "tier", "Rows being brought, or waiting for it"),
        ("tier_queued_writes", f"{_TIERS}.num_queued_writes", "tier", "Rows that wait for their write"),
        ("tier_load_bytes_per_second", f"{_TIERS}.load_bytes_per_second", "tier", "As measured of late"),
        ("unsettled_rows", "num_unsettled_rows", "", "Rows still to be checksummed or written through"),
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
