"""The dashboard "Tiers": capacity, speed and health of memory, disk and the remote tier."""

from __future__ import annotations

from tools.dashboards.layout import Dashboard, Heading, Panel, Query

_BY_POD = "{{namespace}}/{{pod}}"
_ROW_BYTES = "* on (namespace, pod) group_left () lmcache_row_bytes{...}"


def _by_tenant(metric: str, legend: str = "{{tenant}}") -> Query:
    return Query(f"sum by (tenant) (lmcache_tenant_{metric}{{...}})", legend)


def _rate_by_tenant(counter: str) -> str:
    return f"sum by (tenant) (rate(lmcache_tenant_{counter}_total{{...}}[$__rate_interval]))"


def _per_tier(metric: str, legend: str) -> Query:
    return Query(f"sum by (tier) (rate({metric}{{...}}[$__rate_interval]))", legend)


TENANTS = (
    Heading("Tenants"),
    Panel(
        "Hit ratio by tenant",
        "Share of the tenant's prompt tokens that engines did not compute. `default`: requests whose salt has"
        " no name, or that have no salt.",
        "percentunit",
        [Query(f"{_rate_by_tenant('hit_tokens')} / {_rate_by_tenant('prompt_tokens')}", "{{tenant}}")],
        max_value=1,
    ),
    Panel(
        "Memory by tenant",
        "Share of the usable memory that the tenant's rows take, of all pods together.",
        "percentunit",
        [
            Query(
                "sum by (tenant) (lmcache_tenant_bytes{...})"
                " / scalar(sum(lmcache_memory_tier_usable_bytes{...}))",
                "{{tenant}}",
            )
        ],
        is_stacked=True,
        max_value=1,
    ),
    Panel(
        "Use and budget of tenants",
        "Bytes of all pods together. A tenant below its guaranteed share loses no rows to other tenants. A"
        " tenant at its upper bound evicts its own rows. For `default`, the bounds are those of each salt.",
        "bytes",
        [
            _by_tenant("bytes", "memory"),
            _by_tenant("guaranteed_bytes", "guaranteed"),
            _by_tenant("bound_bytes", "upper bound"),
            _by_tenant("disk_bytes", "disk"),
            _by_tenant("disk_bound_bytes", "upper bound on disk"),
        ],
        "table",
    ),
    Panel(
        "Refused stores by tenant",
        "Rows per second that were not stored. Memory: no row could be evicted for the tenant. Disk: the"
        " tenant is at its upper bound there.",
        "ops",
        [
            Query(_rate_by_tenant("refused"), "{{tenant}}: memory"),
            Query(_rate_by_tenant("disk_refused"), "{{tenant}}: disk"),
        ],
    ),
)
"""Panels by the name of the tenant."""

DASHBOARD = Dashboard(
    "tiers",
    "LMCache / Tiers",
    "Capacity, speed and health of the memory tiers, the disks and the remote tier.",
    [
        Panel(
            "Memory in use",
            "Share of each memory tier that holds rows. A full tier is normal. Near 0: engines do not store.",
            "percentunit",
            [Query("lmcache_memory_tier_used_bytes{...} / lmcache_memory_tier_capacity_bytes{...}", _BY_POD)],
            max_value=1,
        ),
        Panel(
            "Lower tiers in use",
            "Bytes on the volumes of all disks. For servers, the bytes that they hold, counted once.",
            "bytes",
            [
                Query('sum by (tier) (lmcache_tier_used_bytes{..., tier="disk"})', "{{tier}}"),
                Query(
                    'max by (namespace, lmcache_io_cluster) (lmcache_tier_used_bytes{..., tier="remote"})',
                    "remote of {{namespace}}/{{lmcache_io_cluster}}",
                ),
            ],
        ),
        Panel(
            "Circuits",
            "1: the tier answers all sidecars. 0: at least one sidecar gets no answer. Engines serve"
            " without the tier.",
            "short",
            [
                Query(
                    "min by (namespace, lmcache_io_cluster, tier) (lmcache_tier_reachable{...})",
                    "{{namespace}}/{{lmcache_io_cluster}}: {{tier}}",
                )
            ],
            max_value=1,
        ),
        Panel(
            "Speed of loads",
            "Bytes per second that loads from a tier reached in the last minute, the mean over all pods"
            " that loaded.",
            "Bps",
            [Query("avg by (tier) (lmcache_tier_load_bytes_per_second{...} > 0)", "{{tier}}")],
        ),
        Panel(
            "Time that requests spend on the cache",
            "Mean seconds of a request: in lookups, waiting for rows, and in loads by the slowest tier.",
            "s",
            [
                Query(
                    "sum(rate(lmcache_request_lookup_seconds_sum{...}[$__rate_interval]))"
                    " / sum(rate(lmcache_request_lookup_seconds_count{...}[$__rate_interval]))",
                    "lookup",
                ),
                Query(
                    "sum(rate(lmcache_request_wait_seconds_sum{...}[$__rate_interval]))"
                    " / sum(rate(lmcache_request_wait_seconds_count{...}[$__rate_interval]))",
                    "wait",
                ),
                Query(
                    "sum by (tier) (rate(lmcache_request_load_seconds_sum{...}[$__rate_interval]))"
                    " / sum by (tier) (rate(lmcache_request_load_seconds_count{...}[$__rate_interval]))",
                    "load: {{tier}}",
                ),
            ],
        ),
        Panel(
            "Traffic with lower tiers",
            "Bytes per second that rows take: promoted into memory, and written through.",
            "Bps",
            [
                Query(
                    f"sum by (tier) (rate(lmcache_tier_promoted_total{{...}}[$__rate_interval])"
                    f" {_ROW_BYTES})",
                    "{{tier}}: promoted",
                ),
                Query(
                    f"sum by (tier) (rate(lmcache_tier_written_total{{...}}[$__rate_interval]) {_ROW_BYTES})",
                    "{{tier}}: written",
                ),
            ],
        ),
        Panel(
            "Rows that wait",
            "Queues of the lower tiers. A queue that only grows: the tier is slower than the stores.",
            "short",
            [
                Query("sum by (tier) (lmcache_tier_queued_loads{...})", "{{tier}}: loads"),
                Query("sum by (tier) (lmcache_tier_queued_writes{...})", "{{tier}}: writes"),
            ],
        ),
        Panel(
            "Time of engines' calls, 99th percentile",
            "Seconds in the sidecar, by method. Engines do not wait for these calls in the scheduler.",
            "s",
            [
                Query(
                    "histogram_quantile(0.99, sum by (method, le)"
                    " (rate(lmcache_rpc_seconds_bucket{...}[$__rate_interval])))",
                    "{{method}}",
                )
            ],
        ),
        Panel(
            "Rows that left memory",
            "Rows per second, by reason. Evictions are normal. Refused: no row could be evicted, and a"
            " new row was not stored.",
            "ops",
            [
                Query(
                    "sum by (reason) (rate(lmcache_memory_tier_removed_total{...}[$__rate_interval]))",
                    "{{reason}}",
                ),
                Query("sum(rate(lmcache_memory_tier_refused_total{...}[$__rate_interval]))", "refused"),
            ],
        ),
        Panel(
            "Evictions of lower tiers",
            "Objects per second that a tier evicted for capacity. Servers count values of all their clients.",
            "ops",
            [
                Query('sum(rate(lmcache_tier_evicted_total{..., tier="disk"}[$__rate_interval]))', "disk"),
                Query(
                    "sum(max by (namespace, lmcache_io_cluster)"
                    ' (rate(lmcache_tier_evicted_total{..., tier="remote"}[$__rate_interval])))',
                    "remote",
                ),
            ],
        ),
        Panel(
            "Residence",
            "Seconds until a row that is not used leaves the tier. For memory: rows in use, divided by"
            " evictions per second.",
            "s",
            [
                Query(
                    "sum(lmcache_memory_tier_used_rows{...})"
                    " / (sum(rate(lmcache_memory_tier_removed_total{...,"
                    ' reason="evicted"}[$__rate_interval])) > 0)',
                    "memory",
                ),
                Query("min by (tier) (lmcache_tier_residence_seconds{...})", "{{tier}}"),
            ],
        ),
        Panel(
            "Rows not written",
            "Rows per second that a lower tier did not get, by reason.",
            "ops",
            [
                Query(
                    "sum by (tier, reason) (rate(lmcache_tier_writes_skipped_total{...}[$__rate_interval]))",
                    "{{tier}}: {{reason}}",
                )
            ],
        ),
        Panel(
            "Loads that failed",
            "Per second: rows not promoted, calls that found the tier unavailable, and damaged objects.",
            "ops",
            [
                _per_tier("lmcache_tier_promotions_failed_total", "{{tier}}: not promoted"),
                _per_tier("lmcache_tier_failures_total", "{{tier}}: unavailable"),
                _per_tier("lmcache_tier_invalid_total", "{{tier}}: damaged"),
            ],
        ),
        Panel(
            "Who copies stores",
            "Attached workers by transfer mode. With CudaIPC the sidecar copies from the GPU, else the"
            " engine copies.",
            "short",
            [Query("sum by (mode) (lmcache_transfer_workers{...})", "{{mode}}")],
        ),
        *TENANTS,
    ],
)
