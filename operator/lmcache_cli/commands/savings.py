"""Savings and costs of a cluster's cache, at the prices of its spec. Pure."""

from __future__ import annotations

from typing import Any

from lmcache_cli.commands.gather import Gathered
from lmcache_operator.api.parse import parse
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs import Object
from lmcache_store.common.prices import Prices
from lmcache_store.explain.benefit import Benefit, benefit


def prices_of(cluster: Object) -> Prices:
    """Return the prices of the spec, or the defaults if the spec is invalid."""
    try:
        return Prices(*parse(cluster).spec.autoscaling.prices.usd_per_hour)
    except InvalidSpecError:
        return Prices()


def saved_by(gathered: Gathered, shard_bytes: float) -> Benefit:
    """Return what all sidecars saved and cost. ``shard_bytes``: size of all shards; 0: there are none."""
    return benefit(gathered.stats, prices_of(gathered.cluster), shard_bytes)


def document(saved: Benefit) -> dict[str, Any] | None:
    """Return savings and costs as plain data; None if no sidecar counts them."""
    if not saved.num_sidecars:
        return None
    latency = saved.saved_latency
    return {
        "seconds": saved.uptime_seconds,
        "loadedTokens": dict(saved.loaded_tokens),
        "prefillSeconds": saved.prefill_seconds,
        "gpuHours": saved.gpu_hours,
        "savedUSD": saved.saved_usd,
        "spentUSD": dict(saved.spent_usd),
        "netUSD": saved.net_usd,
        "waitSeconds": saved.wait_seconds,
        "loadSeconds": saved.load_seconds,
        "firstTokenSavedSeconds": latency
        and {"p50": latency.p50, "p95": latency.p95, "requests": latency.num_requests},
    }
