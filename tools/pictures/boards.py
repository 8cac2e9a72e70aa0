"""The chart's dashboards, as Grafana reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tools.pictures import ROOT

_FOLDER = ROOT / "charts" / "lmcache-operator" / "files" / "dashboards"
_VARIABLE = re.compile(r"\$(?:([a-z_]\w*)|\{(\w+)\})")
_LABEL = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True)
class Panel:
    """One panel with its place on the grid of the dashboard."""

    kind: str
    title: str
    unit: str
    is_stacked: bool
    x: int
    y: int
    width: int
    height: int
    targets: list[dict[str, Any]]

    def queries(self, values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Yield the letter of each query, and the query with ``values`` for its variables."""
        for target in self.targets:
            yield target["refId"], _VARIABLE.sub(lambda match: values[match[1] or match[2]], target["expr"])

    def legend(self, letter: str, labels: Mapping[str, str]) -> str:
        """Return the name of a series."""
        (template,) = (target["legendFormat"] for target in self.targets if target["refId"] == letter)
        return _LABEL.sub(lambda match: labels.get(match[1], ""), template)


@dataclass(frozen=True)
class Board:
    """A dashboard."""

    name: str
    title: str
    panels: list[Panel]
    defaults: dict[str, str]
    """Values of the variables that users can type, such as the price of a GPU hour."""

    def first(self, num_rows: int) -> list[Panel]:
        """Return the panels in the first rows of the grid."""
        return [panel for panel in self.panels if panel.y + panel.height <= num_rows]


def load(name: str) -> Board:
    """Read a dashboard of the chart."""
    content = json.loads((_FOLDER / f"{name}.json").read_text())
    typed = [each for each in content["templating"]["list"] if each["type"] == "textbox"]
    panels = [_panel(panel) for panel in content["panels"] if panel["type"] != "row"]
    return Board(name, content["title"], panels, {each["name"]: each["query"] for each in typed})


def _panel(panel: dict[str, Any]) -> Panel:
    place, defaults = panel["gridPos"], panel["fieldConfig"]["defaults"]
    return Panel(
        kind=panel["type"],
        title=panel["title"],
        unit=defaults["unit"],
        is_stacked=bool(defaults.get("custom")),
        x=place["x"],
        y=place["y"],
        width=place["w"],
        height=place["h"],
        targets=panel["targets"],
    )
