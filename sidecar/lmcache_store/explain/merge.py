"""Adds up what several sidecars report. Pure.

Reports come from users' pods and are not trusted: values of a wrong type count as nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from lmcache_store.common.text import plain

_MAX_BRANCHES = 10
_MAX_COUNT = 1 << 63


def part(report: Any, *path: str) -> Mapping[str, Any]:
    """Return the object at a path of a report; empty if there is none."""
    for name in path:
        report = report.get(name) if isinstance(report, Mapping) else None
    return report if isinstance(report, Mapping) else {}


def count(value: Any) -> float:
    """Return a number that a sidecar reports; 0 for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and 0 <= value < _MAX_COUNT else 0


def total(reports: Iterable[Any], *path: str) -> float:
    """Return the sum of one figure over all reports. ``path`` names the parts and the figure."""
    return sum(count(part(report, *path[:-1]).get(path[-1])) for report in reports)


def sums(reports: Iterable[Any], *path: str) -> dict[str, float]:
    """Return the sums of figures by label over all reports. ``path`` names the parts."""
    by_label: dict[str, float] = {}
    for report in reports:
        for label, value in part(report, *path).items():
            if isinstance(label, str) and count(value):
                by_label[label] = by_label.get(label, 0) + count(value)
    return by_label


def totals(reports: Iterable[Any], *path: str) -> Counter[str]:
    """Return the same as ``sums``, for whole numbers."""
    return Counter({label: int(value) for label, value in sums(reports, *path).items() if value >= 1})


def reasons(reports: Iterable[Any], *path: str) -> list[str]:
    """Return the different texts of a field. ``path`` names the parts and the field."""
    return sorted({plain(part(report, *path[:-1]).get(path[-1])) for report in reports} - {""})


def causes(reports: Iterable[Any], *path: str) -> dict[str, Any]:
    """Return the part ``causes`` of all reports together, as one sidecar would report it.

    ``path`` names a part with the same counters; empty: ``causes``.
    """
    parts = [part(report, *(path or ("causes",))) for report in reports]
    merged: dict[str, Any] = {"prompt_tokens": int(total(parts, "prompt_tokens"))}
    for name in ("cause_tokens", "diverged_requests", "diverged_tokens"):
        merged[name] = dict(totals(parts, name))
    merged["branches"] = _branches(parts)
    return merged


def _branches(parts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the prefixes after which most tokens were computed. Pods can share a prefix."""
    found: dict[str, dict[str, Any]] = {}
    for counted in parts:
        listed = counted.get("branches")
        for branch in listed[:_MAX_BRANCHES] if isinstance(listed, list) else ():
            prefix = branch.get("prefix") if isinstance(branch, Mapping) else None
            if not isinstance(prefix, str):
                continue
            new = {"prefix": prefix, "depth_tokens": 0, "num_requests": 0, "num_tokens": 0}
            known = found.setdefault(prefix, new)
            known["depth_tokens"] = max(known["depth_tokens"], int(count(branch.get("depth_tokens"))))
            for name in ("num_requests", "num_tokens"):
                known[name] += int(count(branch.get(name)))
    return sorted(found.values(), key=lambda branch: -branch["num_tokens"])[:_MAX_BRANCHES]
