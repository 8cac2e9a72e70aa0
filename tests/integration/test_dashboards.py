"""Dashboards and queries of the documentation on a real Prometheus, which scrapes real sidecars and an"
" operator."""

import json
import math
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from testing.child_process import wait_until
from testing.kube.operator import CHART
from testing.prometheus import PrometheusProcess, program
from tests.harness.fences import fences, pages
from tests.harness.kube import NAME, new_namespace
from tests.harness.monitored import MODEL, NUM_PODS, Monitored, monitored
from tools import metrics_docs

pytestmark = [pytest.mark.kube, pytest.mark.redis, pytest.mark.timeout(600)]

RARE = {
    ("tiers", "Rows not written", "A"): "counts by reason start with the first row that a tier does not take",
    ("tiers", "Loads that failed", "C"): "counts by reason start with the first damaged object",
    ("fleet", "Tiers that do not answer", "A"): "all tiers answer",
}
"""Queries that may return nothing, each with the reason. They must be valid."""
_LABEL_VALUES = re.compile(r"label_values\((?:(?P<selector>.+),)?\s*(?P<label>\w+)\)")
_VARIABLE = re.compile(r"\$(?:([a-z_]\w*)|\{(\w+)\})")


class Dashboard:
    """A dashboard as Grafana shows it: variables get their values, and queries are substituted."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self.content: dict[str, Any] = json.loads(path.read_text())
        # Values of Grafana's own variables, for a server that scrapes every second.
        self.values = {"__rate_interval": "1m", "__range": "10m"}
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


FILES = (CHART / "files" / "dashboards").glob("*.json")
BOARDS = {path.stem: Dashboard(path) for path in sorted(FILES)}
PANELS = [
    (board.name, panel["title"])
    for board in BOARDS.values()
    for panel in board.content["panels"]
    if panel["type"] != "row"  # a heading has no queries
]


@pytest.fixture(scope="module")
def world(plane, chart, operator_process, tmp_path_factory) -> Iterator[Monitored]:
    if operator_process.is_running:
        operator_process.terminate()  # there must be one operator; other tests start theirs again
    folder = tmp_path_factory.mktemp("monitored")
    with (
        new_namespace(plane, "monitored") as namespace,
        monitored(plane, namespace, chart, folder) as running,
    ):
        yield running


def is_number(sample: dict[str, Any]) -> bool:
    return math.isfinite(float(sample["value"][1]))


def wait_for_data(world: Monitored, query: str) -> list[dict[str, Any]]:
    """The samples of a query, once there is a number among them."""
    latest: list[dict[str, Any]] = []

    def has_number() -> bool:
        latest[:] = world.prometheus.query(query)
        return any(map(is_number, latest))

    wait_until(has_number, timeout=120, what=f"data of {query}; now {latest}")
    return latest


def test_each_sidecar_and_the_operator_are_scraped_once(world):
    def targets() -> list[dict[str, Any]]:
        return [target for target in world.prometheus.targets() if target["health"] == "up"]

    wait_until(lambda: len(targets()) == NUM_PODS + 1, what="all targets are up")
    assert len(world.prometheus.targets()) == NUM_PODS + 1
    labels = [target["labels"] for target in targets() if target["labels"].get("lmcache_io_cluster")]
    assert {label["pod"] for label in labels} == set(world.sidecars)
    expected = {"namespace": world.namespace, "lmcache_io_cluster": NAME, "container": "sidecar"}
    assert all(expected.items() <= label.items() for label in labels)


@pytest.mark.parametrize(("name", "title"), PANELS, ids=lambda part: part.replace(" ", "-"))
def test_panel_shows_data(world, name, title):
    board = BOARDS[name]
    wait_until(lambda: has_options(board, world))
    for letter, query in board.queries(title).items():
        if (name, title, letter) in RARE:
            world.prometheus.query(query)
        else:
            wait_for_data(world, query)


def has_options(board, world) -> bool:
    board.choose(world.prometheus)
    return all(board.options.values())


def test_rare_queries_exist():
    assert {(name, title) for name, title, _ in RARE} <= set(PANELS)


def test_variables_offer_namespaces_models_and_clusters(world):
    board = BOARDS["worth-it"]
    wait_until(lambda: has_options(board, world))
    assert board.options == {"namespace": [world.namespace], "model": [MODEL], "cluster": [NAME]}
    board.choose(world.prometheus, model="another")
    assert board.options["cluster"] == []
    board.choose(world.prometheus, namespace=world.namespace, model=MODEL)
    assert board.options["cluster"] == [NAME]


def documented_queries() -> dict[str, str]:
    """Queries of fences in PromQL, and of scalers in fences of YAML, by their place."""
    queries = {str(fence): fence.text for page in pages() for fence in fences(page, "promql")}
    for page in pages():
        for fence in fences(page, "yaml"):
            for document in yaml.safe_load_all(fence.text):
                triggers = (
                    (document.get("spec") or {}).get("triggers") if isinstance(document, dict) else None
                )
                queries |= {str(fence): trigger["metadata"]["query"] for trigger in triggers or ()}
    return queries


DOCUMENTED = documented_queries()


@pytest.mark.parametrize("place", DOCUMENTED)
def test_query_of_the_documentation_returns_data(world, place):
    wait_for_data(world, DOCUMENTED[place].replace("NAMESPACE", world.namespace).replace("NAME", NAME))


def test_metrics_follow_the_conventions_of_prometheus(world):
    for text in (world.operator.metrics(), *(sidecar.get("/metrics") for sidecar in world.sidecars.values())):
        checked = subprocess.run(
            [program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True
        )
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_served_metrics_are_the_declared_metrics(world):
    """Every served metric is documented with its labels, and every stable metric is served."""
    wait_for_data(world, "lmcache_operator_autoscaling_shards")
    declared, served = metrics_docs.declared(), set()
    for text in (world.operator.metrics(), *(sidecar.get("/metrics") for sidecar in world.sidecars.values())):
        for family in text_string_to_metric_families(text):
            name = family.name + ("_total" if family.type == "counter" else "")
            if not name.startswith("lmcache_"):
                continue
            assert declared[name].kind == family.type
            for sample in family.samples:
                assert set(sample.labels) - {"le"} == set(declared[name].labels)
            served.add(name)
    assert {name for name in metrics_docs.stable() if name not in served} == set()
