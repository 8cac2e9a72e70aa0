"""/metrics: counts of calls, kept here, and gauges read from the stats when somebody asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_BUCKETS_SECONDS = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0)


class CallMetrics:
    """Calls of the engine by method."""

    def __init__(self) -> None:
        self.registries = (CollectorRegistry(), CollectorRegistry())
        seconds, requests = self.registries
        about = "Time from a call's arrival to its answer, in the sidecar"
        self._seconds = Histogram(
            "lmcache_request_seconds", about, ["method"], registry=seconds, buckets=_BUCKETS_SECONDS
        )
        about = "Calls answered, by gRPC status; Attach counts when its stream ends"
        self._requests = Counter("lmcache_requests", about, ["method", "code"], registry=requests)

    def took(self, method: str, seconds: float) -> None:
        """A call was answered."""
        self._seconds.labels(method).observe(seconds)

    def count(self, method: str, code: grpc.StatusCode) -> None:
        """A call ended."""
        self._requests.labels(method, code.name).inc()


class Family(NamedTuple):
    """A metric that is read from the stats."""

    name: str  # a counter if it ends in _total
    path: str  # of a number, or, if there is a label, of numbers by the label's value
    label: str
    about: str


FAMILIES = (
    Family("lmcache_uptime_seconds", "uptime_seconds", "", "Time since the start"),
    Family("lmcache_clients", "num_clients", "state", "Clients; quarantined: stream lost, death not proven"),
    Family("lmcache_memory_tier_capacity_bytes", "memory.capacity_bytes", "", "Size when all is populated"),
    Family("lmcache_memory_tier_ready_bytes", "memory.ready_bytes", "", "Populated bytes"),
    Family(
        "lmcache_memory_tier_bytes", "memory.used_bytes", "", "Bytes of rows in use, counted as whole rows"
    ),
    Family("lmcache_memory_tier_rows", "memory.used_rows", "", "Rows (chunks of all ranks) in use"),
    Family("lmcache_memory_tier_leased_rows", "memory.leased_rows", "", "Rows under a lease"),
    Family(
        "lmcache_quarantined_slots", "memory.quarantined_slots", "", "Slots whose reuse is not proven safe"
    ),
    Family("lmcache_memory_tier_hits_total", "memory.hits", "", "Chunks that lookups found in memory"),
    Family("lmcache_memory_tier_misses_total", "memory.misses", "", "Chunks that lookups did not find there"),
    Family("lmcache_memory_tier_refused_total", "memory.refused", "", "Reservations without a row to free"),
    Family("lmcache_memory_tier_removals_total", "memory.removed", "reason", "Rows that left, by reason"),
    Family(
        "lmcache_remote_tier_up", "remote.is_reachable", "", "1 if the remote tier answers, as far as known"
    ),
    Family("lmcache_remote_tier_operations_total", "remote.operations", "result", "Columns read or written"),
    Family("lmcache_write_queue_rows", "num_queued_writes", "", "Rows still to be written through"),
    Family("lmcache_writes_total", "writes", "result", "Rows written through, or why not"),
    Family(
        "lmcache_promotions_total",
        "promotions",
        "result",
        "Rows brought up from the remote tier, or verified",
    ),
)


class _FromStats(Collector):
    """One family, as the registry wants it."""

    def __init__(self, family: Family, stats: Callable[[], Mapping[str, Any]]) -> None:
        self._family = family
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        name, path, label, about = self._family
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        metric = kind(name, about, labels=[label] if label else [])
        value: Any = self._stats()
        for key in path.split("."):
            value = (value or {}).get(key)
        for label_value, number in (value or {}).items() if label else [("", value or 0)]:
            metric.add_metric([label_value] if label else [], number)
        yield metric


class Metrics:
    """The whole text, family by family: other tasks run in between, so that no lookup waits for a scrape."""

    def __init__(self, calls: CallMetrics, stats: Callable[[], Mapping[str, Any]]) -> None:
        self._stats = stats
        self._latest: Mapping[str, Any] = {}
        self._registries = [*calls.registries]
        for family in FAMILIES:
            registry = CollectorRegistry()
            registry.register(_FromStats(family, lambda: self._latest))
            self._registries.append(registry)
        process = CollectorRegistry()
        ProcessCollector(registry=process)
        self._registries.append(process)

    async def text(self) -> bytes:
        """In the Prometheus text format."""
        self._latest = self._stats()
        parts = []
        for registry in self._registries:
            parts.append(generate_latest(registry))
            await asyncio.sleep(0)
        return b"".join(parts)
