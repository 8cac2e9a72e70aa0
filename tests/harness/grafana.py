"""Dashboards as Grafana shows them: variables get their values, and queries are substituted."""

import json
import re
from pathlib import Path
from typing import Any

from testing.kube.operator import CHART
from testing.prometheus import PrometheusProcess

FILES = sorted((CHART / "files" / "dashboards").glob("*.json"))
_LABEL_VALUES = re.compile(r"label_values\((?:(?P<selector>.+),)?\s*(?P<label>\w+)\)")
_VARIABLE = re.compile(r"\$(?:([a-z_]\w*)|\{(\w+)\})")
RATE_INTERVAL, RANGE = "1m", "10m"
"""Values of Grafana's own variables, for a server that scrapes every second."""


class Dashboard:
    """One dashboard of the chart, with the values of its variables."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self.content: dict[str, Any] = json.loads(path.read_text())
        self.values = {"__rate_interval": RATE_INTERVAL, "__range": RANGE}
        """Text that replaces each variable."""
        self.options: dict[str, list[str]] = {}
        """Choices of each variable with a query."""

    def choose(self, prometheus: PrometheusProcess, **chosen: str) -> None:
        """Refresh the variables. Those that are not ``chosen`` are "All", or have their default."""
        for variable in self.content["templating"]["list"]:
            name = variable["name"]
            if variable["type"] == "query":
                self.options[name] = self._label_values(prometheus, variable["query"]["query"])
                all_value = variable.get("allValue") or _joined(self.options[name])
                self.values[name] = _escaped(chosen[name]) if name in chosen else all_value
            elif variable["type"] == "textbox":
                self.values[name] = variable["query"]

    def substitute(self, text: str) -> str:
        """Return a query with its variables replaced. Raises KeyError for an unknown variable."""
        return _VARIABLE.sub(lambda match: self.values[match[1] or match[2]], text)

    def queries(self, title: str) -> dict[str, str]:
        """Substituted queries of the panel with this title, by their letter."""
        (panel,) = (panel for panel in self.content["panels"] if panel["title"] == title)
        return {target["refId"]: self.substitute(target["expr"]) for target in panel["targets"]}

    def _label_values(self, prometheus: PrometheusProcess, query: str) -> list[str]:
        match = _LABEL_VALUES.fullmatch(self.substitute(query))
        assert match is not None, f"{query} is no query of label values"
        return [value for value in prometheus.label_values(match["label"], match["selector"]) if value]


def _joined(values: list[str]) -> str:
    return f"({'|'.join(map(_escaped, values))})" if len(values) > 1 else "".join(map(_escaped, values))


def _escaped(value: str) -> str:
    """Escape a value for a regular expression in a string of PromQL, as Grafana does."""
    return re.sub(r"[$^*{}\[\]+?.()|]", r"\\\\\g<0>", value)
