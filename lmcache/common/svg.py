"""Line charts as SVG, without a library. Pure."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from itertools import groupby
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 720, 300, 70, 36, 44
_MARGIN, _LINE, _LETTER = 20, 16, 6.5
"""Pixels: empty space at the right, height of a line of text, and width of a letter."""
_COLOURS = ("#1f6feb", "#d9480f", "#2b8a3e", "#862e9c", "#0b7285", "#a61e4d", "#5c940d", "#868e96")
_FONT = "font-family='sans-serif' font-size='12'"
_DAY_SECONDS = 86400
_TIME_STEPS = ((60, (1, 2, 5, 10, 15, 30)), (3600, (1, 2, 3, 6, 12)), (_DAY_SECONDS, (1, 2, 7, 14, 30, 90)))
"""Seconds between labels of a time axis: units with their numbers."""
Xy = tuple[float, float]
Tick = tuple[float, str]


@dataclass(frozen=True)
class Line:
    """One line of a chart, with its points in order of x. A y that is no number interrupts the line."""

    label: str
    points: Sequence[Xy]
    band: Sequence[tuple[float, float, float]] = ()
    """Error band, or the area of a stacked chart, as (x, low, high)."""
    opacity: float = 0.15
    """Opacity of the band: 1 hides what is behind it."""
    colour: int | None = None
    """Number of the line's colour, from 0 to 7; None: the line's position in the chart."""
    is_stepped: bool = False
    """Whether a value holds until the next one."""


@dataclass(frozen=True)
class Mark:
    """A vertical line with a label."""

    x: float
    label: str


@dataclass(frozen=True)
class Panel:
    """One chart."""

    title: str
    lines: Sequence[Line]
    ticks: Sequence[Tick]
    """Positions and labels on the x axis."""
    marks: Sequence[Mark] = ()
    is_logarithmic: bool = False
    """Whether the x axis is logarithmic."""


def time_ticks(start: float, end: float, max_ticks: int = 8) -> list[Tick]:
    """Return round times (UTC) within a range of seconds since 1970, with labels for the x axis."""
    steps = [step * unit for unit, numbers in _TIME_STEPS for step in numbers]
    step = next((step for step in steps if (end - start) / step <= max_ticks), steps[-1])
    form = "%H:%M" if step < _DAY_SECONDS else "%b %d"
    times = [step * number for number in range(math.ceil(start / step), math.floor(end / step) + 1)]
    return [(float(time), datetime.fromtimestamp(time, timezone.utc).strftime(form)) for time in times]


def svg(panels: Sequence[Panel], caption: str, *, width: int = _WIDTH) -> str:
    """Draw charts one below the other, and a caption below them. ``width`` is in pixels.

    Elements have classes, so that a page can change their colours: ground, grid, note, and series0, series1
    and so on.
    """
    words = textwrap.wrap(caption, int((width - _MARGIN) / _LETTER))
    parts: list[str] = []
    top = 0
    for panel in panels:
        parts += _panel(panel, top, width)
        top += _height(panel, width)
    height = top + _LINE * len(words) + 14
    size = f"width='{width}' height='{height}' viewBox='0 0 {width} {height}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} {_FONT}>"
    ground = f"<rect class='ground' width='{width}' height='{height}' fill='white'/>"
    foot = [
        f"<text class='note' x='10' y='{height - _LINE * (len(words) - number) + 4}' fill='#444'>"
        f"{_text(line)}</text>"
        for number, line in enumerate(words)
    ]
    return "\n".join([head, ground, *parts, *foot, "</svg>", ""])


def _legend(panel: Panel, width: int) -> tuple[int, int]:
    """Return how many labels stand next to each other below a chart, and the pixels that each may take."""
    pixels = int(_LETTER * max((len(line.label) for line in panel.lines), default=0)) + _MARGIN
    return max(1, (width - _MARGIN - _LEFT) // pixels), pixels


def _height(panel: Panel, width: int) -> int:
    """Return the pixels that a chart takes, with all of its labels."""
    return _HEIGHT + _LINE * (math.ceil(len(panel.lines) / _legend(panel, width)[0]) - 1)


def _text(words: str) -> str:
    """Escape text for XML, without the control characters that XML forbids even if they are escaped."""
    return escape("".join(letter for letter in words if letter.isprintable()))


def nice_ticks(low: float, high: float) -> list[float]:
    """Return two to ten round numbers that enclose the range."""
    span = max(high - low, 1e-3 * abs(high), 1e-9)
    step = 10.0 ** math.floor(math.log10(span))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if span / s <= 8)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


class _Frame:
    """The axes of one chart: from values to pixels."""

    def __init__(self, panel: Panel, top: int, width: int) -> None:
        points = [(x, y) for line in panel.lines for x, y in line.points]
        points += [(x, y) for line in panel.lines for x, *ends in line.band for y in ends]
        heights = [y for _, y in points if math.isfinite(y)] or [0.0]
        places = [*(x for x, _ in points), *(x for x, _ in panel.ticks)] or [1.0]
        self.heights = nice_ticks(min(heights), max(heights))
        self.left, self.right = min(places), max(places)
        self.top, self.bottom = top + _TOP, top + _HEIGHT - _BOTTOM
        self._scale = math.log if panel.is_logarithmic else float
        self._pixels = width - _MARGIN - _LEFT

    def across(self, x: float) -> float:
        """Return the pixel of a value on the x axis."""
        low, high = self._scale(self.left), self._scale(self.right)
        return _LEFT + self._pixels * (self._scale(x) - low) / ((high - low) or 1)

    def up(self, y: float) -> float:
        """Return the pixel of a value on the y axis."""
        low, high = self.heights[0], self.heights[-1]
        return self.bottom - (self.bottom - self.top) * (y - low) / (high - low)

    def xy(self, x: float, y: float) -> str:
        """Return both pixels of a point."""
        return f"{self.across(x):.1f},{self.up(y):.1f}"


def _panel(panel: Panel, top: int, width: int) -> Iterator[str]:
    frame = _Frame(panel, top, width)
    yield f"<text x='10' y='{top + 18}' font-weight='bold'>{_text(panel.title)}</text>"
    yield from _axes(panel, frame)
    in_line, pixels = _legend(panel, width)
    for number, line in enumerate(panel.lines):
        chosen = (number if line.colour is None else line.colour) % len(_COLOURS)
        colour, series = _COLOURS[chosen], f"class='series{chosen}'"
        for band in _runs(line.band):
            edge = [frame.xy(x, high) for x, _, high in band] + [frame.xy(x, low) for x, low, _ in band[::-1]]
            paint = f"fill='{colour}' opacity='{line.opacity:g}'"
            yield f"<polygon {series} points='{' '.join(edge)}' {paint}/>"
        for run in _runs(list(_stepped(line.points)) if line.is_stepped else line.points):
            path = " ".join(frame.xy(x, y) for x, y in run)
            yield f"<polyline {series} points='{path}' fill='none' stroke='{colour}' stroke-width='2'/>"
        x = _LEFT + pixels * (number % in_line)
        y = frame.bottom + 34 + _LINE * (number // in_line)
        yield f"<text {series} x='{x}' y='{y}' fill='{colour}'>{_text(line.label)}</text>"


def _axes(panel: Panel, frame: _Frame) -> Iterator[str]:
    """Draw the grid, the labels of both axes, and the marks."""
    for y in frame.heights:
        ends = f"M{frame.xy(frame.left, y)} {frame.xy(frame.right, y)}"
        yield f"<path class='grid' d='{ends}' stroke='#ddd'/>"
        yield f"<text x='{_LEFT - 6}' y='{frame.up(y) + 4:.1f}' text-anchor='end'>{_short(y)}</text>"
    end = -math.inf
    for x, label in panel.ticks:
        middle, half = frame.across(x), _LETTER * len(label) / 2
        if middle - half > end:  # a label that would overlap the one before it is left out
            end = middle + half + _LETTER
            y = frame.bottom + 18
            yield f"<text x='{middle:.1f}' y='{y:.1f}' text-anchor='middle'>{_text(label)}</text>"
    for number, mark in enumerate(panel.marks):
        ends = f"M{frame.xy(mark.x, frame.heights[0])} {frame.xy(mark.x, frame.heights[-1])}"
        yield f"<path class='mark' d='{ends}' stroke='#888' stroke-dasharray='4 3'/>"
        is_left, y = (
            2 * frame.across(mark.x) > sum(map(frame.across, (frame.left, frame.right))),
            12 + 14 * number,
        )
        anchor, x = ("end", frame.across(mark.x) - 4) if is_left else ("start", frame.across(mark.x) + 4)
        place = f"x='{x:.1f}' y='{frame.top + y:.1f}' text-anchor='{anchor}'"
        yield f"<text class='note' {place} fill='#444'>{_text(mark.label)}</text>"


def _short(value: float) -> str:
    """Return a number for an axis, such as "20k"."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            return f"{value / (1e3 if unit == 'k' else factor):g}{unit}"
    return f"{value:g}"


def _runs(points: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Split points where a value is no number."""
    for is_number, run in groupby(points, lambda point: all(map(math.isfinite, point))):
        if is_number:
            yield list(run)


def _stepped(points: Sequence[Xy]) -> Iterator[Xy]:
    before: float | None = None
    for x, y in points:
        if before is not None:
            yield x, before
        yield x, y
        before = y
