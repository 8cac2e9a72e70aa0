"""The dashboard "Is it worth it": what the cache saves, and why the rest was computed."""

from __future__ import annotations

from lmcache_store.causes import HITS, TIERS
from tools.dashboards.layout import CLUSTERS, Dashboard, Panel, Query, Setting

_TIERS = f'cause=~"{"|".join(TIERS)}"'
_NOT_COMPUTED, _COMPUTED = f'cause=~"{"|".join(HITS)}"', f'cause!~"{"|".join(HITS)}"'
_PROMPTS = "sum(rate(lmcache_prompt_tokens_total{...}[$__range]))"
_GPUS = "sum(rate(lmcache_saved_gpu_seconds_total{...}[%s]))"


def _share(matcher: str) -> Query:
    return Query(f"sum(rate(lmcache_cause_tokens_total{{..., {matcher}}}[$__range])) / {_PROMPTS}")


DASHBOARD = Dashboard(
    "worth-it",
    "LMCache / Is it worth it",
    "What the cache saves, and why engines computed the rest of the prompts.",
    [
        Panel(
            "Loaded from the tiers",
            "Share of prompt tokens that engines loaded from memory, disk or the remote tier. This is the"
            " gain of LMCache.",
            "percentunit",
            [_share(_TIERS)],
            "stat",
            6,
            5,
        ),
        Panel(
            "Found in the engines",
            "Share of prompt tokens in the engines' own prefix caches. Engines have this without LMCache.",
            "percentunit",
            [_share('cause="engine"')],
            "stat",
            6,
            5,
        ),
        Panel(
            "GPUs saved",
            "GPUs that would do nothing but compute the tokens that were loaded, at the measured prefill"
            " speed.",
            "short",
            [Query(_GPUS % "$__range")],
            "stat",
            6,
            5,
        ),
        Panel(
            "Saved per hour",
            "Value of the saved GPU time at the price in the variable at the top, without the cost of the"
            " tiers.",
            "currencyUSD",
            [Query(f"{_GPUS % '$__range'} * $gpu_hour")],
            "stat",
            6,
            5,
        ),
        Panel(
            "Prompt tokens by source",
            "Tokens of prompts per second: from the engine's own cache, from each tier, and computed.",
            "short",
            [
                Query(
                    f"sum by (cause) (rate(lmcache_cause_tokens_total{{..., {_NOT_COMPUTED}}}"
                    "[$__rate_interval]))",
                    "{{cause}}",
                ),
                Query(
                    f"sum(rate(lmcache_cause_tokens_total{{..., {_COMPUTED}}}[$__rate_interval]))", "computed"
                ),
            ],
            is_stacked=True,
        ),
        Panel(
            "Computed tokens by cause",
            "Why engines computed tokens. docs/reference/causes.md explains each cause, `kubectl lmcache"
            " explain` gives advice.",
            "short",
            [
                Query(
                    f"sum by (cause) (rate(lmcache_cause_tokens_total{{...,"
                    f" {_COMPUTED}}}[$__rate_interval]))",
                    "{{cause}}",
                )
            ],
            is_stacked=True,
        ),
        Panel(
            "Hits by tier",
            "Share of looked-up tokens that were found, by the fastest place that had them. Lookups count"
            " whole chunks only.",
            "percentunit",
            [
                Query(
                    "sum by (tier) (rate(lmcache_hit_tokens_total{...}[$__rate_interval]))"
                    " / scalar(sum(rate(lmcache_lookup_tokens_total{...}[$__rate_interval])))",
                    "{{tier}}",
                )
            ],
            is_stacked=True,
            max_value=1,
        ),
        Panel(
            "Time to the first token",
            "Median and 95th percentile of requests with and without a hit in a tier. Requests without a hit"
            " may be shorter: `kubectl lmcache explain` compares requests of like lengths.",
            "s",
            [
                Query(
                    f"histogram_quantile({share}, sum by (hit, le)"
                    " (rate(lmcache_request_first_token_seconds_bucket{...}[$__rate_interval])))",
                    f"{share:.0%}, hit: {{{{hit}}}}",
                )
                for share in (0.5, 0.95)
            ],
        ),
        Panel(
            "Causes in this time range",
            "Tokens of prompts by cause, the most frequent cause first.",
            "short",
            [
                Query(
                    "sort_desc(sum by (cause) (increase(lmcache_cause_tokens_total{...}[$__range])))",
                    "{{cause}}",
                )
            ],
            "bargauge",
        ),
        Panel(
            "Where prompts part from earlier prompts",
            "Tokens computed after a divergence, by the length of the common prefix. Many tokens at a"
            " small length: a"
            " timestamp or a name near the start of the prompts differs in each request.",
            "short",
            [
                Query(
                    "sort_desc(sum by (depth) (increase(lmcache_diverged_tokens_total{...}[$__range])))",
                    "at most {{depth}} tokens",
                )
            ],
            "bargauge",
        ),
    ],
    (*CLUSTERS, Setting("gpu_hour", "USD per GPU hour", "2.50")),
)
