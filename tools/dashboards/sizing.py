"""The dashboard "Sizing": recommended and current sizes, their value, and predicted against measured hits."""

from __future__ import annotations

from tools.dashboards.layout import Dashboard, Panel, Query

_OF_CLUSTER = "{{namespace}}/{{name}}"

DASHBOARD = Dashboard(
    "sizing",
    "LMCache / Sizing",
    "What the operator recommends, what it would save, and whether its predictions are right.",
    [
        Panel(
            "Memory of each pod",
            "Current and recommended size of the memory tier.",
            "bytes",
            [
                Query(
                    "max by (namespace, name, size) (lmcache_operator_autoscaling_memory_bytes{...})",
                    f"{_OF_CLUSTER}: {{{{size}}}}",
                )
            ],
        ),
        Panel(
            "Shards of the remote tier",
            "Current and recommended number of shards.",
            "short",
            [
                Query(
                    "max by (namespace, name, size) (lmcache_operator_autoscaling_shards{...})",
                    f"{_OF_CLUSTER}: {{{{size}}}}",
                )
            ],
        ),
        Panel(
            "Value of the recommended size",
            "USD per hour that the recommended size saves compared with the current size, at the prices"
            " of the spec.",
            "currencyUSD",
            [
                Query(
                    "max by (namespace, name, tier) (lmcache_operator_autoscaling_saving_usd_per_hour{...})",
                    f"{_OF_CLUSTER}: {{{{tier}}}}",
                )
            ],
        ),
        Panel(
            "Limits",
            "What keeps a tier from its best size (`limitedBy` in the status). `None`: no limit.",
            "short",
            [
                Query(
                    "max by (namespace, name, tier, by) (lmcache_operator_autoscaling_limited{...})",
                    "limited",
                )
            ],
            "table",
        ),
        Panel(
            "Predicted and measured hits",
            "Share of prompt tokens in the engines and in memory. `current` is what the curve predicts"
            " for the present size."
            " `measured` should be close to it. `recommended` is the prediction for the recommended size.",
            "percentunit",
            [
                Query(
                    "max by (namespace, name, size) (lmcache_operator_autoscaling_predicted_hit_ratio{...})",
                    f"{_OF_CLUSTER}: {{{{size}}}}",
                ),
                Query(
                    "sum by (namespace, lmcache_io_cluster) (rate(lmcache_hit_tokens_total{...,"
                    ' tier=~"engine|memory"}[1h]))'
                    " / sum by (namespace, lmcache_io_cluster) (rate(lmcache_lookup_tokens_total{...}[1h]))",
                    "{{namespace}}/{{lmcache_io_cluster}}: measured",
                ),
            ],
            max_value=1,
        ),
        Panel(
            "Hits that a larger memory would gain",
            "Predicted hits with the recommended size minus those with the current size.",
            "percentunit",
            [
                Query(
                    "max by (namespace, name) (lmcache_operator_autoscaling_predicted_hit_ratio{...,"
                    ' size="recommended"})'
                    " - max by (namespace, name) (lmcache_operator_autoscaling_predicted_hit_ratio{...,"
                    ' size="current"})',
                    _OF_CLUSTER,
                )
            ],
        ),
        Panel(
            "Size of running memory tiers",
            "Bytes of all pods: the size now, the target of a resize, and the size up to which a resize"
            " needs no restart.",
            "bytes",
            [
                Query("sum(lmcache_memory_tier_size_bytes{...})", "now"),
                Query("sum(lmcache_memory_tier_target_bytes{...})", "target"),
                Query("sum(lmcache_memory_tier_max_bytes{...})", "possible without a restart"),
            ],
        ),
        Panel(
            "The engines' own KV caches, and memory",
            "Bytes by LMCacheCluster. A memory tier that is smaller than the engine's own cache adds few"
            " hits.",
            "bytes",
            [
                Query(
                    "sum by (lmcache_io_cluster) (lmcache_engine_kv_bytes{...})",
                    "{{lmcache_io_cluster}}: engines",
                ),
                Query(
                    "sum by (lmcache_io_cluster) (lmcache_memory_tier_capacity_bytes{...})",
                    "{{lmcache_io_cluster}}: memory",
                ),
            ],
        ),
        Panel(
            "Sampled requests that were lost",
            "Samples per second that a sidecar dropped before the operator read them. Above 0, decisions"
            " use less data.",
            "ops",
            [
                Query(
                    "sum by (namespace, lmcache_io_cluster)"
                    " (rate(lmcache_samples_dropped_total{...}[$__rate_interval]))",
                    "{{namespace}}/{{lmcache_io_cluster}}",
                )
            ],
        ),
    ],
    hours=24,
)
