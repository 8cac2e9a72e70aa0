"""Consistency of alerts, dashboard and runbooks with metrics, reasons and each other."""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path

import pytest
import yaml
from lmcache_operator import metrics as operator_metrics
from lmcache_operator.components.conditions import Expected, Trouble
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

ROOT = Path(__file__).resolve().parents[3]
FILES = ROOT / "charts" / "lmcache-operator" / "files"
RUNBOOKS = ROOT / "docs" / "runbooks"
ALERTS = {alert["name"]: alert for alert in yaml.safe_load((FILES / "alerts.yaml").read_text())["alerts"]}
DASHBOARD = json.loads((FILES / "dashboard.json").read_text())
EXPRESSIONS = [
    *(alert["expr"] for alert in ALERTS.values()),
    *(target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]),
]


def metric_names() -> set[str]:
    """Names of all metrics that sidecars and operator export."""
    sidecars = re.findall(r"`(lmcache_\w+)`", (ROOT / "docs" / "reference" / "stats.md").read_text())
    registry = CollectorRegistry()
    for metric in vars(operator_metrics).values():
        if isinstance(metric, MetricWrapperBase):
            registry.register(metric)
    operators = {name for metric in registry._collector_to_names.values() for name in metric}
    return {*sidecars, *operators, "lmcache_request_seconds_bucket"}


def test_runbooks_match_reasons_and_alerts() -> None:
    pages = {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"}
    assert pages == {*typing.get_args(Trouble), *ALERTS}


def test_list_of_runbooks_is_complete() -> None:
    text = (RUNBOOKS / "README.md").read_text()
    assert set(re.findall(r"\[\w+\]\((\w+)\.md\)", text)) == {*typing.get_args(Trouble), *ALERTS}
    _, _, expected_section = text.partition("Reasons that need no action")
    listed = re.findall(
        r"\w+", " ".join(re.findall(r"^\| ([A-Z][\w, ]+) \|", expected_section, re.MULTILINE))
    )
    assert sorted(listed) == sorted(typing.get_args(Expected))


@pytest.mark.parametrize("page", sorted(RUNBOOKS.glob("[A-Z]*[a-z].md")), ids=lambda path: path.stem)
def test_runbook_has_summary_and_both_sections(page: Path) -> None:
    title, *lines = page.read_text().splitlines()
    assert title == f"# {page.stem}"
    headings = [line for line in lines if line.startswith("## ")]
    assert headings == ["## How to see it", "## What to do"]
    assert len(lines[0]) > 20


def test_alerts_and_dashboard_use_existing_metrics() -> None:
    used_metrics = {name for text in EXPRESSIONS for name in re.findall(r"\blmcache_\w+", text)}
    assert used_metrics - {"lmcache_io_cluster"} <= metric_names()
    assert len(used_metrics) > 15


def test_operator_down_alert_fires_without_a_leader() -> None:
    """All operators export the metric, but only the leader's value is 1."""
    assert ALERTS["LMCacheOperatorDown"]["expr"] == "absent(lmcache_operator_leading == 1)"


def test_condition_alerts_survive_a_leader_change() -> None:
    """The new leader's metrics have a different pod label, which would restart the alert's time."""
    conditions = [alert["expr"] for alert in ALERTS.values() if "cluster_condition" in alert["expr"]]
    assert len(conditions) == 2
    for expr in conditions:
        assert re.match(r"(min|max) by \(namespace, name\) \(last_over_time\(.*\[5m\]\)\) ", expr)


def test_alerts_are_few_and_complete() -> None:
    assert 1 <= len(ALERTS) <= 8
    for alert in ALERTS.values():
        assert alert.keys() == {"name", "expr", "for", "severity", "summary"}
        assert alert["severity"] in ("warning", "critical")


def test_dashboard_panels_do_not_overlap() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in DASHBOARD["panels"]})
