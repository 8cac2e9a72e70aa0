"""Rates of a sidecar's work, from two of its reports. Pure.

Reports come from users' pods and are not trusted; see ``merge``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lmcache_store.causes import HITS, LOWER_TIERS, num_computed
from lmcache_store.explain import merge

GROUPS = (*HITS, "computed")
"""Sources of prompt tokens: the caches, the fastest first, and the engine that computed the rest."""
_MIN_SECONDS = 0.1
"""Two reports that are closer in time give no rates."""


class Rates(NamedTuple):
    """Work of one sidecar per second."""

    requests: float
    tokens: Mapping[str, float]
    """Tokens of prompts by group; see `GROUPS`."""
    load_bytes: Mapping[str, float]
    """Bytes by tier. Memory: engines copy them out of it. Others: the sidecar promotes them into memory."""
    write_bytes: Mapping[str, float]
    """Bytes by tier. Memory: engines store them, an estimate from its use and its evictions."""


def rates(before: Mapping[str, Any], after: Mapping[str, Any]) -> Rates | None:
    """Return the rates between two reports of a pod's sidecar; None if they are too close in time.

    If a counter fell, the sidecar restarted. The rates are then those since its start.
    """
    growth = _used_bytes(after) - _used_bytes(before)
    if is_restarted(before, after):
        before, growth = {}, 0.0  # the rows of the former process were not stored again
    seconds = _uptime(after) - _uptime(before)
    if seconds < _MIN_SECONDS:
        return None
    work = {name: (value - _work(before)[name]) / seconds for name, value in _work(after).items()}
    row_bytes, token_bytes = _row_bytes(after), merge.total([after], "lookups", "kv_bytes_per_token")
    promoted = {tier: work[f"promoted {tier}"] * row_bytes for tier in LOWER_TIERS}
    stored = growth / seconds + work["removed"] * row_bytes - sum(promoted.values())
    return Rates(
        requests=work["requests"],
        tokens={group: work[f"tokens {group}"] for group in GROUPS},
        load_bytes={"memory": work["loaded"] * token_bytes, **promoted},
        write_bytes={
            "memory": max(0.0, stored),
            **{tier: work[f"written {tier}"] * row_bytes for tier in LOWER_TIERS},
        },
    )


def is_restarted(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return whether the second report is of another process: its time or one of its counters fell."""
    counted = _work(before)
    is_less = any(value < counted[name] for name, value in _work(after).items())
    return is_less or _uptime(after) < _uptime(before)


def _uptime(report: Mapping[str, Any]) -> float:
    return merge.count(report.get("uptime_seconds"))


def _work(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the counters that rates come from."""
    tokens = merge.totals([report], "causes", "cause_tokens")
    by_group = {**{tier: tokens[tier] for tier in HITS}, "computed": num_computed(tokens)}
    counters: dict[str, float] = {f"tokens {group}": number for group, number in by_group.items()}
    counters["requests"] = merge.total([report], "lookups", "num_lookups")
    counters["loaded"] = merge.totals([report], "lookups", "loaded_tokens").total()
    counters["removed"] = merge.totals([report], "memory", "removed").total()
    for tier in LOWER_TIERS:
        counters[f"promoted {tier}"] = merge.total([report], tier, "promoted")
        counters[f"written {tier}"] = merge.total([report], tier, "written")
    return counters


def _used_bytes(report: Mapping[str, Any]) -> float:
    return merge.total([report], "memory", "used_bytes")


def _row_bytes(report: Mapping[str, Any]) -> float:
    """Return the bytes of a row: the mean of the rows in memory, because rows of KV groups differ in size."""
    num_rows = merge.total([report], "memory", "used_rows")
    return _used_bytes(report) / num_rows if num_rows else merge.total([report], "lookups", "row_bytes")
