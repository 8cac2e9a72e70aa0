"""Pictures of dashboards: panels with recorded answers of Prometheus, as SVG.

The colours and the grid are those of Grafana. Panels have only the parts that the dashboards use.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from tools.pictures.boards import Board, Panel

_GROUND, _PANEL, _INK, _LINE = "#111217", "#181b1f", "#d8d9e4", "#33363c"
_COLOURS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#c8f2c2")
_COLUMN_INCHES, _ROW_INCHES = 0.5, 0.3
_COLUMNS = 24
_TICK_SECONDS = 60
_BYTES, _RATES = (" B", " KiB", " MiB", " GiB"), (" B/s", " kB/s", " MB/s", " GB/s")
_NUMBERS = "", " k", " M", " G"
_DECIMALS, _TRAILING = re.compile(r"(\d\.\d\d)\d+"), re.compile(r"[ \t]+$", re.MULTILINE)
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it is smaller, and readers can search it
    "svg.hashsalt": "lmcache",
    "font.size": 8,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.facecolor": _PANEL,
    "axes.edgecolor": _LINE,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _LINE,
    "path.simplify_threshold": 0.5,
}


class Series(NamedTuple):
    """One line of a panel."""

    name: str
    times: list[float]
    values: list[float]


def drawn(board: Board, answers: Mapping[str, Any], num_rows: int) -> str:
    """Return a picture of the first rows of a dashboard's grid. ``answers``: recorded, by panel and query."""
    panels = board.first(num_rows)
    rows = max(panel.y + panel.height for panel in panels)
    series = {panel.title: list(_series(board, panel, answers)) for panel in panels}
    lines = [line for panel in panels if panel.kind == "timeseries" for line in series[panel.title]]
    span = min(line.times[0] for line in lines), max(line.times[-1] for line in lines)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_COLUMNS * _COLUMN_INCHES, rows * _ROW_INCHES), facecolor=_GROUND)
        for panel in panels:
            _draw(figure, panel, series[panel.title], rows, span)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Title": board.title})
    short = _DECIMALS.sub(r"\1", file.getvalue())
    return _TRAILING.sub("", short)


def _series(board: Board, panel: Panel, answers: Mapping[str, Any]) -> Iterator[Series]:
    for target in panel.targets:
        for line in answers[f"{board.name}/{panel.title}/{target['refId']}"]:
            times, values = zip(*line["values"], strict=True)
            yield Series(panel.legend(target["refId"], line["labels"]), list(times), list(map(float, values)))


def _draw(
    figure: Figure, panel: Panel, series: Sequence[Series], rows: int, span: tuple[float, float]
) -> None:
    """Draw one panel into its place on the grid. ``span``: first and last time of all panels."""
    left, top = panel.x / _COLUMNS, 1 - panel.y / rows
    width, height = panel.width / _COLUMNS, panel.height / rows
    place = (left + 0.003, top - height + 0.008, width - 0.006, height - 0.016)
    frame = figure.add_axes(place, xticks=[], yticks=[])
    frame.set_title(panel.title, loc="left", fontsize=9, y=1, pad=-12, x=0.015, fontweight="bold")
    if panel.kind == "stat":
        text = formatted(series[0].values[-1], panel.unit) if series else "No data"
        frame.text(0.5, 0.4, text, fontsize=24, color=_COLOURS[0], ha="center", va="center")
        return
    is_bars = panel.kind == "bargauge"
    margin = width * (0.3 if is_bars else 0.11)  # for names of bars, or for values
    inside = (left + margin, top - height * 0.8, width - margin - 0.015, height * 0.62)
    axes = figure.add_axes(inside)
    if is_bars:
        _draw_bars(axes, panel, series)
    else:
        _draw_lines(axes, panel, series, span)


def _draw_lines(axes: Axes, panel: Panel, series: Sequence[Series], span: tuple[float, float]) -> None:
    """Draw each series over the time since the begin of the span."""
    begin, end = span
    axes.grid(linewidth=0.5)
    colours = [_COLOURS[number % len(_COLOURS)] for number in range(len(series))]
    if panel.is_stacked:
        times = sorted({time for line in series for time in line.times})
        known = [dict(zip(line.times, line.values, strict=True)) for line in series]
        stacks = [[values.get(time, 0.0) for time in times] for values in known]
        axes.stackplot([time - begin for time in times], stacks, colors=colours, alpha=0.7,
                       labels=[line.name for line in series])  # fmt: skip
    else:
        for line, colour in zip(series, colours, strict=True):
            times = [time - begin for time in line.times]
            axes.plot(times, line.values, color=colour, label=line.name, linewidth=1.2)
    axes.set_xlim(0, end - begin)
    axes.xaxis.set_major_locator(MultipleLocator(_TICK_SECONDS))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds // 60:.0f}:{seconds % 60:02.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: formatted(value, panel.unit))
    if series:
        axes.legend(loc="upper left", bbox_to_anchor=(-0.1, -0.13), ncols=5, frameon=False, fontsize=7,
                    handlelength=1, columnspacing=1)  # fmt: skip


def _draw_bars(axes: Axes, panel: Panel, series: Sequence[Series]) -> None:
    """Draw the latest value of each series as a bar, the largest at the top."""
    ordered = sorted(series, key=lambda line: line.values[-1])
    names, values = [line.name for line in ordered], [line.values[-1] for line in ordered]
    bars = axes.barh(names, values, color=_COLOURS[0], height=0.6)
    axes.bar_label(bars, [formatted(value, panel.unit) for value in values], padding=4)
    axes.margins(x=0.15)
    axes.set_ylim(-0.5, max(len(values), 4) - 0.5)
    axes.set_xticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def formatted(value: float, unit: str) -> str:
    """Return a value as Grafana writes it."""
    match unit:
        case "percentunit":
            return f"{value * 100:.3g}%"
        case "currencyUSD":
            return f"${value:.2f}"
        case "s":
            return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"
        case "bytes":
            return _scaled(value, 1024, _BYTES)
        case "Bps":
            return _scaled(value, 1000, _RATES)
        case _:
            return _scaled(value, 1000, _NUMBERS)


def _scaled(value: float, factor: int, units: Sequence[str]) -> str:
    index = 0
    while abs(value) >= factor and index < len(units) - 1:
        value, index = value / factor, index + 1
    return f"{value:.3g}{units[index]}"
