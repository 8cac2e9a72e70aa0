"""The Grafana dashboards of the chart, generated from short descriptions in Python.

Each module of this package describes one dashboard. `render` returns the files that ``make generate`` writes
to ``charts/lmcache-operator/files/dashboards/``.
"""

from __future__ import annotations

import json

from tools.dashboards import benefit, fleet, operators, sizing, tiers

DASHBOARDS = (benefit.DASHBOARD, tiers.DASHBOARD, sizing.DASHBOARD, operators.DASHBOARD, fleet.DASHBOARD)


def render() -> dict[str, str]:
    """Return the text of each dashboard's JSON file by its name."""
    return {f"{each.name}.json": json.dumps(each.json(), indent=1) + "\n" for each in DASHBOARDS}
