"""The present work of several sidecars, as plain data that programs may read. Pure.

Rates come from two reports of a sidecar. Reports come from users' pods and are not trusted; see ``merge``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lmcache_store.causes import HITS, LOWER_TIERS, TIERS, num_computed
from lmcache_store.common.text import plain
from lmcache_store.explain import merge

VERSION = 1
"""Version of the data; a change of the meaning of a field increases it."""

GROUPS = (*HITS, "computed")
"""Sources of prompt tokens: the caches, the fastest first, and the engine that computed the rest."""
_MIN_SECONDS = 0.1
"""Two reports that are closer in time give no rates."""


class SidecarAnswer(NamedTuple):
    """Answer of one sidecar."""

    key: str
    """Identifies the pod, also from a later pod with the same name."""
    name: str
    cluster: str
    report: Mapping[str, Any] = {}
    """/stats; empty if the sidecar did not answer."""
    problem: str = ""
    """Why there is no answer; empty: there is one."""


def pod_figures(first: Iterable[SidecarAnswer], second: Iterable[SidecarAnswer]) -> list[dict[str, Any]]:
    """Return the figures of each pod of the second reading, with its rates since the first reading."""
    before = {answer.key: answer.report for answer in first}
    return [_pod(before.get(answer.key), answer) for answer in second]


def _pod(before: Mapping[str, Any] | None, answer: SidecarAnswer) -> dict[str, Any]:
    report = answer.report
    present = rates(before, report) if before and report else None
    return {
        "cluster": answer.cluster,
        "name": answer.name,
        "problem": plain(answer.problem) or _problem(report),
        "uptimeSeconds": merge.count(report.get("uptime_seconds")),
        **_shown_rates(present),
        "queuedLoads": _queued(report, "num_queued_loads"),
        "queuedWrites": _queued(report, "num_queued_writes"),
        "unwrittenRows": int(merge.count(report.get("num_unwritten_rows"))),
        "tiers": [_tier(tier, report, present) for tier in TIERS if merge.part(report, tier)],
    }


def _queued(report: Mapping[str, Any], field: str) -> int:
    return int(sum(merge.total([report], tier, field) for tier in LOWER_TIERS))


def _shown_rates(present: Rates | None) -> dict[str, Any]:
    """Return the rates of a pod; None for each that is not known (yet)."""
    if present is None:
        return {"requestsPerSecond": None, "tokensPerSecond": None}
    tokens = {group: round(number, 2) for group, number in present.tokens.items()}
    return {"requestsPerSecond": round(present.requests, 3), "tokensPerSecond": tokens}


def _tier(name: str, report: Mapping[str, Any], present: Rates | None) -> dict[str, Any]:
    tier = merge.part(report, name)
    is_off = tier.get("is_reachable") is False
    return {
        "name": name,
        "loadBytesPerSecond": round(present.load_bytes[name]) if present else None,
        "writeBytesPerSecond": round(present.write_bytes[name]) if present else None,
        "measuredLoadBytesPerSecond": merge.count(tier.get("load_bytes_per_second")),
        "queuedLoads": int(merge.count(tier.get("num_queued_loads"))),
        "queuedWrites": int(merge.count(tier.get("num_queued_writes"))),
        "isCircuitOpen": is_off,
        "problem": plain(tier.get("off_reason")) or "unavailable" if is_off else "",
    }


def _problem(report: Mapping[str, Any]) -> str:
    """Return why a sidecar that answers does not work; empty if it works."""
    if report.get("is_ready") is not True:
        return plain(report.get("not_ready_reason")) or "the sidecar is not ready"
    return ""


def total(pods: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums over all pods."""
    counted = [pod for pod in pods if pod["tokensPerSecond"] is not None]
    by_group = {group: sum(pod["tokensPerSecond"][group] for pod in counted) for group in GROUPS}
    return {
        "pods": len(counted),
        "requestsPerSecond": round(sum(pod["requestsPerSecond"] for pod in counted), 3),
        "tokensPerSecond": {group: round(number, 2) for group, number in by_group.items()},
    }


def tiers(pods: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the sums by tier over all pods that have the tier."""
    listed = list(pods)
    return [
        _tier_total(name, having)
        for name in TIERS
        if (having := [tier for pod in listed for tier in pod["tiers"] if tier["name"] == name])
    ]


def _tier_total(name: str, having: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sums = ("loadBytesPerSecond", "writeBytesPerSecond", "queuedLoads", "queuedWrites")
    problems = [tier["problem"] for tier in having if tier["isCircuitOpen"]]
    return {
        "name": name,
        **{field: sum(tier[field] or 0 for tier in having) for field in sums},
        "pods": len(having),
        "openCircuits": len(problems),
        "problem": problems[0] if problems else "",
    }


def document(
    pods: Sequence[Mapping[str, Any]], *, time: str, seconds: float, problems: Sequence[str]
) -> dict[str, Any]:
    """Return everything as plain data. Its fields are stable.

    Args:
        pods: figures as `pod_figures` returns them.
        time: time of the answers (RFC 3339).
        seconds: wanted seconds between the answers.
        problems: what could not be read, with what to do.
    """
    return {
        "version": VERSION,
        "time": time,
        "intervalSeconds": seconds,
        "total": total(pods),
        "tiers": tiers(pods),
        "pods": list(pods),
        "problems": list(problems),
    }


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
