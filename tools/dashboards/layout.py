"""Panels, variables and dashboards, and their JSON in Grafana's format.

Queries use a short form. ``...`` in a selector stands for the matchers of the dashboard's variables:
``lmcache_ready{...}`` becomes ``lmcache_ready{namespace=~"$namespace", lmcache_io_cluster=~"$cluster"}``. For
metrics of the operator, the label of the cluster's name is ``name``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

_COLUMNS = 24
_DATASOURCE = {"type": "prometheus", "uid": "${source}"}
_SELECTOR = re.compile(r"\b(lmcache_\w+)\{\.\.\.")

Kind = Literal["timeseries", "stat", "bargauge", "table"]


@dataclass(frozen=True)
class Query:
    """One query of a panel, in the short form."""

    expr: str
    legend: str = ""
    """Grafana's template of the legend. In a table, the name of the value's column."""

    @property
    def promql(self) -> str:
        """The query in Grafana's form, with variables."""
        return _SELECTOR.sub(_with_matchers, " ".join(self.expr.split()))


def _with_matchers(match: re.Match[str]) -> str:
    cluster = "name" if match[1].startswith("lmcache_operator_") else "lmcache_io_cluster"
    return f'{match[1]}{{namespace=~"$namespace", {cluster}=~"$cluster"'


@dataclass(frozen=True)
class Panel:
    """One panel. Panels fill rows of the dashboard from left to right."""

    title: str
    about: str
    """Explanation that Grafana shows at the panel's title."""
    unit: str
    queries: Sequence[Query]
    kind: Kind = "timeseries"
    width: int = 12
    height: int = 8
    is_stacked: bool = False
    max_value: float | None = None

    def json(self, number: int, x: int, y: int) -> dict[str, Any]:
        """Return the panel in Grafana's format, at a position of the dashboard's grid."""
        defaults: dict[str, Any] = {"unit": self.unit}
        if self.kind == "timeseries":
            defaults |= {"min": 0}
            defaults["custom"] = (
                {"fillOpacity": 30, "stacking": {"mode": "normal"}} if self.is_stacked else {}
            )
        if self.max_value is not None:
            defaults["max"] = self.max_value
        is_instant = self.kind != "timeseries"
        panel = {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.about,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "datasource": _DATASOURCE,
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "targets": [
                {
                    "refId": chr(ord("A") + index),
                    "expr": query.promql,
                    "legendFormat": query.legend,
                    **({"instant": True, "range": False} if is_instant else {}),
                    **({"format": "table"} if self.kind == "table" else {}),
                }
                for index, query in enumerate(self.queries)
            ],
        }
        return panel | self._presentation()

    def _presentation(self) -> dict[str, Any]:
        match self.kind:
            case "timeseries":
                return {"options": {"tooltip": {"mode": "multi", "sort": "desc"}}}
            case "bargauge":
                return {"options": {"orientation": "horizontal", "displayMode": "basic"}}
            case "stat":
                return {"options": {"reduceOptions": {"calcs": ["lastNotNull"]}}}
            case "table":
                names = {
                    f"Value #{chr(ord('A') + index)}": query.legend
                    for index, query in enumerate(self.queries)
                }
                organize = {"renameByName": names, "excludeByName": {"Time": True}}
                return {
                    "transformations": [
                        {"id": "merge", "options": {}},
                        {"id": "organize", "options": organize},
                    ]
                }


@dataclass(frozen=True)
class Heading:
    """A line of the dashboard that names the panels after it. Users can fold them away."""

    title: str
    width: int = _COLUMNS
    height: int = 1

    def json(self, number: int, x: int, y: int) -> dict[str, Any]:
        """Return the line in Grafana's format, at a position of the dashboard's grid."""
        place = {"x": x, "y": y, "w": self.width, "h": self.height}
        return {
            "id": number,
            "type": "row",
            "title": self.title,
            "gridPos": place,
            "collapsed": False,
            "panels": [],
        }


@dataclass(frozen=True)
class Variable:
    """A variable with the values of a label."""

    name: str
    title: str
    query: str
    """A query with Grafana's function ``label_values``."""
    all_value: str | None = None
    """Regular expression for "All"; None: Grafana joins the values that the query returns."""

    def json(self) -> dict[str, Any]:
        """Return the variable in Grafana's format."""
        variable = {
            "name": self.name, "label": self.title, "type": "query", "datasource": _DATASOURCE,
            "query": {"query": self.query, "refId": "A"}, "refresh": 2, "sort": 1,
            "includeAll": True, "multi": True, "current": {"text": "All", "value": "$__all"},
        }  # fmt: skip
        return variable | ({} if self.all_value is None else {"allValue": self.all_value})


@dataclass(frozen=True)
class Setting:
    """A variable that users type."""

    name: str
    title: str
    default: str

    def json(self) -> dict[str, Any]:
        """Return the variable in Grafana's format."""
        value = {"text": self.default, "value": self.default}
        return {
            "name": self.name,
            "label": self.title,
            "type": "textbox",
            "query": self.default,
            "current": value,
        }


NAMESPACE = Variable("namespace", "Namespace", "label_values(lmcache_ready, namespace)", ".*")
MODEL = Variable("model", "Model", 'label_values(lmcache_engine_info{namespace=~"$namespace"}, model)', ".*")
CLUSTER = Variable(
    "cluster",
    "LMCacheCluster",
    # lmcache_ready has no model. It therefore matches only if the model is "All", also without an engine.
    'label_values({__name__=~"lmcache_ready|lmcache_engine_info", namespace=~"$namespace", model=~"$model"},'
    " lmcache_io_cluster)",
)
CLUSTERS: tuple[Variable, ...] = (NAMESPACE, MODEL, CLUSTER)
"""Variables that choose clusters. "All" clusters are those of the chosen models."""


@dataclass(frozen=True)
class Dashboard:
    """One dashboard."""

    name: str
    """Name of the file, and the end of the dashboard's permanent address."""
    title: str
    about: str
    panels: Sequence[Panel | Heading]
    variables: Sequence[Variable | Setting] = CLUSTERS
    hours: int = 6
    """Time range that the dashboard shows at first."""

    def json(self) -> dict[str, Any]:
        """Return the dashboard in Grafana's format."""
        source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
        links = {
            "title": "LMCache",
            "type": "dashboards",
            "tags": ["lmcache"],
            "includeVars": True,
            "keepTime": True,
        }
        return {
            "title": self.title,
            "uid": f"lmcache-{self.name}",
            "description": self.about,
            "schemaVersion": 39,
            "tags": ["lmcache"],
            "time": {"from": f"now-{self.hours}h", "to": "now"},
            "refresh": "1m",
            "editable": True,
            "links": [links],
            "templating": {"list": [source, *(variable.json() for variable in self.variables)]},
            "panels": self._placed(),
        }

    def _placed(self) -> list[dict[str, Any]]:
        """Place the panels in rows of 24 columns."""
        x = y = row_height = 0
        placed = []
        for number, panel in enumerate(self.panels, 1):
            if x + panel.width > _COLUMNS:
                x, y, row_height = 0, y + row_height, 0
            placed.append(panel.json(number, x, y))
            x, row_height = x + panel.width, max(row_height, panel.height)
        return placed
