"""Savings and costs of a cluster's cache, at the prices of its spec. Pure."""

from __future__ import annotations

from typing import Any

from lmcache_cli.commands.gather import Gathered
from lmcache_operator.api.parse import parse
from lmcache_operator.api.types import Spec
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs.merge import dig
from lmcache_store.common.prices import Prices
from lmcache_store.common.units import parse_size
from lmcache_store.explain.benefit import Benefit, benefit, usd_per_token


def _spec(gathered: Gathered) -> Spec | None:
    """The spec of the cluster; None if it is invalid."""
    try:
        return parse(gathered.cluster).spec
    except InvalidSpecError:
        return None


def _prices(gathered: Gathered) -> Prices:
    """The prices of the spec, or the defaults if the spec is invalid."""
    spec = _spec(gathered)
    return Prices(*spec.autoscaling.prices.usd_per_hour) if spec else Prices()


def has_gpus(gathered: Gathered) -> bool:
    """Whether engines have GPUs, so that computing a token has a price; also True if that is unknown."""
    spec = _spec(gathered)
    if spec is None or spec.engine is None or spec.engine.gpu.count or spec.engine.gpu.device_class_name:
        return True
    # Users' own pods with an injected sidecar may have GPUs.
    specs = [figures.pod["spec"] for figures in gathered.pods]
    limits = [dig(each, "resources", "limits") or () for pod in specs for each in pod.get("containers") or ()]
    return any(pod.get("resourceClaims") for pod in specs) or any(
        spec.engine.gpu.resource_name in each for each in limits
    )


def price_of_token(gathered: Gathered) -> float:
    """Return what the computation of one token costs in USD; 0: unknown, or without GPUs."""
    return usd_per_token(gathered.stats, _prices(gathered)) if has_gpus(gathered) else 0.0


def lower_sizes(gathered: Gathered) -> dict[str, int]:
    """Return the sizes of the lower tiers, as far as the spec says them."""
    spec, sizes = _spec(gathered), dict[str, int]()
    if spec and spec.tiers.disk:
        sizes["disk"] = parse_size(spec.tiers.disk.size) * len(gathered.stats)
    if spec and spec.tiers.managed:
        shards = dig(gathered.cluster, "status", "autoscaling", "remote", "current")
        number = shards if isinstance(shards, int) else spec.tiers.managed.shards
        sizes["remote"] = spec.tiers.managed.shard_bytes * number
    return sizes


def saved_by(gathered: Gathered) -> Benefit:
    """Return what all sidecars saved and cost."""
    return benefit(gathered.stats, _prices(gathered), lower_sizes(gathered).get("remote", 0))


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
