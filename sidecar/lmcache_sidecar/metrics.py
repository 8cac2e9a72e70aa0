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
        self._seconds = Histogram(
            "lmcache_request_seconds",
            "Time from a call's arrival to its answer, in the sidecar",
            ["method"],
            registry=self.registries[0],
            buckets=_BUCKETS_SECONDS,
        )
        self._requests = Counter(
            "lmcache_requests",
            "Calls answered, by gRPC status",
            ["method", "code"],
            registry=self.registries[1],
        )

    def observe(self, method: str, code: grpc.StatusCode, seconds: float) -> None:
        """Count one call."""
        self._seconds.labels(method).observe(seconds)
        self._requests.labels(method, code.name).inc()


class Family(NamedTuple):
    """A metric that is read from the stats: ``read`` gives a number, or numbers by the label's value."""

    name: str
    about: str
    read: Callable[[Mapping[str, Any]], float | Mapping[str, float]]
    label: str = ""

    @property
    def is_counter(self) -> bool:
        """Counters are named ``_total``."""
        return self.name.endswith("_total")


def _memory(key: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda stats: stats["memory"].get(key, 0)


def _clients(stats: Mapping[str, Any]) -> Mapping[str, float]:
    attached = sum(client["is_attached"] for client in stats["clients"])
    return {"attached": attached, "quarantined": len(stats["clients"]) - attached}


FAMILIES = (
    Family("lmcache_uptime_seconds", "Time since the sidecar started", lambda stats: stats["uptime_seconds"]),
    Family(
        "lmcache_clients",
        "Clients by state; quarantined: its stream is lost, its death not proven",
        _clients,
        "state",
    ),
    Family(
        "lmcache_memory_tier_capacity_bytes",
        "Size of the memory tier when it is fully populated",
        _memory("capacity_bytes"),
    ),
    Family("lmcache_memory_tier_ready_bytes", "Populated bytes of the memory tier", _memory("ready_bytes")),
    Family(
        "lmcache_memory_tier_bytes",
        "Bytes of rows that are in use, whole rows counted",
        _memory("used_bytes"),
    ),
    Family("lmcache_memory_tier_rows", "Rows (chunks of all ranks) that are in use", _memory("used_rows")),
    Family("lmcache_memory_tier_leased_rows", "Rows under a lease", _memory("leased_rows")),
    Family(
        "lmcache_memory_tier_quarantined_slots",
        "Slots whose reuse is not proven safe yet",
        _memory("quarantined_slots"),
    ),
    Family("lmcache_memory_tier_hits_total", "Chunks that lookups found in memory", _memory("hits")),
    Family(
        "lmcache_memory_tier_misses_total", "Chunks that lookups did not find in memory", _memory("misses")
    ),
    Family(
        "lmcache_memory_tier_refused_total",
        "Reservations refused because no row could be freed",
        _memory("refused"),
    ),
    Family(
        "lmcache_memory_tier_removals_total",
        "Rows removed, by reason",
        lambda stats: stats["memory"].get("removed", {}),
        "reason",
    ),
)


class _FromStats(Collector):
    """One family, as the registry wants it."""

    def __init__(self, family: Family, stats: Callable[[], Mapping[str, Any]]) -> None:
        self._family = family
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        name, about, read, label = self._family
        kind = CounterMetricFamily if self._family.is_counter else GaugeMetricFamily
        metric = kind(name, about, labels=[label] if label else [])
        value = read(self._stats())
        for label_value, number in value.items() if isinstance(value, Mapping) else [("", value)]:
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
