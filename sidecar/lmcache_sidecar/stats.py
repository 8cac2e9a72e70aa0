"""What the sidecar knows about its parts: for a JSON document, from which the metrics are made too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lmcache.rpc import kvcache_pb2 as pb
from lmcache.tiers.disk.tier import DiskTier
from lmcache.tiers.stats import MemoryStats, Tenants
from lmcache.tiers.tiered.tier_worker import Lower
from lmcache_sidecar.clients.registry import Client
from lmcache_sidecar.sessions import Sessions
from lmcache_sidecar.tiers import Configured


def collect(sessions: Sessions, configured: Mapping[str, Configured], counts: MemoryStats) -> dict[str, Any]:
    """Everything, in plain numbers and text; null where a part is not there (yet). Costs O(clients)."""
    arena, store = sessions.arena, sessions.store
    lower = {
        name: tier_stats(tier, store.lower.get(name) if store else None) for name, tier in configured.items()
    }
    clients = [_client(client) for client in sessions.clients.by_uuid.values()]
    num_attached = sum(client["is_attached"] for client in clients)
    return {
        "epoch": arena.epoch,
        "geometry": arena.geometry and asdict(arena.geometry),
        "memory": _memory(sessions, counts),
        "disk": lower.get("disk"),
        "remote": lower.get("remote"),
        "num_unsettled_rows": store.num_unsettled if store else 0,
        "num_clients": {"attached": num_attached, "quarantined": len(clients) - num_attached},
        "num_previous_clients": len(sessions.clients.previous),
        "clients": clients,
    }


def _memory(sessions: Sessions, counts: MemoryStats) -> dict[str, Any]:
    arena, store = sessions.arena, sessions.store
    numbers: dict[str, Any] = {
        "path": str(arena.path),
        "growth_error": arena.growth_error,
        "num_rows": arena.num_rows,
        "ready_rows": arena.ready_rows,
        "hits": counts.hits,
        "misses": counts.misses,
        "hit_ratio": _ratio(counts.hits, counts.misses),
        "refused": counts.refused,
        "verified": counts.verified,
        "tenants": _tenants(counts.tenants),
        "removed": {reason.value: number for reason, number in counts.removed.items()},
    }
    if store is None or arena.geometry is None:
        return numbers
    memory = store.memory
    row_bytes = arena.geometry.slot_bytes * arena.geometry.num_columns
    return numbers | {
        "usable_rows": memory.usable_rows,
        "used_rows": memory.num_used,
        "leased_rows": memory.num_leased,
        "quarantined_slots": memory.num_quarantined,
        "capacity_bytes": arena.num_rows * row_bytes,
        "ready_bytes": arena.ready_rows * row_bytes,
        "used_bytes": memory.num_used * row_bytes,
    }


def _tenants(tenants: Tenants) -> dict[str, Any]:
    """The largest tenants by the head of their names, which are hashes, and all others together."""
    largest, others = tenants.largest()
    uses = {use.name.hex()[:16] or "none": use for use in largest} | {"other": others}
    return {name: {"rows": use.num_rows, "bytes": use.num_bytes} for name, use in uses.items()}


def tier_stats(configured: Configured, lower: Lower | None) -> dict[str, Any]:
    """What a lower tier did, and whether it answers; ``lower``: not there before the arena is formatted."""
    tier = configured.tier
    if tier is None:
        return {"address": configured.address, "is_reachable": False, "off_reason": configured.off_reason}
    counts = vars(tier.stats)  # refused and invalid are counts by reason
    numbers = {
        "address": configured.address,
        "is_reachable": not tier.breaker.is_open,
        "off_reason": "",
        "hit_ratio": _ratio(counts["hits"], counts["misses"]),
        "operations": {
            name: sum(count.values()) if isinstance(count, dict) else count for name, count in counts.items()
        },
        "refused": counts["refused"],
        "invalid": counts["invalid"],
    }
    if isinstance(tier, DiskTier):
        numbers["used_bytes"] = tier.num_bytes
    return numbers | _traffic(lower) if lower else numbers


def _traffic(lower: Lower) -> dict[str, Any]:
    """What went between memory and a lower tier, in rows."""
    counts = lower.stats
    return {
        "is_reachable": lower.is_well,
        "load_bytes_per_second": round(lower.bytes_per_second),
        "num_queued_loads": lower.num_loads,
        "num_queued_writes": lower.num_queued,
        "writes": {"written": counts.written}
        | {reason.value: number for reason, number in counts.unwritten.items()},
        "promotions": {
            "promoted": counts.promoted,
            "failed": counts.promotions_failed,
            "hit_not_worth": counts.hit_not_worth,
        },
    }


def _client(client: Client) -> dict[str, Any]:
    hello = client.peer.hello
    names = ("column", "pid", "uid", "model", "private_reason")
    return {
        "uuid": hello.client_uuid.hex(),
        "engine": hello.engine_uuid.hex(),
        "role": pb.Role.Name(hello.role).removeprefix("ROLE_").lower(),
        "version": hello.client_version,
        "namespace": hello.namespace.hex(),
        "copier": "engine",
        "copier_reason": client.copier_reason,
        "epoch": client.epoch,
        "is_attached": client.is_attached,
        "prefill_tokens_per_second": client.prefill_tokens_per_second,
    } | {name: getattr(hello, name) for name in names}


def _ratio(hits: int, misses: int) -> float:
    return round(hits / (hits + misses), 4) if hits + misses else 0.0
