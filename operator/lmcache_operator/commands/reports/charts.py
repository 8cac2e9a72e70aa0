"""Pictures of a history: prompt tokens, causes and tiers over time. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from lmcache.common.svg import Line, Panel, svg, time_ticks
from lmcache.explain.causes import HITS
from lmcache_operator.commands.reports.history import History, Values
from lmcache_operator.commands.reports.html import Html

WIDTH = 420
"""Pixels of a picture. Two stand next to each other, and one is readable on a phone."""
_GREY = 7
_OPACITY = 0.75
_MAX_CAUSES = 6
_UNITS = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))


def pictures(history: History) -> list[Html]:
    """Return one picture for each question about the past."""
    times, tokens = history.times, history.tokens
    panels = []
    if any(map(_has_value, tokens.values())):
        hits = {title: tokens[cause] for cause, title in HITS.items() if cause in tokens}
        computed = {cause: values for cause, values in tokens.items() if cause not in HITS}
        colours = [number for number, cause in enumerate(HITS) if cause in tokens]
        stacked = {**hits, **({"computed": _sums(list(computed.values()))} if computed else {})}
        panels.append(_stacked("Prompt tokens per second, by source", times, stacked, [*colours, _GREY]))
        causes = _largest(computed)
        if any(map(_has_value, causes.values())):
            colours = [*range(len(causes) - ("other" in causes)), _GREY]
            panels.append(_stacked("Computed tokens per second, by cause", times, causes, colours))
    panels += [_tier(history, name, number) for number, name in enumerate(HITS) if name in history.used]
    return [picture(panel) for panel in panels]


def picture(*panels: Panel, caption: str = "") -> Html:
    """Draw charts. All texts in them are escaped."""
    return Html(svg(panels, caption, width=WIDTH))


def _has_value(values: Values) -> bool:
    return any(math.isfinite(value) and value > 0 for value in values)


def _sums(series: Sequence[Values]) -> Values:
    """Add up series at each time. A value that is missing counts as 0, unless all are missing."""
    return [
        math.nan if all(map(math.isnan, values)) else sum(value for value in values if math.isfinite(value))
        for values in zip(*series, strict=True)
    ]


def _largest(causes: Mapping[str, Values]) -> dict[str, Values]:
    """Return the causes with most tokens, by their names, and the sum of all others."""
    totals = {cause: sum(filter(math.isfinite, values)) for cause, values in causes.items()}
    ordered = sorted((cause for cause in causes if totals[cause] > 0), key=lambda cause: -totals[cause])
    largest = {cause.replace("_", " "): causes[cause] for cause in ordered[:_MAX_CAUSES]}
    smallest = [causes[cause] for cause in ordered[_MAX_CAUSES:]]
    return {**largest, "other": _sums(smallest)} if smallest else largest


def _stacked(title: str, times: Values, series: Mapping[str, Values], colours: Sequence[int]) -> Panel:
    """Stack series on each other: each area is as high as its series."""
    is_known = [any(map(math.isfinite, values)) for values in zip(*series.values(), strict=True)]
    filled = [[value if math.isfinite(value) else 0.0 for value in values] for values in series.values()]
    edges = list(accumulate(filled, _added, initial=[0.0 if known else math.nan for known in is_known]))
    lines = [
        Line(label, list(zip(times, high, strict=True)), list(zip(times, low, high, strict=True)),
            opacity=_OPACITY, colour=colour)
        for label, low, high, colour in zip(series, edges, edges[1:], colours, strict=False)
    ]  # fmt: skip
    return Panel(title, lines, time_ticks(times[0], times[-1]))


def _added(first: Values, second: Values) -> list[float]:
    return [left + right for left, right in zip(first, second, strict=True)]


def _tier(history: History, name: str, colour: int) -> Panel:
    used, size = history.used[name], history.sizes.get(name, ())
    largest = max(filter(math.isfinite, (*used, *size)), default=0.0)
    unit, factor = next((unit for unit in _UNITS if largest >= unit[1]), _UNITS[-1])
    points = [(time, value / factor) for time, value in zip(history.times, used, strict=True)]
    area = [(time, 0.0, value) for time, value in points]
    lines = [Line("in use", points, area, opacity=0.3, colour=colour)]
    if size:
        sizes = [(time, value / factor) for time, value in zip(history.times, size, strict=True)]
        lines.append(Line("size", sizes, is_stepped=True, colour=_GREY))
    return Panel(
        f"{HITS[name].capitalize()} of all pods, in {unit}", lines, time_ticks(*_ends(history.times))
    )


def _ends(times: Values) -> tuple[float, float]:
    return times[0], times[-1]
