"""Hits by tier and usage of the remote tier, for the status. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache_operator.autoscaling.policy.report import steady
from lmcache_operator.components.base import Observed, RemoteFigures
from lmcache_operator.specs import Object
from lmcache_operator.specs.merge import dig


def hit_percent(observed: Observed) -> Object:
    """Return ``status.hitPercent``: the share of looked-up tokens that each tier hit."""
    sidecars = observed.probed.sidecars if observed.probed else ()
    num_tokens = sum(sidecar.lookups.tokens for sidecar in sidecars)
    percent: Object = {}
    if num_tokens:
        has_tier = {
            "engine": True,
            "memory": True,
            "disk": any(sidecar.is_disk_available is not None for sidecar in sidecars),
            "peers": any(sidecar.has_peers for sidecar in sidecars),
            "remote": any(sidecar.is_remote_reachable is not None for sidecar in sidecars),
        }
        for tier in (tier for tier, has in has_tier.items() if has):
            num_hits = sum(getattr(sidecar.lookups, tier) for sidecar in sidecars)
            percent[tier] = min(100, 100 * num_hits // num_tokens)
    return _steady(dig(observed.resource, "status", "hitPercent"), percent)


def remote_usage(observed: Observed) -> Object:
    """Return ``usedBytes`` and ``evicted`` of ``status.remote``.

    All sidecars use the same servers, and so do those of other clusters that refer to them. A sidecar may not
    be allowed to ask a server, so the largest figure counts.
    """
    counts = [sidecar.remote for sidecar in (observed.probed.sidecars if observed.probed else ())]
    # Figures of a cluster without ready engines are old.
    users = (user for user in observed.users if dig(user, "status", "readyReplicas"))
    reported = (dig(user, "status", "remote") or {} for user in users)
    counts += [RemoteFigures(figures.get("usedBytes", 0), figures.get("evicted", 0)) for figures in reported]
    usage = {}
    if used := max((figures.used_bytes for figures in counts), default=0):
        usage = {"usedBytes": used, "evicted": max(figures.evicted for figures in counts)}
    status = dig(observed.resource, "status", "remote")
    former = {name: value for name, value in (status or {}).items() if name in ("usedBytes", "evicted")}
    return _steady(former, usage)


def _steady(former: Any, current: Object) -> Object:
    """Return the former figures while there are no new ones, or only small changes, to avoid writes."""
    figures = former if isinstance(former, Mapping) else {}
    return dict(steady(figures, current)) if current else dict(figures)
