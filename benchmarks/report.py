"""What a benchmark returns, and how it is shown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Figure:
    """One measured figure, with the bar it is held against where there is one."""

    what: str
    value: float
    unit: str
    bar: str = ""
    holds: bool | None = None

    def row(self) -> tuple[str, str, str, str]:
        verdict = {True: "yes", False: "NO", None: ""}[self.holds]
        return self.what, f"{self.value:.4g} {self.unit}", self.bar, verdict


@dataclass(frozen=True)
class Report:
    name: str
    conditions: str
    figures: list[Figure]

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def at_most(what: str, value: float, unit: str, limit: float) -> Figure:
    return Figure(what, value, unit, f"<= {limit:g} {unit}", value <= limit)


def at_least(what: str, value: float, unit: str, limit: float) -> Figure:
    return Figure(what, value, unit, f">= {limit:g} {unit}", value >= limit)


def spread(samples: Sequence[float]) -> str:
    """``median (min-max)`` of seconds, in milliseconds."""
    low, mid, high = min(samples), statistics.median(samples), max(samples)
    return f"{mid * 1e3:.1f} ms ({low * 1e3:.1f}-{high * 1e3:.1f})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table, columns as wide as their widest cell."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )
