"""The chart's rules without Helm, and tests of alerts by promtool."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from testing.kube.operator import CHART
from testing.prometheus import program

SOURCE = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
ALERTS: dict[str, dict[str, str]] = {alert["name"]: alert for alert in SOURCE["alerts"]}
WINDOWS = ("5m", "30m", "1h", "6h")
RUNBOOKS = "https://runbooks.example"


def groups() -> list[dict[str, Any]]:
    """Groups of the PrometheusRule, with runbooks at `RUNBOOKS`. A test compares them with the rendered"
    " chart."""
    return [
        {
            "name": "lmcache-shares",
            "rules": [_share(share, window) for share in SOURCE["shares"] for window in WINDOWS],
        },
        {"name": "lmcache", "rules": [_alert(alert) for alert in ALERTS.values()]},
    ]


def _share(share: Mapping[str, str], window: str) -> dict[str, Any]:
    failed = f"sum by ({share['by']}) ({share['failed']})"
    expr = f"{failed} / ({failed} + sum by ({share['by']}) ({share['good']}))"
    return {"record": f"{share['name']}:ratio_rate{window}", "expr": expr.replace("WINDOW", window)}


def _alert(alert: Mapping[str, str]) -> dict[str, Any]:
    annotations = {"summary": alert["summary"], "runbook_url": f"{RUNBOOKS}/{alert['name']}.md"}
    rule = {"alert": alert["name"], "expr": alert["expr"], "for": alert["for"]}
    return {**rule, "labels": {"severity": alert["severity"]}, "annotations": annotations}


@dataclass(frozen=True)
class Case:
    """Series over time, and when an alert about them fires. Times are minutes."""

    series: Mapping[str, str]
    """Values in promtool's notation, one a minute. Some series are healthy, and never fire."""
    labels: Mapping[str, str]
    """Labels of the alert that fires, without name and severity."""
    quiet: Sequence[int]
    """Times before the alert fires, also when its condition already holds."""
    fires: Sequence[int]
    resolved: Sequence[int]


def check(folder: Path, name: str, case: Case) -> str:
    """Run promtool on one alert. Returns its complaints; empty if the alert behaves as the case says."""
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": groups()}))
    firing = [
        {
            "exp_labels": {**case.labels, "severity": ALERTS[name]["severity"]},
            "exp_annotations": {
                "summary": re.sub(
                    r"{{ \$labels\.(\w+) }}", lambda m: case.labels[m[1]], ALERTS[name]["summary"]
                ),
                "runbook_url": f"{RUNBOOKS}/{name}.md",
            },
        }
    ]
    expected = dict.fromkeys(case.fires, firing) | {minute: [] for minute in (*case.quiet, *case.resolved)}
    test = {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": alerts}
            for minute, alerts in expected.items()
        ],
    }  # fmt: skip
    content = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (folder / "test.yaml").write_text(yaml.safe_dump(content))
    return promtool("test", "rules", folder / "test.yaml")


def promtool(*arguments: str | Path) -> str:
    """Run promtool. Returns its output if it fails or complains, else an empty string."""
    done = subprocess.run([program("promtool"), *map(str, arguments)], capture_output=True, text=True)
    return done.stdout + done.stderr if done.returncode else ""
