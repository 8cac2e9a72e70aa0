"""Results of a benchmark, and their tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple


@dataclass(frozen=True)
class Figure:
    """One measured figure, with an optional bar that it must hold."""

    what: str
    value: float
    unit: str
    bar: str = ""
    holds: bool | None = None
    low: float | None = None
    high: float | None = None
    """Upper end of the value's 95 % interval, if there are enough samples."""

    def row(self) -> tuple[str, str, str, str]:
        verdict = {True: "yes", False: "NO", None: ""}[self.holds]
        interval = f" ({self.low:.4g}-{self.high:.4g})" if self.low is not None else ""
        return self.what, f"{self.value:.4g}{interval} {self.unit}", self.bar, verdict


@dataclass(frozen=True)
class Report:
    name: str
    conditions: str
    figures: list[Figure]
    series: dict[str, object] = field(default_factory=dict)
    """Measurements over time, as plain values."""
    pictures: dict[str, str] = field(default_factory=dict)
    """SVG pictures by name. Each becomes a file."""

    def to_json(self) -> dict[str, object]:
        return {name: value for name, value in asdict(self).items() if name != "pictures"}


def at_most(what: str, value: float | Ratio, unit: str, limit: float) -> Figure:
    figure = of(what, value, unit)
    return replace(figure, bar=f"<= {limit:g} {unit}", holds=figure.value <= limit)


def at_least(what: str, value: float | Ratio, unit: str, limit: float) -> Figure:
    figure = of(what, value, unit)
    return replace(figure, bar=f">= {limit:g} {unit}", holds=figure.value >= limit)


def of(what: str, value: float | Ratio, unit: str) -> Figure:
    """Return a figure without a bar. In per cent, a ratio counts as a share."""
    if not isinstance(value, Ratio):
        return Figure(what, value, unit)
    scale = 100 if unit == "%" else 1
    return Figure(what, scale * value.median, unit, low=scale * value.low, high=scale * value.high)


class Ratio(NamedTuple):
    """A median of paired ratios with its 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g}-{self.high:.3g})"


def paired(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Return the median ratio of neighbours in time. Other load on the machine cancels out in such ratios.

    The interval follows from order statistics and assumes no distribution of the noise. With fewer than 9
    pairs, it is the range. Raises ValueError for fewer than 6 pairs.
    """
    ratios = sorted(n / d for n, d in zip(numerators, denominators, strict=True))
    number = len(ratios)
    if number < 6:
        raise ValueError(f"{number} pairs give no 95 % interval: at least 6 are needed")
    below, rank = 0.0, 0  # the chance that fewer than `rank` ratios lie below the true median
    while below + math.comb(number, rank) / 2**number <= 0.025:
        below += math.comb(number, rank) / 2**number
        rank += 1
    return Ratio(statistics.median(ratios), ratios[max(0, rank - 1)], ratios[number - max(1, rank)])


def spread(samples: Sequence[float]) -> str:
    """Return ``median (min-max)`` of seconds, in milliseconds."""
    low, mid, high = min(samples), statistics.median(samples), max(samples)
    return f"{mid * 1e3:.1f} ms ({low * 1e3:.1f}-{high * 1e3:.1f})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a plain table whose columns are as wide as their widest cell."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )
