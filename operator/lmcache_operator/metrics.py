"""What the operator counts about itself."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from . import __version__

REGISTRY = CollectorRegistry()

API_REQUESTS = Counter(
    "lmcache_operator_api_requests_total",
    "Calls to the API server by verb and HTTP status; 0: no answer.",
    ["verb", "code"],
    registry=REGISTRY,
)
RECONCILE_SECONDS = Histogram(
    "lmcache_operator_reconcile_seconds",
    "Time of one look at a cluster, from reading it to having written its status.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
    registry=REGISTRY,
)
RECONCILE_FAILURES = Counter(
    "lmcache_operator_reconcile_failures_total",
    "Looks at a cluster that ended in an error and are tried again.",
    registry=REGISTRY,
)
WRITES = Counter(
    "lmcache_operator_writes_total",
    "Changes made in the cluster: apply, status, delete, evict. At rest this stands still.",
    ["what"],
    registry=REGISTRY,
)
CLUSTERS = Gauge("lmcache_operator_clusters", "LMCacheClusters being looked after.", registry=REGISTRY)
BUILD_INFO = Gauge("lmcache_operator_build_info", "1, with the version.", ["version"], registry=REGISTRY)
BUILD_INFO.labels(version=__version__).set(1)


def serve(port: int) -> None:
    """Answer /metrics on a port, from a thread of its own."""
    start_http_server(port, registry=REGISTRY)
