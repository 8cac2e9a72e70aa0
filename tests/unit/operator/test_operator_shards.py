"""The list of shards: what is read and written where, whatever becomes of the number that is declared."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import hypothesis.strategies as st
import pytest
import yaml
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from lmcache_operator.components.remote.shards import WINDOW, Shards, next_shards
from lmcache_sidecar.shards import read_shards

from lmcache.tiers.remote.address import Endpoint

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
ALL = set(range(64))
SECOND = timedelta(seconds=1)
ENDPOINTS = [f"s-{number}.s.team.svc:6379" for number in range(64)]


def test_the_first_list_is_what_is_declared():
    assert next_shards(None, 3, set(), NOON) == Shards(3)


def test_shards_that_come_are_used_when_all_of_them_are_ready():
    assert next_shards(Shards(2), 4, {0, 1, 2}, NOON) == Shards(2)
    assert next_shards(Shards(2), 4, {2, 3}, NOON) == Shards(4, 2, NOON + WINDOW)


def test_shards_that_go_are_read_for_a_while():
    during = next_shards(Shards(4), 2, set(), NOON)
    assert during == Shards(2, 4, NOON + WINDOW)
    assert next_shards(during, 2, ALL, NOON + WINDOW - SECOND) == during
    assert next_shards(during, 2, ALL, NOON + WINDOW) == Shards(2)


def test_a_window_that_seems_too_long_is_shortened():
    """An operator whose clock is behind took over. What it would drop now is still in use."""
    during = next_shards(Shards(2, 4, NOON + WINDOW + SECOND), 2, ALL, NOON)
    assert during == Shards(2, 4, NOON + WINDOW)
    assert next_shards(during, 2, ALL, NOON + SECOND) == during
    assert next_shards(during, 2, ALL, NOON + WINDOW) == Shards(2)


def test_there_is_one_change_at_a_time():
    during = Shards(2, 4, NOON + WINDOW)
    assert next_shards(during, 8, ALL, NOON) == during
    assert next_shards(during, 8, ALL, NOON + WINDOW) == Shards(8, 2, NOON + 2 * WINDOW)


@given(st.integers(1, 64), st.integers(0, 64), st.datetimes(datetime(1990, 1, 1), datetime(2100, 1, 1)))
def test_what_is_written_is_read(current, previous, until):
    until = until.replace(microsecond=0, tzinfo=UTC) if previous else datetime.min
    assert Shards.parse(str(Shards(current, previous, until))) == Shards(current, previous, until)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "0",
        "-1",
        "65",
        "999",
        "2 from 99 until 2026-01-31T12:00:00Z",
        "0 from 2 until 2026-01-31T12:00:00Z",
        "2 from 3",
        "2 from 3 until noon",
        "2 from 3 until 2026-01-31T12:00:00",
    ],
)
def test_what_somebody_else_wrote_is_nothing(text):
    assert Shards.parse(text) is None


@given(st.integers(1, 64), st.integers(0, 64), st.sets(st.integers(0, 63)))
def test_sidecars_understand_it(current, previous, secure):
    document = Shards(current, previous, NOON).document(ENDPOINTS, secure, "/etc/ca")
    read = read_shards("f", document)
    assert read.secure == {Endpoint(f"s-{n}.s.team.svc", 6379) for n in secure}
    assert read.ca == ("/etc/ca" if secure else "")
    assert (len(read.current), len(read.previous)) == (current, previous)
    assert read.until == (NOON.timestamp() if previous else 0)
    assert read.current[-1] == Endpoint(f"s-{current - 1}.s.team.svc", 6379)


def test_the_file_names_the_shards():
    document = Shards(1, 2, NOON).document(["a:1", "b:1"], set(), "/ca")
    assert yaml.load(document, yaml.BaseLoader) == {
        "current": ["a:1"], "previous": ["a:1", "b:1"], "until": "2026-01-31T12:00:00Z"
    }  # fmt: skip
    assert yaml.safe_load(Shards(2).document(["a:1", "b:1"], {1}, "/ca")) == {
        "current": ["a:1", "b:1"], "tls": ["b:1"], "ca": "/ca"
    }  # fmt: skip


class ListMachine(RuleBasedStateMachine):
    """Whatever is declared and whenever one looks: no shard leaves the list without having been read for as
    long as it should, and in the end the list is what is declared."""

    def __init__(self) -> None:
        super().__init__()
        self.now = NOON
        self.wanted = 2
        self.live = next_shards(None, self.wanted, set(), self.now)
        self.left_at: dict[int, datetime] = {}  # shards that are not written to any more

    @rule(wanted=st.integers(1, 5))
    def declare(self, wanted: int) -> None:
        self.wanted = wanted

    @rule(seconds=st.integers(0, 1200), ready=st.sets(st.integers(0, 5)), is_forgotten=st.booleans())
    def look(self, seconds: int, ready: set[int], is_forgotten: bool) -> None:
        self.now += timedelta(seconds=seconds)
        live = Shards.parse(str(self.live)) if is_forgotten else self.live
        new = next_shards(live, self.wanted, ready, self.now)
        for number in range(self.live.current, new.current):
            assert number in ready or number in range(self.live.previous)
        for number in range(max(self.live.current, self.live.previous)):
            if number < new.current:
                self.left_at.pop(number, None)
            else:
                self.left_at.setdefault(number, self.now)
            if number >= max(new.current, new.previous):
                assert self.now - self.left_at[number] >= WINDOW
        self.live = new

    @invariant()
    def it_settles(self) -> None:
        live = self.live
        for windows in range(3):
            live = next_shards(live, self.wanted, ALL, self.now + windows * WINDOW)
        assert live == Shards(self.wanted)


TestList = ListMachine.TestCase
