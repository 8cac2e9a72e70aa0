"""The tables of ``top``: columns, order and numbers."""

import pytest

from lmcache_store.common.text import Style, gigabytes, rate, width
from lmcache_store.explain import live
from lmcache_store.explain.traffic import GROUPS, document

PLAIN = Style(False)


def pod(number: int, **fields: object) -> dict:
    tokens = dict.fromkeys(GROUPS, 0.0) | {"memory": 10.0 * number, "computed": 100.0}
    tier = {"isCircuitOpen": False, "problem": "", "measuredLoadBytesPerSecond": 0}
    tier |= {
        "loadBytesPerSecond": 1e9 * number,
        "writeBytesPerSecond": 0,
        "queuedLoads": 0,
        "queuedWrites": 0,
    }
    return {
        "cluster": "demo", "name": f"demo-engine-{number}", "problem": "", "uptimeSeconds": 60.0,
        "requestsPerSecond": 1.5, "tokensPerSecond": tokens, "queuedLoads": number, "queuedWrites": 0,
        "unwrittenRows": 0, "tiers": [{"name": "memory", **tier}, {"name": "disk", **tier}], **fields,
    }  # fmt: skip


def test_page_has_all_pods_in_their_order_and_the_problems():
    pods = [pod(number) for number in (10, 2, 0)]
    figures = document(pods, time="now", seconds=2.0, problems=["a problem"])
    first, *lines = live.page(figures, PLAIN, sort="pod")
    assert first.startswith("3 of 3 pods counted, ")
    assert [line.split()[0][-2:] for line in lines if line.startswith("demo-")] == ["-0", "-2", "10"]
    assert lines[-1] == "a problem"
    by_load = live.page(figures, PLAIN, sort="load")
    assert [line.split()[0][-2:] for line in by_load if line.startswith("demo-")] == ["10", "-2", "-0"]
    empty = document([], time="now", seconds=2.0, problems=[])
    assert "There are no pods." in live.page(empty, PLAIN, sort="pod")


@pytest.mark.parametrize("sort", live.SORTS)
def test_every_column_orders_pods_without_figures(sort):
    unknown = pod(0, tokensPerSecond=None, requestsPerSecond=None, tiers=[], problem="no answer")
    assert len(live.ordered([unknown, pod(1), pod(2)], sort)) == 3


def test_pods_with_a_problem_are_first_by_state():
    pods = [pod(0), pod(1, problem="no answer within 2 s"), pod(2)]
    assert [each["name"][-1] for each in live.ordered(pods, "state")] == ["1", "0", "2"]


def test_traffic_of_a_pod_is_that_of_its_lower_tiers():
    title, row = live.pod_table([pod(2)], PLAIN)
    column = title.index("LOAD B/S")
    assert row[column : column + 8].strip() == "2.00G"
    _, row = live.pod_table([pod(2, tiers=pod(2)["tiers"][:1])], PLAIN)
    assert row[column : column + 8].strip() == "-"


def test_clusters_have_a_column_if_there_are_several():
    assert "CLUSTER" not in live.pod_table([pod(0)], PLAIN)[0]
    assert "CLUSTER" in live.pod_table([pod(0), pod(1, cluster="other")], PLAIN)[0]


def test_wide_characters_count_as_two_columns():
    assert width(Style(True).paint("日本語", "red")) == 6


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (0.42, "0.42"), (9.999, "10.0"), (99.96, "100"), (1234.5, "1,234")]
)
def test_rates_have_three_digits(number, text):
    assert rate(number) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0"), (1.2e9, "1.20G"), (3.4e6, "3.40M"), (5e3, "0.01M")])
def test_bytes_are_shown_in_gb_or_mb(number, text):
    assert gigabytes(number) == text
