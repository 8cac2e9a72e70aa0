"""The dashboard "Fleet": all LMCacheClusters at a glance."""

from __future__ import annotations

from lmcache_store.causes import HITS
from tools.dashboards.layout import CLUSTERS, Dashboard, Panel, Query


def _condition(kind: str) -> str:
    return f'max by (namespace, name) (lmcache_operator_cluster_condition{{..., condition="{kind}"}})'


def _per_cluster(expr: str) -> str:
    """Name the label of the cluster's name as the operator does, so that a table can join both."""
    return f'label_replace({expr}, "name", "$1", "lmcache_io_cluster", "(.*)")'


_LOADED = "sum by (namespace, lmcache_io_cluster) (rate(lmcache_loaded_tokens_total{...}[$__range]))"
_PROMPTS = "sum by (namespace, lmcache_io_cluster) (rate(lmcache_prompt_tokens_total{...}[$__range]))"

DASHBOARD = Dashboard(
    "fleet",
    "LMCache / Fleet",
    "All LMCacheClusters: health, benefit and sizes.",
    [
        Panel(
            "LMCacheClusters",
            "Clusters that the operator reports.",
            "short",
            [Query(f"count({_condition('Ready')})")],
            "stat",
            6,
            5,
        ),
        Panel(
            "Not Ready",
            "Clusters without the condition Ready. `kubectl get lmcluster -A -o wide` names the reason.",
            "short",
            [Query(f"sum({_condition('Ready')} != bool 1)")],
            "stat",
            6,
            5,
        ),
        Panel(
            "Degraded",
            "Clusters that need an action of yours. They may serve.",
            "short",
            [Query(f"sum({_condition('Degraded')} == bool 1)")],
            "stat",
            6,
            5,
        ),
        Panel(
            "Sidecars without an engine",
            "Sidecars that are ready, and that no engine uses.",
            "short",
            [
                Query(
                    "sum(lmcache_ready{...}) - (count(lmcache_ready{...} == 1 and on (namespace, pod)"
                    ' lmcache_clients{..., state="attached"} > 0) or vector(0))'
                )
            ],
            "stat",
            6,
            5,
        ),
        Panel(
            "Clusters",
            "One line for each LMCacheCluster. Ready and Degraded: 1 True, 0 False, -1 Unknown.",
            "short",
            [
                Query(_condition("Ready"), "Ready"),
                Query(_condition("Degraded"), "Degraded"),
                Query(
                    _per_cluster("sum by (namespace, lmcache_io_cluster) (lmcache_ready{...})"), "sidecars"
                ),
                Query(_per_cluster(f"{_LOADED} / {_PROMPTS}"), "loaded share"),
                Query(
                    _per_cluster(
                        "sum by (namespace, lmcache_io_cluster) (lmcache_memory_tier_size_bytes{...})"
                    ),
                    "memory bytes",
                ),
                Query(
                    "sum by (namespace, name) (lmcache_operator_autoscaling_saving_usd_per_hour{...})",
                    "USD/h of recommended sizes",
                ),
            ],
            "table",
            24,
            10,
        ),
        Panel(
            "Tokens loaded",
            "Tokens per second that engines loaded instead of computing them: the ten largest clusters.",
            "short",
            [
                Query(
                    "topk(10, sum by (namespace, lmcache_io_cluster)"
                    " (rate(lmcache_loaded_tokens_total{...}[$__rate_interval])))",
                    "{{namespace}}/{{lmcache_io_cluster}}",
                )
            ],
            is_stacked=True,
        ),
        Panel(
            "Tokens computed",
            "Tokens per second that engines computed: the ten largest clusters.",
            "short",
            [
                Query(
                    "topk(10, sum by (namespace, lmcache_io_cluster) (rate("
                    "lmcache_cause_tokens_total{...,"
                    f' cause!~"{"|".join(HITS)}"}}[$__rate_interval])))',
                    "{{namespace}}/{{lmcache_io_cluster}}",
                )
            ],
            is_stacked=True,
        ),
        Panel(
            "Tiers that do not answer",
            "Sidecars that get no answer, by cluster and tier.",
            "short",
            [
                Query(
                    "count by (namespace, lmcache_io_cluster, tier) (lmcache_tier_reachable{...} == 0)",
                    "{{namespace}}/{{lmcache_io_cluster}}: {{tier}}",
                )
            ],
        ),
        Panel(
            "Models",
            "Sidecars whose engines serve a model.",
            "short",
            [Query('sum by (model) (lmcache_engine_info{..., model=~"$model"})', "{{model}}")],
        ),
        Panel(
            "Versions of sidecars",
            "Running sidecars by version. Two versions are normal during an upgrade.",
            "short",
            [Query("sum by (version) (lmcache_build_info{...})", "{{version}}")],
        ),
        Panel(
            "Unused savings",
            "USD per hour that the recommended sizes would save: the ten largest.",
            "currencyUSD",
            [
                Query(
                    "topk(10, sum by (namespace, name)"
                    " (lmcache_operator_autoscaling_saving_usd_per_hour{...}))",
                    "{{namespace}}/{{name}}",
                )
            ],
        ),
    ],
    CLUSTERS,
)
