"""What the operator counts about itself."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from lmcache_operator import __version__

API_REQUESTS = Counter(
    "lmcache_operator_api_requests_total", "Calls to the API server; code 0: no answer.", ["verb", "code"]
)
RECONCILE_SECONDS = Histogram(
    "lmcache_operator_reconcile_seconds", "Time of one reconciliation of a cluster, its status written.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)  # fmt: skip
RECONCILE_FAILURES = Counter(
    "lmcache_operator_reconcile_failures_total", "Reconciliations that failed and are tried again."
)
WRITES = Counter(
    "lmcache_operator_writes_total",
    "Changes: apply, delete, evict, status. At rest it stands still.",
    ["what"],
)
CLUSTERS = Gauge("lmcache_operator_clusters", "LMCacheClusters being reconciled.")
CONDITION = Gauge(
    "lmcache_operator_cluster_condition",
    "Ready and Degraded of each LMCacheCluster: 1 True, 0 False, -1 Unknown.",
    ["namespace", "name", "condition"],
)
CONDITION_VALUES = {"True": 1, "False": 0, "Unknown": -1}
MEMORY_BYTES = Gauge(
    "lmcache_operator_autoscaling_memory_bytes",
    "Memory tier of each pod: as it is (current), and as it would be best (recommended).",
    ["namespace", "name", "size"],
)
SHARDS = Gauge(
    "lmcache_operator_autoscaling_shards",
    "Shards of the managed remote tier: as many as there are (current), and as would be best (recommended).",
    ["namespace", "name", "size"],
)
SAVING = Gauge(
    "lmcache_operator_autoscaling_saving_usd_per_hour",
    "What the recommended size of a tier is worth more than the present one.",
    ["namespace", "name", "tier"],
)
LIMITED = Gauge(
    "lmcache_operator_autoscaling_limited",
    "1, with what keeps a tier's size from being the best there is (status.autoscaling, limitedBy).",
    ["namespace", "name", "tier", "by"],
)
LEADING = Gauge("lmcache_operator_leading", "1: this one of several operators may write; 0: another may.")
BUILD_INFO = Gauge("lmcache_operator_build_info", "1, with the version.", ["version"])
BUILD_INFO.labels(version=__version__).set(1)
