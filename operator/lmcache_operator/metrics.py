"""Prometheus metrics of the operator itself."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics

from lmcache_operator import __version__

# Else each counter and histogram has a second series, with its time of creation.
disable_created_metrics()  # type: ignore[no-untyped-call]

API_REQUESTS = Counter(
    "lmcache_operator_api_requests_total", "Calls to the API server. Code 0: no answer.", ["verb", "code"]
)
RECONCILE_SECONDS = Histogram(
    "lmcache_operator_reconcile_seconds", "Time of one reconciliation, including the status write.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)  # fmt: skip
RECONCILE_FAILURES = Counter(
    "lmcache_operator_reconcile_failures_total", "Reconciliations that failed and are retried."
)
WRITES = Counter(
    "lmcache_operator_writes_total",
    "Writes such as apply, delete, evict, status. Constant while nothing changes.",
    ["what"],
)
CLUSTERS = Gauge("lmcache_operator_clusters", "LMCacheClusters being reconciled.")
QUEUE_DEPTH = Gauge("lmcache_operator_queue_depth", "LMCacheClusters that wait for a free worker.")
CONDITION = Gauge(
    "lmcache_operator_cluster_condition",
    "Ready, Progressing and Degraded of each LMCacheCluster: 1 True, 0 False, -1 Unknown.",
    ["namespace", "name", "condition"],
)
CONDITION_VALUES = {"True": 1, "False": 0, "Unknown": -1}
MEMORY_BYTES = Gauge(
    "lmcache_operator_autoscaling_memory_bytes",
    "Memory tier of each pod: present size (current) and best size (recommended).",
    ["namespace", "name", "size"],
)
PREDICTED_HITS = Gauge(
    "lmcache_operator_autoscaling_predicted_hit_ratio",
    "Share of prompt tokens that the curve predicts as hits of engines and memory, by memory size.",
    ["namespace", "name", "size"],
)
SHARDS = Gauge(
    "lmcache_operator_autoscaling_shards",
    "Shards of the managed remote tier: present number (current) and best number (recommended).",
    ["namespace", "name", "size"],
)
SAVING = Gauge(
    "lmcache_operator_autoscaling_saving_usd_per_hour",
    "Value of the recommended size of a tier compared with the present size.",
    ["namespace", "name", "tier"],
)
LIMITED = Gauge(
    "lmcache_operator_autoscaling_limited",
    "1 for each limit that keeps a tier from its best size (limitedBy in status.autoscaling).",
    ["namespace", "name", "tier", "by"],
)
REFUSED_READS = Gauge(
    "lmcache_operator_refused_reads",
    "Kinds of reads that the API server refuses the operator in a namespace; *: in all namespaces.",
    ["namespace"],
)
LEADING = Gauge("lmcache_operator_leading", "1: this operator leads and may write; 0: it stands by.")
BUILD_INFO = Gauge("lmcache_operator_build_info", "Always 1; the label has the version.", ["version"])
BUILD_INFO.labels(version=__version__).set(1)
