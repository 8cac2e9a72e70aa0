"""Line charts as SVG, without a library. Pure."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 720, 300, 70, 36, 44
_RIGHT = _WIDTH - 20
_CAPTION_LETTERS = 105
_COLOURS = ("#1f6feb", "#d9480f", "#2b8a3e", "#862e9c")
_FONT = "font-family='sans-serif' font-size='12'"
Xy = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One line of a chart, with its points in order of x."""

    label: str
    points: Sequence[Xy]
    band: Sequence[tuple[float, float, float]] = ()
    """Error band as (x, low, high)."""
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
    ticks: Sequence[tuple[float, str]]
    """Positions and labels on the x axis."""
    marks: Sequence[Mark] = ()
    is_logarithmic: bool = False
    """Whether the x axis is logarithmic."""


def svg(panels: Sequence[Panel], caption: str) -> str:
    """Draw charts one below the other, and a caption below them."""
    words = textwrap.wrap(caption, _CAPTION_LETTERS)
    height = len(panels) * _HEIGHT + 16 * len(words) + 14
    parts = [part for number, panel in enumerate(panels) for part in _panel(panel, number * _HEIGHT)]
    size = f"width='{_WIDTH}' height='{height}' viewBox='0 0 {_WIDTH} {height}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} {_FONT}>"
    ground = f"<rect width='{_WIDTH}' height='{height}' fill='white'/>"
    foot = [
        f"<text x='10' y='{height - 16 * (len(words) - number) + 4}' fill='#444'>{_text(line)}</text>"
        for number, line in enumerate(words)
    ]
    return "\n".join([head, ground, *parts, *foot, "</svg>", ""])


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


def _panel(panel: Panel, top: float) -> Iterator[str]:
    rows = [(x, y) for line in panel.lines for x, y in line.points]
    rows += [(x, y) for line in panel.lines for x, *ends in line.band for y in ends]
    heights = nice_ticks(min(y for _, y in rows), max(y for _, y in rows))
    left, right = (pick([*(x for x, _ in rows), *(x for x, _ in panel.ticks)]) for pick in (min, max))
    scale = math.log if panel.is_logarithmic else float

    def xy(x: float, y: float) -> str:
        return f"{across(x):.1f},{up(y):.1f}"

    def across(x: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (scale(x) - scale(left)) / ((scale(right) - scale(left)) or 1)

    def up(y: float) -> float:
        bottom = top + _HEIGHT - _BOTTOM
        return bottom - (bottom - top - _TOP) * (y - heights[0]) / (heights[-1] - heights[0])

    yield f"<text x='{_LEFT}' y='{top + 18}' font-weight='bold'>{_text(panel.title)}</text>"
    for y in heights:
        yield f"<path d='M{xy(left, y)} {xy(right, y)}' stroke='#ddd'/>"
        yield f"<text x='{_LEFT - 6}' y='{up(y) + 4:.1f}' text-anchor='end'>{y:g}</text>"
    for x, label in panel.ticks:
        y = up(heights[0]) + 18
        yield f"<text x='{across(x):.1f}' y='{y:.1f}' text-anchor='middle'>{_text(label)}</text>"
    for number, mark in enumerate(panel.marks):
        ends = f"M{xy(mark.x, heights[0])} {xy(mark.x, heights[-1])}"
        yield f"<path d='{ends}' stroke='#888' stroke-dasharray='4 3'/>"
        is_left, y = across(mark.x) > (_LEFT + _RIGHT) / 2, up(heights[-1]) + 12 + 14 * number
        anchor, x = ("end", across(mark.x) - 4) if is_left else ("start", across(mark.x) + 4)
        yield f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='#444'>{_text(mark.label)}</text>"
    for number, line in enumerate(panel.lines):
        colour = _COLOURS[number % len(_COLOURS)]
        if line.band:
            edge = [xy(x, high) for x, _, high in line.band] + [xy(x, low) for x, low, _ in line.band[::-1]]
            yield f"<polygon points='{' '.join(edge)}' fill='{colour}' opacity='0.15'/>"
        path = " ".join(xy(x, y) for x, y in (_stepped(line.points) if line.is_stepped else line.points))
        yield f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'/>"
        x, y = _LEFT + 230 * number, up(heights[0]) + 34
        yield f"<text x='{x}' y='{y:.1f}' fill='{colour}'>{_text(line.label)}</text>"


def _stepped(points: Sequence[Xy]) -> Iterator[Xy]:
    before: float | None = None
    for x, y in points:
        if before is not None:
            yield x, before
        yield x, y
        before = y
