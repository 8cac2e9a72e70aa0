"""What sidecars count of their tiers together, as the status tells it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache_operator.autoscaling.report import steady
from lmcache_operator.components.base import Observed, RemoteFigures
from lmcache_operator.specs import Object
from lmcache_operator.specs.merge import at


def hit_percent(observed: Observed) -> Object:
    """``status.hitPercent``: of the tokens that requests looked up, those that each tier had."""
    sidecars = observed.probed.sidecars if observed.probed else ()
    num_tokens = sum(sidecar.lookups.tokens for sidecar in sidecars)
    found: Object = {}
    if num_tokens:
        has_tier = {
            "engine": True,
            "memory": True,
            "disk": any(sidecar.is_disk_available is not None for sidecar in sidecars),
            "remote": any(sidecar.is_remote_reachable is not None for sidecar in sidecars),
        }
        for tier in (tier for tier, has in has_tier.items() if has):
            num_hits = sum(getattr(sidecar.lookups, tier) for sidecar in sidecars)
            found[tier] = min(100, 100 * num_hits // num_tokens)
    return _told(at(observed.resource, "status", "hitPercent"), found)


def remote_usage(observed: Observed) -> Object:
    """A part of ``status.remote``: all see the same servers, as far as each is allowed to ask; so do
    those of clusters that use them."""
    counts = [sidecar.remote for sidecar in (observed.probed.sidecars if observed.probed else ())]
    asking = (user for user in observed.users if at(user, "status", "readyReplicas"))  # the others did once
    told = (at(user, "status", "remote") or {} for user in asking)
    counts += [RemoteFigures(own.get("usedBytes", 0), own.get("evicted", 0)) for own in told]
    found = {}
    if used := max((own.used_bytes for own in counts), default=0):
        found = {"usedBytes": used, "evicted": max(own.evicted for own in counts)}
    former = at(observed.resource, "status", "remote")
    kept = {name: value for name, value in (former or {}).items() if name in ("usedBytes", "evicted")}
    return _told(kept, found)


def _told(former: Any, found: Object) -> Object:
    """As it was told last while nobody says otherwise, or nearly the same: else it would be written all the
    time."""
    told = former if isinstance(former, Mapping) else {}
    return dict(steady(told, found)) if found else dict(told)
