"""Hits by tier and by tenant, and usage of memory and of the remote tier, for the status. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmcache_operator.contract.base import Observed, RemoteFigures, Sidecar, TenantFigures
from lmcache_operator.policy.report import steady
from lmcache_operator.specs import Object
from lmcache_operator.specs.merge import dig

_POINTS = 2
"""A share in per cent that changes by at most this many points is not worth an update."""


def hit_percent(observed: Observed) -> Object:
    """Return ``status.hitPercent``: the share of looked-up tokens that each tier hit."""
    sidecars = _summable(observed)
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
    return _steady(dig(observed.resource, "status", "hitPercent"), percent, _POINTS)


def tenant_usage(observed: Observed, names: Sequence[str] | None) -> list[Object]:
    """Return ``status.tenants``: hits and memory of each declared tenant, of all sidecars together.

    Args:
        observed: The cluster, with the reports of its sidecars. They may have other names than the spec.
        names: Names of the declared tenants, empty without any. None: the operator could not plan, such as
            for an invalid spec, and the former list stays.
    """
    listed: list[Object] = dig(observed.resource, "status", "tenants") or []
    if names is None:
        return listed
    former = {entry["name"]: {key: entry[key] for key in entry if key != "name"} for entry in listed}
    sidecars = [sidecar for sidecar in _summable(observed) if sidecar.tenants]
    if not names or not (sidecars or former):
        return []
    # After a restart, a sidecar has no prompts of some tenants yet. Their former hits stay until then.
    current = {name: former.get(name, {}) | _of_tenant(sidecars, name) for name in names}
    figures = _steady(former, current, _POINTS)
    # The API server keeps the order of the list, so a different order would cause writes without end.
    ordered = sorted(figures, key=[*former, *names].index)
    return [{"name": name, **figures[name]} for name in ordered]


def _summable(observed: Observed) -> Sequence[Sidecar]:
    """Return the sidecars whose figures can be summed.

    None if one of them missed an answer and may give the next one: sums without it would fall and rise again.
    """
    return observed.probed.sidecars if observed.probed and observed.probed.is_certain else ()


def _of_tenant(sidecars: Sequence[Sidecar], name: str) -> Object:
    """Return the figures of one tenant that are known."""
    counted = [sidecar.tenants.get(name, TenantFigures()) for sidecar in sidecars]
    shares = {
        "hitPercent": (sum(each.hit_tokens for each in counted), sum(each.prompt_tokens for each in counted)),
        "usedMemoryPercent": (
            sum(each.bytes for each in counted),
            sum(sidecar.usable_bytes for sidecar in sidecars),
        ),
    }
    return {field: min(100, 100 * part // whole) for field, (part, whole) in shares.items() if whole}


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


def _steady(former: Any, current: Object, absolute_change: float = 0.0) -> Object:
    """Return the former figures while there are no new ones, or only small changes, to avoid writes."""
    figures = former if isinstance(former, Mapping) else {}
    return dict(steady(figures, current, absolute_change)) if current else dict(figures)
