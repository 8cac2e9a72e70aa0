"""The curve of a cluster's cache tier, as its status has it: as text, and as a picture. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from lmcache.units import format_size, parse_size
from lmcache_operator.api.parse import parse
from lmcache_operator.errors import NoCurveError
from lmcache_operator.pictures import Line, Mark, Panel, svg
from lmcache_operator.specs import Object

TIERS = ("memory", "remote")
_ABOUT = {"samples": "samples", "half-life": "window", "observed": "observedAt"}
_FEWEST_BARS, _MOST_BARS = 10, 60


class Point(NamedTuple):
    """One size."""

    size: str
    hit: float
    """Per cent of the prompt tokens that were looked up; so are ``low`` and ``high``: 95 % sampling error."""
    low: float
    high: float
    net: float
    """USD per hour that it is worth more than the present size."""

    @property
    def num_bytes(self) -> int:
        """Of one copy."""
        return parse_size(self.size)


@dataclass(frozen=True)
class Curve:
    """What is known of all sizes of one tier."""

    title: str
    about: str
    """What it was counted from."""
    reason: str
    current: int
    """Bytes: of one pod, or of all shards."""
    recommended: int
    points: tuple[Point, ...]
    """Ascending; the present and the recommended size are among them."""

    @classmethod
    def of(cls, resource: Object, tier: str) -> Self:
        """Read an LMCacheCluster's status. Raises InvalidSpecError, and NoCurveError with the reason."""
        metadata, name = resource["metadata"], resource["metadata"]["name"]
        found = (resource.get("status") or {}).get("autoscaling")
        if not found:
            raise NoCurveError(
                f"{name}: status.autoscaling is empty: the operator fills it from what sidecars count, "
                "but not with `autoscaling: {mode: Off}`, in its first minutes, or while no sidecar answers"
            )
        try:
            if not (own := found.get(tier)):
                raise NoCurveError(f"{name}: its {tier} tier is not sized; there is {_sized(found)}")
            if not own.get("curve"):
                raise NoCurveError(f"{name}: nothing is known of its {tier} tier yet: {own.get('reason')}")
            shard_bytes = _shard_bytes(resource) if tier == TIERS[1] else 0
            current, recommended = (_size(own[name], shard_bytes) for name in ("current", "recommended"))
            about = (f"{what} {found[field]}" for what, field in _ABOUT.items() if field in found)
            points = sorted(map(_point, own["curve"]), key=lambda point: point.num_bytes)
            title = f"{metadata.get('namespace') or 'default'}/{name}: the {tier} tier"
            return cls(title, ", ".join(about), str(own["reason"]), current, recommended, tuple(points))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise NoCurveError(
                f"{name}: status.autoscaling is of another version: {type(error).__name__}: {error}"
            ) from error

    def what_is(self, point: Point) -> str:
        """Which of all sizes it is."""
        words = {"present": self.current, "recommended": self.recommended}
        return " and ".join(word for word, size in words.items() if size == point.num_bytes)

    def text(self, width: int) -> str:
        """For a terminal that is so many characters wide."""
        most = max(point.high for point in self.points) or 1.0
        bars = max(_FEWEST_BARS, min(_MOST_BARS, width - 59))
        rows = [
            (
                f"{'>' if 'present' in (word := self.what_is(point)) else ' '}{point.size:>8}",
                f"{point.hit:6.1f} %",
                f"{point.low:.1f}-{point.high:.1f}".center(11),
                ("=" * round(bars * point.low / most))
                .ljust(round(bars * point.high / most), "-")
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

    def picture(self) -> str:
        """As SVG: hits, and below them money, over the size."""
        ticks = [(float(point.num_bytes), point.size) for point in self.points if not self.what_is(point)]
        marks = [
            Mark(point.num_bytes, f"{word}: {point.size}")
            for point in self.points
            if (word := self.what_is(point))
        ]
        hits = Line(
            "hits, and their sampling error (95 %)",
            [(point.num_bytes, point.hit) for point in self.points],
            [(point.num_bytes, point.low, point.high) for point in self.points],
        )
        net = Line("compared with the present size", [(point.num_bytes, point.net) for point in self.points])
        titles = {f"{self.title}, hits in % of prompt tokens": hits, "worth in USD per hour": net}
        panels = [Panel(title, [line], ticks, marks, is_logarithmic=True) for title, line in titles.items()]
        return svg(panels, self.reason)


def _sized(found: Mapping[str, Any]) -> str:
    return ", ".join(f"--tier {tier}" for tier in TIERS if found.get(tier)) or "none yet"


def _shard_bytes(resource: Object) -> int:
    managed = parse(resource).spec.tiers.managed
    return managed.shard_bytes if managed else 0


def _size(said: Any, shard_bytes: int) -> int:
    """The remote tier's is a number of shards."""
    return parse_size(format_size(said * shard_bytes)) if shard_bytes else parse_size(said)


def _point(values: Mapping[str, Any]) -> Point:
    hit = float(values["hit"])
    low, high = (float(values.get(name, hit)) for name in ("low", "high"))
    return Point(str(values["size"]), 100 * hit, 100 * low, 100 * high, float(values["netPerHour"]))
