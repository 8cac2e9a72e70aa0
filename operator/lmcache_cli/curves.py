"""The curve of one tier from a cluster's status, as text. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from lmcache_operator.api.parse import parse
from lmcache_operator.errors import NoCurveError
from lmcache_operator.specs import Object
from lmcache_store.common.units import format_size, parse_size

TIERS = ("memory", "remote")
_ABOUT = {"samples": "samples", "half-life": "window", "observed": "observedAt"}
_MIN_BARS, _MAX_BARS = 10, 60


class CurveRow(NamedTuple):
    """One size on the curve."""

    size: str
    hit: float
    """Hits in per cent of the looked-up prompt tokens. ``low`` and ``high`` are its 95 % bounds."""
    low: float
    high: float
    net: float
    """Net value in USD per hour, compared with the present size."""

    @property
    def num_bytes(self) -> int:
        """The size in bytes."""
        return parse_size(self.size)


@dataclass(frozen=True)
class Curve:
    """Expected hits and net value for all sizes of one tier."""

    title: str
    about: str
    """Samples, half-life and time of the counts."""
    reason: str
    current: int
    """Present size: bytes of one pod, or of all shards."""
    recommended: int
    points: tuple[CurveRow, ...]
    """Points in ascending order, including the present and the recommended size."""

    @classmethod
    def of(cls, resource: Object, tier: str) -> Self:
        """Read the curve from an LMCacheCluster. Raises InvalidSpecError, or NoCurveError with the reason."""
        metadata, name = resource["metadata"], resource["metadata"]["name"]
        scaling = (resource.get("status") or {}).get("autoscaling")
        if not scaling:
            raise NoCurveError(
                f"{name}: status.autoscaling is empty. The operator fills it some minutes after a sidecar "
                "answers, unless spec.autoscaling.mode is Off"
            )
        try:
            if not (status := scaling.get(tier)):
                raise NoCurveError(f"{name}: its {tier} tier has no curve; available: {_available(scaling)}")
            if not status.get("curve"):
                raise NoCurveError(f"{name}: its {tier} tier has no curve yet: {status.get('reason')}")
            shard_bytes = _shard_bytes(resource) if tier == TIERS[1] else 0
            current, recommended = (_size(status[name], shard_bytes) for name in ("current", "recommended"))
            about = (f"{label} {scaling[field]}" for label, field in _ABOUT.items() if field in scaling)
            points = sorted(map(_point, status["curve"]), key=lambda point: point.num_bytes)
            title = f"{metadata.get('namespace') or 'default'}/{name}: the {tier} tier"
            return cls(title, ", ".join(about), str(status["reason"]), current, recommended, tuple(points))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise NoCurveError(
                f"{name}: status.autoscaling is from another version: {type(error).__name__}: {error}"
            ) from error

    def what_is(self, point: CurveRow) -> str:
        """Return "present", "recommended", both, or nothing."""
        words = {"present": self.current, "recommended": self.recommended}
        return " and ".join(word for word, size in words.items() if size == point.num_bytes)

    def text(self, width: int) -> str:
        """Return the curve as text for a terminal of ``width`` characters."""
        largest = max(point.high for point in self.points) or 1.0
        bars = max(_MIN_BARS, min(_MAX_BARS, width - 59))
        rows = [
            (
                f"{'>' if 'present' in (word := self.what_is(point)) else ' '}{point.size:>8}",
                f"{point.hit:6.1f} %",
                f"{point.low:.1f}-{point.high:.1f}".center(11),
                ("=" * round(bars * point.low / largest))
                .ljust(round(bars * point.high / largest), "-")
                .ljust(bars),
                f"{point.net:+9.3f}",
                word,
            )
            for point in self.points
        ]
        header = ("     size", "    hits", "(sampling) ", " " * bars, "    USD/h", "")
        lines = ["  ".join(row).rstrip() for row in (header, *rows)]
        sentences = textwrap.wrap(self.reason, width)
        return "\n".join([self.title, f"({self.about})", "", *lines, "", *sentences]) + "\n"


def _available(scaling: Mapping[str, Any]) -> str:
    return ", ".join(f"--tier {tier}" for tier in TIERS if scaling.get(tier)) or "none yet"


def _shard_bytes(resource: Object) -> int:
    managed = parse(resource).spec.tiers.managed
    return managed.shard_bytes if managed else 0


def _size(value: Any, shard_bytes: int) -> int:
    """Return a size of the status in bytes. For the remote tier, ``value`` is a number of shards."""
    return parse_size(format_size(value * shard_bytes)) if shard_bytes else parse_size(value)


def _point(values: Mapping[str, Any]) -> CurveRow:
    hit = float(values["hit"])
    low, high = (float(values.get(name, hit)) for name in ("low", "high"))
    return CurveRow(str(values["size"]), 100 * hit, 100 * low, 100 * high, float(values["netPerHour"]))
