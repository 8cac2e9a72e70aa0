"""The dashboard "Operator": reconciliations, queue, and requests to the API server."""

from __future__ import annotations

from tools.dashboards.layout import Dashboard, Panel, Query

_RATE = "[$__rate_interval]"


def _quantile(share: float) -> Query:
    buckets = f"sum by (le) (rate(lmcache_operator_reconcile_seconds_bucket{_RATE}))"
    return Query(f"histogram_quantile({share}, {buckets})", f"{share:.0%} are faster")


DASHBOARD = Dashboard(
    "operator",
    "LMCache / Operator",
    "Whether the operator works: its leader, reconciliations, queue and requests to the API server.",
    [
        Panel(
            "Leaders",
            "Operators that may write. It must be 1.",
            "short",
            [Query("sum(lmcache_operator_leading)")],
            "stat",
            6,
            5,
        ),
        Panel(
            "LMCacheClusters",
            "Clusters that the leader reconciles.",
            "short",
            [Query("sum(lmcache_operator_clusters)")],
            "stat",
            6,
            5,
        ),
        Panel(
            "Failed reconciliations",
            "Share of reconciliations in this time range that failed. The operator retries them.",
            "percentunit",
            [
                Query(
                    "sum(rate(lmcache_operator_reconcile_failures_total[$__range]))"
                    " / sum(rate(lmcache_operator_reconcile_seconds_count[$__range]))"
                )
            ],
            "stat",
            6,
            5,
        ),
        Panel(
            "Versions",
            "Running operators by version.",
            "short",
            [Query("sum by (version) (lmcache_operator_build_info)", "{{version}}")],
            "stat",
            6,
            5,
        ),
        Panel(
            "Reconciliations",
            "Reconciliations per second, and those that failed.",
            "ops",
            [
                Query(f"sum(rate(lmcache_operator_reconcile_seconds_count{_RATE}))", "all"),
                Query(f"sum(rate(lmcache_operator_reconcile_failures_total{_RATE}))", "failed"),
            ],
        ),
        Panel(
            "Time of a reconciliation",
            "Seconds, including the write of the status.",
            "s",
            [_quantile(0.5), _quantile(0.99)],
        ),
        Panel(
            "Queue",
            "Clusters that wait for a free worker. Short peaks are normal, for example after a restart.",
            "short",
            [Query("sum(lmcache_operator_queue_depth)", "waiting")],
        ),
        Panel(
            "Requests to the API server",
            "Requests per second, by verb.",
            "ops",
            [Query(f"sum by (verb) (rate(lmcache_operator_api_requests_total{_RATE}))", "{{verb}}")],
        ),
        Panel(
            "Requests to the API server that failed",
            "Requests per second, by HTTP status. 0: no answer. 404 and 409 can be normal.",
            "ops",
            [
                Query(
                    f'sum by (verb, code) (rate(lmcache_operator_api_requests_total{{code!~"2.."}}{_RATE}))',
                    "{{verb}}: {{code}}",
                )
            ],
        ),
        Panel(
            "Writes",
            "Objects that the operator changed per second, by action. 0 while nothing changes.",
            "ops",
            [Query(f"sum by (what) (rate(lmcache_operator_writes_total{_RATE}))", "{{what}}")],
        ),
        Panel(
            "Processor time",
            "Cores that each operator uses.",
            "short",
            [
                Query(
                    f"rate(process_cpu_seconds_total{_RATE}) and on (instance) lmcache_operator_leading",
                    "{{pod}}",
                )
            ],
        ),
        Panel(
            "Memory",
            "Resident memory of each operator. The chart's default limit is 512 MiB.",
            "bytes",
            [Query("process_resident_memory_bytes and on (instance) lmcache_operator_leading", "{{pod}}")],
        ),
    ],
    (),
)
