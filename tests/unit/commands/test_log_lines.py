"""Lines of logs: splitting, cleaning, choice of the operator's lines, and order by time."""

import random
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmcache_operator.commands.log_lines import (
    Line,
    Parser,
    Recent,
    Reordering,
    Source,
    Splitter,
    clean,
    merged,
    sources_of,
)

from tests.harness.command_world import pod

BEGIN = datetime(2026, 11, 25, 12, 0, 0, tzinfo=UTC)
ENGINE = Source("engine", "team", "demo-engine-0", "engine", "uid")
OPERATOR = Source("operator", "lmcache-system", "operator-0", "operator", "uid")


def line(seconds: float, message: str = "m", source: Source = ENGINE) -> Line:
    return Line(BEGIN + timedelta(seconds=seconds), source, message)


def parsed(parser: Parser, *texts: str) -> list[str]:
    lines = [parser.parse(f"2026-11-25T12:00:00.{n:09}Z {text}".encode()) for n, text in enumerate(texts, 1)]
    return [each.message for each in lines if each]


@given(st.binary(max_size=400), st.integers(1, 50))
def test_splitting_does_not_depend_on_the_pieces(data, size):
    splitter = Splitter()
    lines = [each for n in range(0, len(data), size) for each in splitter.feed(data[n : n + size])]
    assert [*lines, splitter.end()] == data.split(b"\n")


def test_long_line_is_cut_and_takes_bounded_memory():
    splitter = Splitter()
    for _ in range(100):
        assert not list(splitter.feed(b"x" * 4096))
        assert len(splitter._rest) <= 16 << 10
    (cut,) = splitter.feed(b"\n")
    assert cut.endswith(b"x [line cut]")
    assert list(splitter.feed(b"short\n")) == [b"short"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[36m(EngineCore)\x1b[0m ready", "(EngineCore) ready"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b[2J\x1b[Hgone", "gone"),
        ("a\x07b\x00c\x9bd", "a\\x07b\\x00c\\x9bd"),
        ("    indented\tby a tab\r", "    indented\tby a tab"),
        ("日本", "日本"),
    ],
)
def test_control_characters_never_reach_the_terminal(text, shown):
    assert clean(text) == shown


def test_time_is_read_with_nanoseconds_and_any_offset():
    parser = Parser(ENGINE, "team", "demo")
    assert parser.parse(b"2026-11-25T12:00:01.5Z a") == line(1.5, "a")
    assert parser.parse(b"2026-11-25T14:00:02.123456789+02:00 b") == line(2.123456, "b")
    assert parser.last == BEGIN + timedelta(seconds=2.123456)


def test_line_without_a_time_gets_that_of_the_line_before():
    parser = Parser(ENGINE, "team", "demo")
    parser.parse(b"2026-11-25T12:00:01Z a")
    assert parser.parse(b"unable to retrieve container logs") == line(1, "unable to retrieve container logs")


def test_lines_that_are_known_are_left_out():
    parser = Parser(ENGINE, "team", "demo")
    after = BEGIN + timedelta(seconds=1)
    assert parser.parse(b"2026-11-25T12:00:01Z known", after=after) is None
    assert parser.parse(b"2026-11-25T12:00:01.001Z new", after=after) == line(1.001, "new")


def test_operator_lines_are_those_about_the_cluster_with_their_tracebacks():
    parser = Parser(OPERATOR, "team", "demo")
    texts = (
        "a traceback of an unknown record",
        "2026-11-25T12:00:00.000Z INFO    lmcache_operator: team/demo: applied Service demo-engine",
        "2026-11-25T12:00:00.000Z INFO    lmcache_operator: team/demo-2: applied Service demo-2-engine",
        "2026-11-25T12:00:00.000Z INFO    lmcache_operator: other-team/demo: applied",
        "2026-11-25T12:00:00.000Z ERROR   lmcache_operator: reconciling team/demo failed",
        "Traceback (most recent call last):",
        "2026-11-25T12:00:00.000Z INFO    lmcache_operator: leading",
        '{"time": "2026-11-25T12:00:00.000Z", "message": "team/demo: Ready: all is well"}',
    )
    assert parsed(parser, *texts) == [texts[1], texts[4], texts[5], texts[7]]


def test_all_lines_of_engines_are_chosen():
    assert parsed(Parser(ENGINE, "team", "demo"), "a", "b") == ["a", "b"]


def test_recent_keeps_the_newest_lines_within_its_memory():
    recent = Recent(2000)
    for number in range(100):
        recent.add(line(number, "x" * 100))
    assert sum(each.num_bytes for each in recent.lines) <= 2000
    assert recent.lines[-1] == line(99, "x" * 100)
    assert recent.num_dropped + len(recent.lines) == 100


def test_merge_orders_sources_by_time_and_keeps_the_order_of_each():
    first = [line(1, "a"), line(3, "b"), line(2, "clock set back"), line(5, "c")]
    second = [line(0, "d", OPERATOR), line(4, "e", OPERATOR)]
    messages = [each.message for each in merged([first, second])]
    assert messages == ["d", "a", "b", "clock set back", "e", "c"]


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 0.9)), max_size=60), st.randoms())
def test_lines_that_are_late_by_less_than_the_window_are_ordered(events: list, chance: random.Random):
    """Each line arrives up to 0.9 s after its time."""
    ordering, printed = Reordering(1.0, 1 << 20), list[Line]()
    arrivals = sorted((time + delay, time) for time, delay in events)
    for arrival, time in arrivals:
        printed += ordering.due(arrival)
        ordering.add(line(time), arrival)
    printed += ordering.rest()
    assert len(printed) == len(events)
    assert [each.time for each in printed] == sorted(each.time for each in printed)


def test_no_line_waits_longer_than_the_window_behind_older_ones():
    ordering = Reordering(1.0, 1 << 20)
    ordering.add(line(50, "new"), 0.0)
    for number in range(20):  # a stream that is far behind
        ordering.add(line(number, "old"), 0.1 * number)
    printed = [each.message for each in ordering.due(1.0)]
    assert printed[-1] == "new"


def test_waiting_lines_take_bounded_memory():
    ordering = Reordering(1000.0, 10_000)
    printed = []
    for number in range(1000):
        ordering.add(line(number, "x" * 100), 0.0)
        printed += ordering.due(0.0)
        assert ordering._num_bytes <= 10_000
    assert printed == [line(number, "x" * 100) for number in range(len(printed))]
    assert len(printed) > 900


def test_sources_are_engine_containers_and_the_sidecar():
    status = {"containerStatuses": [{"name": "engine", "restartCount": 2}]}
    running = pod() | {"status": status}
    assert [str(each) for each in sources_of(running, ("engine", "sidecar", "operator"))] == [
        "demo-engine-0/engine",
        "demo-engine-0/sidecar",
    ]
    assert [each.component for each in sources_of(running, ["sidecar"])] == ["sidecar"]
    assert [str(each) for each in sources_of(running, ("engine", "sidecar"), is_previous=True)] == [
        "demo-engine-0/engine"
    ]


def test_document_has_the_time_in_utc_and_no_uid():
    east = datetime.fromisoformat("2026-11-25T14:00:02.5+02:00")
    assert Line(east, ENGINE, "m").document() == {
        "version": 1, "time": "2026-11-25T12:00:02.500000Z", "component": "engine", "namespace": "team",
        "pod": "demo-engine-0", "container": "engine", "message": "m",
    }  # fmt: skip
