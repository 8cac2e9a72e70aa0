"""What the operator counts about itself."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from . import __version__

REGISTRY = CollectorRegistry()

API_REQUESTS = Counter(
    "lmcache_operator_api_requests_total", "Calls to the API server; code 0: no answer.", ["verb", "code"],
    registry=REGISTRY,
)  # fmt: skip
RECONCILE_SECONDS = Histogram(
    "lmcache_operator_reconcile_seconds", "Time of one look at a cluster, its status written.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100), registry=REGISTRY,
)  # fmt: skip
RECONCILE_FAILURES = Counter(
    "lmcache_operator_reconcile_failures_total", "Looks that failed and are tried again.", registry=REGISTRY
)
WRITES = Counter(
    "lmcache_operator_writes_total", "Changes made: apply, status, delete, evict. At rest it stands still.",
    ["what"], registry=REGISTRY,
)  # fmt: skip
CLUSTERS = Gauge("lmcache_operator_clusters", "LMCacheClusters being looked after.", registry=REGISTRY)
BUILD_INFO = Gauge("lmcache_operator_build_info", "1, with the version.", ["version"], registry=REGISTRY)
BUILD_INFO.labels(version=__version__).set(1)


def serve(port: int) -> None:
    """Answer /metrics on a port, from a thread of its own."""
    start_http_server(port, registry=REGISTRY)
