"""/metrics: counts of calls, kept here, and gauges read from the stats when somebody asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_Stats = Mapping[str, Any]
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
    read: Callable[[_Stats], float | Mapping[str, float]]
    label: str
    about: str

    @property
    def is_counter(self) -> bool:
        """Counters are named ``_total``."""
        return self.name.endswith("_total")


def _memory(key: str) -> Callable[[_Stats], float]:
    return lambda stats: stats["memory"].get(key, 0)


def _clients(stats: _Stats) -> Mapping[str, float]:
    attached = sum(client["is_attached"] for client in stats["clients"])
    return {"attached": attached, "quarantined": len(stats["clients"]) - attached}


def _remote_operations(stats: _Stats) -> Mapping[str, float]:
    remote = stats["remote"] or {}
    results = ("hits", "misses", "stored", "touched", "failures")
    counted = {result: remote[result] for result in results if result in remote}
    return counted | {
        result: sum(remote[result].values()) for result in ("refused", "invalid") if result in remote
    }


def _writes(stats: _Stats) -> Mapping[str, float]:
    writes = stats["writes"] or {}
    return {
        result: writes[result] for result in ("written", "refused", "dropped", "evicted") if result in writes
    }


FAMILIES = (
    Family("lmcache_uptime_seconds", lambda stats: stats["uptime_seconds"], "", "Time since the start"),
    Family("lmcache_clients", _clients, "state", "Clients; quarantined: stream lost and death not proven"),
    Family("lmcache_memory_tier_capacity_bytes", _memory("capacity_bytes"), "", "Size when all is populated"),
    Family("lmcache_memory_tier_ready_bytes", _memory("ready_bytes"), "", "Populated bytes"),
    Family(
        "lmcache_memory_tier_bytes", _memory("used_bytes"), "", "Bytes of rows in use, whole rows counted"
    ),
    Family("lmcache_memory_tier_rows", _memory("used_rows"), "", "Rows (chunks of all ranks) in use"),
    Family("lmcache_memory_tier_leased_rows", _memory("leased_rows"), "", "Rows under a lease"),
    Family(
        "lmcache_quarantined_slots", _memory("quarantined_slots"), "", "Slots whose reuse is not proven safe"
    ),
    Family("lmcache_memory_tier_hits_total", _memory("hits"), "", "Chunks that lookups found in memory"),
    Family(
        "lmcache_memory_tier_misses_total",
        _memory("misses"),
        "",
        "Chunks that lookups did not find in memory",
    ),
    Family(
        "lmcache_memory_tier_refused_total",
        _memory("refused"),
        "",
        "Reservations for which no row could be freed",
    ),
    Family(
        "lmcache_memory_tier_removals_total",
        lambda stats: stats["memory"].get("removed", {}),
        "reason",
        "Rows removed",
    ),
    Family(
        "lmcache_remote_tier_up",
        lambda stats: bool((stats["remote"] or {}).get("is_reachable")),
        "",
        "1: it answers",
    ),
    Family("lmcache_remote_tier_operations_total", _remote_operations, "result", "Columns read or written"),
    Family(
        "lmcache_write_queue_rows",
        lambda stats: (stats["writes"] or {}).get("queued", 0),
        "",
        "Rows still to be written",
    ),
    Family("lmcache_writes_total", _writes, "result", "Rows written through, or why not"),
)


class _FromStats(Collector):
    """One family, as the registry wants it."""

    def __init__(self, family: Family, stats: Callable[[], _Stats]) -> None:
        self._family = family
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        name, read, label, about = self._family
        kind = CounterMetricFamily if self._family.is_counter else GaugeMetricFamily
        metric = kind(name, about, labels=[label] if label else [])
        value = read(self._stats())
        for label_value, number in value.items() if isinstance(value, Mapping) else [("", value)]:
            metric.add_metric([label_value] if label else [], number)
        yield metric


class Metrics:
    """The whole text, family by family: other tasks run in between, so that no lookup waits for a scrape."""

    def __init__(self, calls: CallMetrics, stats: Callable[[], _Stats]) -> None:
        self._stats = stats
        self._latest: _Stats = {}
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
