"""The page of ``kubectl lmcache report``."""

import copy
import math
from html.parser import HTMLParser
from typing import Any

import pytest
from lmcache_operator.commands.gather import Gathered
from lmcache_operator.commands.reports.history import History
from lmcache_operator.commands.reports.html import Html, element, joined, marked, table
from lmcache_operator.commands.reports.page import page

from lmcache.common.svg import Line, Panel, svg, time_ticks
from tests.harness.reports import NOW, REASON, cluster, event, facts, history, pod, stats

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b[31m"


class Parsed(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.parts: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.parts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.parts).split())


def parsed(**changes: Any) -> Parsed:
    result = Parsed(page(facts(**changes)))
    assert result.open == []
    return result


def gathered(resource: dict[str, Any], *pods: Any, problems: tuple[str, ...] = ()) -> Gathered:
    return Gathered(resource, pods or (pod("a"),), problems, NOW)


def test_page_says_in_words_what_the_cache_saves() -> None:
    text = parsed().text
    assert "The cache served 70 % of all prompt tokens" in text
    assert "Engines computed 608,000 of 2,000,000 prompt tokens." in text
    assert (
        "52 % of the tokens came from the tiers of the cache, and 18 % from the engines' own caches." in text
    )
    assert "49 % of computed tokens follow a divergence within the first 64 tokens." in text


def test_page_shows_what_the_cache_saves_and_costs() -> None:
    text = parsed().text
    assert "The cache saved 50.00 USD more than its tiers cost in 24.0 hours." in text
    assert "GPU time saved 20.00 h +50.00" in text
    assert "memory tier 3,072.0 GiB h +0.00" in text
    assert "to the first token (median)" in text
    assert "24 loaded tokens have no price" in text


def test_page_of_older_sidecars_says_that_savings_are_not_counted() -> None:
    text = parsed(gathered=gathered(cluster(), pod("a", stats=stats(benefit={})))).text
    assert "No sidecar counts what the cache saves yet." in text


def test_page_shows_sizes_decisions_conditions_pods_and_versions() -> None:
    text = parsed().text
    for part in (
        REASON, "0.310 (0.250 to 0.370)", "recommended: 128Gi", "present: 64Gi", "MemoryRecommended",
        "2026-11-18 09:30", "Replaced 3 pods. (3 times)", "RemoteTierSlow", "Redis is slow.",
        "qwen3-8b-engine-1", "61Gi of 64Gi", "vllm/vllm-openai:v0.33.0 (3 pods)", "0.1.0 (2 pods)",
    ):  # fmt: skip
        assert part in text


def test_page_names_sidecars_that_did_not_answer() -> None:
    assert "1 of 3 sidecars did not answer. First: qwen3-8b-engine-2: no answer within 3 s." in parsed().text


def test_page_shows_the_past_of_prompts_causes_and_tiers() -> None:
    result = parsed()
    assert "svg" in result.tags
    for part in (
        "The last 24h", "Prompt tokens per second, by source", "Computed tokens per second, by cause",
        "too late", "Memory tier of all pods, in GiB", "Remote tier of all pods, in GiB", "12:00",
    ):  # fmt: skip
        assert part in result.text


def test_page_without_prometheus_says_how_to_get_the_past() -> None:
    assert "Add --prometheus URL to the command" in parsed(history=None).text


def test_page_shows_why_prometheus_has_no_answer() -> None:
    problem = "Prometheus at http://p:9090 did not answer within 4 s."
    assert problem in parsed(history=History(problem=problem)).text


def test_page_of_a_new_cluster_says_that_nothing_was_counted() -> None:
    resource = cluster()
    del resource["status"]
    text = parsed(gathered=gathered(resource, pod("a", stats=stats(causes={}))), events=[], history=None).text
    assert "The cache has not served a prompt yet" in text
    assert "There is no curve of the memory tier." in text
    assert "There are no Events." in text
    assert "The operator has not reported conditions yet." in text


def test_page_of_a_cluster_without_pods_is_complete() -> None:
    empty = Gathered(cluster(), (), ("the pods cannot be listed: forbidden",), NOW)
    text = parsed(gathered=empty).text
    assert "the pods cannot be listed: forbidden" in text
    assert "The cluster has no pods." in text


def test_table_of_many_pods_is_folded() -> None:
    result = parsed(gathered=gathered(cluster(), *(pod(f"pod-{number}") for number in range(1000))))
    assert "details" in result.tags
    assert "Show all 1000 pods" in result.text


def test_no_text_of_a_cluster_or_pod_becomes_markup() -> None:
    resource = copy.deepcopy(cluster())
    resource["metadata"] |= {"name": EVIL, "namespace": EVIL}
    resource["spec"]["model"]["name"] = EVIL
    resource["apiVersion"] = EVIL
    resource["status"]["conditions"] = [{"type": EVIL, "status": EVIL, "reason": EVIL, "message": EVIL}]
    memory = resource["status"]["autoscaling"]["memory"]
    memory |= {"reason": EVIL, "limitedBy": EVIL, "saving": {"usdPerHour": EVIL, "low": EVIL, "high": EVIL}}
    causes = {"prompt_tokens": 10, "cause_tokens": {EVIL: 10, "memory": 5}}
    evil_stats = stats(
        version=EVIL, is_ready=False, not_ready_reason=EVIL, causes=causes,
        remote={"is_reachable": False, "off_reason": EVIL},
    )  # fmt: skip
    evil_pod = pod(EVIL, stats=evil_stats)
    evil_pod.pod["spec"]["containers"].append({"name": EVIL, "image": EVIL})
    silent = pod(EVIL, stats={}, problem=EVIL)
    past = history()
    past = History(past.times, {**past.tokens, EVIL: [9e9] * len(past.times)}, past.used, past.sizes)
    result = parsed(
        gathered=gathered(resource, evil_pod, silent, problems=(EVIL,)),
        events=[event(EVIL, EVIL, EVIL)],
        history=past,
        since=EVIL,
        version=EVIL,
        problems=[EVIL],
    )
    assert not result.tags & {"script", "img", "iframe", "object", "a"}
    assert not {name for name in result.attributes if name.startswith("on") or name in ("src", "srcset")}
    assert result.text.count("<script>alert(1)</script>") > 20
    assert "\x1b" not in result.text
    refused = parsed(history=History(problem=EVIL))
    assert "script" not in refused.tags


@pytest.mark.parametrize(
    "scaling", [[], {"memory": []}, {"memory": {"curve": 3, "reason": 1}}, {"remote": {"curve": []}}]
)
def test_status_of_another_version_leaves_out_only_the_curve(scaling: Any) -> None:
    resource = cluster()
    resource["status"]["autoscaling"] = scaling
    assert "There is no curve of the memory tier." in parsed(gathered=gathered(resource)).text


def test_elements_escape_all_but_html() -> None:
    assert element("p", "a < b", Html("<b>c</b>"), title='"') == '<p title="&quot;">a &lt; b<b>c</b></p>'
    assert joined("<", ["&", Html("&amp;")]) == "&lt;&amp;&amp;"
    assert marked("run `a<b` now") == "run <code>a&lt;b</code> now"
    assert '<td class="number">&lt;1</td>' in table(["n"], [["<1"]], numbers=[0])


def test_time_axis_has_round_times_that_fit() -> None:
    assert [label for _, label in time_ticks(NOW - 3600, NOW, 4)] == ["10:15", "10:30", "10:45", "11:00"]
    assert next(label for _, label in time_ticks(NOW - 7 * 86_400, NOW)) == "Nov 12"
    assert all(len(time_ticks(NOW - length, NOW)) <= 9 for length in (60, 5000, 90_000, 10**6, 3 * 10**7))


def test_line_is_interrupted_where_a_value_is_missing() -> None:
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, math.nan), (3.0, 4.0), (4.0, 3.0)]
    drawn = svg([Panel("title", [Line("line", points, [(x, 0.0, y) for x, y in points])], [])], "")
    assert (drawn.count("<polyline"), drawn.count("<polygon")) == (2, 2)
    assert "nan" not in drawn
