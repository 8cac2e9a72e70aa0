"""The screen of ``top``: tables, order, position, and keys."""

import pytest

from lmcache.common.terminal import keys
from lmcache.explain import live
from lmcache.explain.rates import GROUPS
from lmcache.explain.text import Style, cut, gigabytes, rate, width
from lmcache.explain.traffic import document

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


def screen(num_pods: int, sort: str = "pod", *problems: str) -> live.Live:
    view = live.Live("default/demo", PLAIN, sort, 2.0)
    pods = [pod(number) for number in range(num_pods)]
    view.figures = document(pods, time="now", seconds=2.0, problems=problems)
    return view


def shown_pods(lines: list[str] | tuple[str, ...]) -> list[int]:
    return [int(line.split()[0].rpartition("-")[2]) for line in lines if line.startswith("demo-engine-")]


@pytest.mark.parametrize("columns", [20, 80, 200])
@pytest.mark.parametrize("lines", [4, 12, 24, 60])
@pytest.mark.parametrize("num_pods", [0, 1, 1000])
def test_screen_fills_the_terminal_and_never_exceeds_it(columns, lines, num_pods):
    drawn = screen(num_pods, "pod", "a problem " * 30).draw(columns, lines)
    assert len(drawn) == lines
    assert max(map(width, drawn)) <= columns


def test_first_screen_says_that_it_reads():
    view = live.Live("default/demo", PLAIN, "pod", 2.0)
    assert view.draw(80, 24) == ["default/demo  every 2 s  reading …"]


def test_pods_are_ordered_by_number_and_keys_scroll_them():
    view = screen(1000)
    drawn = view.draw(120, 40)
    first = shown_pods(drawn)
    assert first == [*range(len(first))]
    assert f"pods 1-{len(first)} of 1000" in drawn[-1]
    for key in ("page down", "down", "down", "up"):
        assert view.press(key)
    moved = shown_pods(view.draw(120, 40))
    assert moved == [*range(len(first) + 1, 2 * len(first) + 1)]
    assert view.press("end")
    assert shown_pods(view.draw(120, 40))[-1] == 999
    assert view.press("home")
    assert view.press("page up")
    assert shown_pods(view.draw(120, 40)) == first


def test_q_quits_and_p_pauses():
    view = screen(1)
    assert view.press("p")
    assert "paused" in view.draw(80, 24)[0]
    assert view.press("p")
    assert "every 2 s" in view.draw(80, 24)[0]
    assert view.press("x")
    assert not view.press("q")


def test_s_changes_the_order_and_the_largest_number_comes_first():
    view = screen(3)
    while "sorted by load " not in view.draw(200, 40)[-1]:
        view.press("s")
    assert shown_pods(view.draw(200, 40)) == [2, 1, 0]


@pytest.mark.parametrize("sort", live.SORTS)
def test_every_column_orders_pods_without_figures(sort):
    unknown = pod(0, tokensPerSecond=None, requestsPerSecond=None, tiers=[], problem="no answer")
    assert len(live.ordered([unknown, pod(1), pod(2)], sort)) == 3


def test_pods_with_a_problem_are_first_by_state():
    pods = [pod(0), pod(1, problem="no answer within 2 s"), pod(2)]
    assert [each["name"][-1] for each in live.ordered(pods, "state")] == ["1", "0", "2"]


def test_narrow_terminal_keeps_name_state_and_requests():
    title, *_ = live.pod_table([pod(0)], PLAIN, 60)
    assert {"POD", "REQ/S", "STATE"} <= set(title.split())
    assert "UNWRITTEN" not in title
    title, *_ = live.pod_table([pod(0)], PLAIN)
    assert "UNWRITTEN" in title


def test_traffic_of_a_pod_is_that_of_its_lower_tiers():
    title, row = live.pod_table([pod(2)], PLAIN)
    column = title.index("LOAD B/S")
    assert row[column : column + 8].strip() == "2.00G"
    _, row = live.pod_table([pod(2, tiers=pod(2)["tiers"][:1])], PLAIN)
    assert row[column : column + 8].strip() == "-"


def test_columns_of_one_rank_are_left_out_together():
    for columns in range(20, 200):
        title, *_ = live.pod_table([pod(0)], PLAIN, columns)
        assert len({name in title.split() for name in ("ENGINE", "MEMORY", "DISK", "REMOTE")}) == 1


def test_clusters_have_a_column_if_there_are_several():
    assert "CLUSTER" not in live.pod_table([pod(0)], PLAIN)[0]
    assert "CLUSTER" in live.pod_table([pod(0), pod(1, cluster="other")], PLAIN)[0]


def test_old_figures_show_their_age():
    view = screen(1)
    view.age = lambda: 30.0
    assert "30s old" in view.draw(80, 24)[0]


def test_keys_of_terminals_in_both_modes():
    typed = "q\x1b[A\x1bOB\x1b[5~\x1b[6~\x1b[H\x1bOF\x1b[15~ps"
    assert list(keys(typed)) == ["q", "up", "down", "page up", "page down", "home", "end", "p", "s"]


def test_cut_keeps_colors_and_counts_wide_characters():
    painted = Style(True).paint("abcdef", "red")
    assert cut(painted, 6) == painted
    assert cut(painted, 3) == "\x1b[31mabc\x1b[0m"
    assert cut("日本語", 5) == "日本"
    assert width("日本語") == 6


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (0.42, "0.42"), (9.999, "10.0"), (99.96, "100"), (1234.5, "1,234")]
)
def test_rates_have_three_digits(number, text):
    assert rate(number) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0"), (1.2e9, "1.20G"), (3.4e6, "3.40M"), (5e3, "0.01M")])
def test_bytes_are_shown_in_gb_or_mb(number, text):
    assert gigabytes(number) == text
