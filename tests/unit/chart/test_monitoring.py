"""Consistency of alerts, dashboards and runbooks with metrics, reasons and each other."""

import itertools
import json
import re
import typing
from pathlib import Path

import pytest

from lmcache_operator.contract.conditions import Expected, Trouble, runbook
from tests.harness.alert_rules import ALERTS, SOURCE
from tests.harness.fences import fences
from tools import metrics_docs
from tools.metrics_docs import Metric

ROOT = Path(__file__).resolve().parents[3]
FILES = ROOT / "charts" / "lmcache-operator" / "files"
RUNBOOKS = ROOT / "docs" / "runbooks"
POD_PAGE = RUNBOOKS / "PodDoesNotStart.md"
BOARDS = [json.loads(path.read_text()) for path in sorted((FILES / "dashboards").glob("*.json"))]
OF_ALERTS = [
    *(alert["expr"] for alert in ALERTS.values() if ":ratio_rate" not in alert["expr"]),
    *(expr for share in SOURCE["shares"] for expr in (share["failed"], share["good"])),
]
EXPRESSIONS = [
    *OF_ALERTS,
    *(target["expr"] for board in BOARDS for panel in board["panels"] for target in panel.get("targets", ())),
]


def series_names() -> set[str]:
    """Names of all series that sidecars and operator export."""
    names = set()
    for metric in metrics_docs.declared().values():
        suffixes = ("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",)
        names |= {metric.name + suffix for suffix in suffixes}
    return names


def test_runbooks_match_reasons_and_alerts() -> None:
    pages = {path.name for path in RUNBOOKS.glob("*.md")} - {"README.md"}
    linked = [runbook(reason).partition("#") for reason in (*typing.get_args(Trouble), *ALERTS)]
    assert pages == {page for page, _, _ in linked}
    anchors = {anchor for page, _, anchor in linked if page == POD_PAGE.name}
    headings = re.findall(r"^## (\w+)$", POD_PAGE.read_text(), re.MULTILINE)
    assert sorted(anchors) == [heading.lower() for heading in headings]


def test_list_of_runbooks_is_complete() -> None:
    text = (RUNBOOKS / "README.md").read_text()
    names = {*typing.get_args(Trouble), *ALERTS}
    assert {*re.findall(r"^\| \[(\w+)\]\(([\w.#]+)\) \|", text, re.MULTILINE)} == {
        (name, runbook(name)) for name in names
    }
    _, _, expected_section = text.partition("Reasons that need no action")
    listed = re.findall(
        r"\w+", " ".join(re.findall(r"^\| ([A-Z][\w, ]+) \|", expected_section, re.MULTILINE))
    )
    assert sorted(listed) == sorted(typing.get_args(Expected))


@pytest.mark.parametrize(
    "page", sorted({*RUNBOOKS.glob("[A-Z]*[a-z].md")} - {POD_PAGE}), ids=lambda path: path.stem
)
def test_runbook_has_summary_and_both_sections(page: Path) -> None:
    title, *lines = page.read_text().splitlines()
    assert title == f"# {page.stem}"
    headings = [line for line in lines if line.startswith("## ")]
    assert headings == ["## How to see it", "## What to do"]
    assert len(lines[0]) > 20


@pytest.mark.parametrize("alert", ALERTS)
def test_runbook_of_an_alert_begins_with_the_doctor(alert: str) -> None:
    first = fences(RUNBOOKS / f"{alert}.md")[0]
    assert first.language == "sh"
    assert re.fullmatch(r"kubectl lmcache doctor( NAME)?\n", first.text)


def test_alerts_and_dashboards_use_existing_metrics() -> None:
    used_metrics = {name for text in EXPRESSIONS for name in re.findall(r"\blmcache_\w+", text)}
    assert used_metrics - {"lmcache_io_cluster"} <= series_names()
    assert len(used_metrics) > 40


def test_alerts_use_stable_metrics_only() -> None:
    used = {name for text in OF_ALERTS for name in re.findall(r"\blmcache_\w+", text)} - {
        "lmcache_io_cluster"
    }
    assert used <= metrics_docs.stable().keys()


def test_every_stable_metric_has_its_name_type_and_labels() -> None:
    assert metrics_docs.broken_promises(metrics_docs.declared()) == []
    assert len(metrics_docs.stable()) > 40


def test_a_stable_metric_that_vanishes_or_changes_is_noticed() -> None:
    metrics = metrics_docs.declared()
    del metrics["lmcache_ready"]
    metrics["lmcache_hit_tokens_total"] = Metric("lmcache_hit_tokens_total", "counter", ("place",))
    metrics["lmcache_gpus"] = Metric("lmcache_gpus", "counter", ())
    assert metrics_docs.broken_promises(metrics) == [
        "gauge lmcache_gpus is now counter lmcache_gpus",
        "counter lmcache_hit_tokens_total{tier} is now counter lmcache_hit_tokens_total{place}",
        "gauge lmcache_ready is missing",
    ]


def test_alerts_are_few_and_complete() -> None:
    assert 1 <= len(ALERTS) <= 10
    for alert in ALERTS.values():
        assert alert.keys() == {"name", "expr", "for", "severity", "summary"}
        assert alert["severity"] in ("warning", "critical")


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board["title"])
def test_panels_do_not_overlap(board: dict[str, typing.Any]) -> None:
    def cells_of(x: int, y: int, w: int, h: int) -> typing.Any:
        return itertools.product(range(x, x + w), range(y, y + h))

    cells = [cell for panel in board["panels"] for cell in cells_of(**panel["gridPos"])]
    assert len(set(cells)) == len(cells)
    assert all(x < 24 for x, _ in cells)
    assert len({panel["title"] for panel in board["panels"]}) == len(board["panels"])


def test_five_dashboards_have_different_addresses() -> None:
    assert len({board["uid"] for board in BOARDS}) == len(BOARDS) == 5


def test_every_panel_in_the_guide_exists() -> None:
    titles = {panel["title"] for board in BOARDS for panel in board["panels"]}
    text = (ROOT / "docs" / "how-to" / "read-the-dashboard.md").read_text()
    rows = re.findall(r"\| panel \|.*\n\|---.*\n((?:\|.*\n)+)", text)
    cells = [line.split("|")[1].strip() for row in rows for line in row.splitlines()]
    assert len(cells) > 15
    missing = [cell for cell in cells if cell not in titles and not set(cell.split(", ")) <= titles]
    assert missing == []
