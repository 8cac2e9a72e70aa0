"""The list of shards: which shards are read and written while their number changes."""

from datetime import UTC, datetime, timedelta

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmcache_operator.components.remote.shards import WINDOW, ShardCounts, next_shards
from lmcache_sidecar.files.shards import read_shards
from lmcache_store.tiers.remote.address import Endpoint

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
ALL = set(range(64))
SECOND = timedelta(seconds=1)
ENDPOINTS = [f"s-{number}.s.team.svc:6379" for number in range(64)]


def test_window_end_beyond_the_maximum_is_shortened():
    """An operator with a slow clock took over. The previous shards are still in use."""
    changing = next_shards(ShardCounts(2, 4, NOON + WINDOW + SECOND), 2, ALL, NOON)
    assert changing == ShardCounts(2, 4, NOON + WINDOW)
    assert next_shards(changing, 2, ALL, NOON + SECOND) == changing
    assert next_shards(changing, 2, ALL, NOON + WINDOW) == ShardCounts(2)


@given(st.integers(1, 64), st.integers(0, 64), st.datetimes(datetime(1990, 1, 1), datetime(2100, 1, 1)))
def test_parse_reads_written_shards(current, previous, until):
    until = until.replace(microsecond=0, tzinfo=UTC) if previous else datetime.min
    assert ShardCounts.parse(str(ShardCounts(current, previous, until))) == ShardCounts(
        current, previous, until
    )


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "0", "-1", "65", "999", "2 from 99 until 2026-01-31T12:00:00Z", "2 from 3",
        "0 from 2 until 2026-01-31T12:00:00Z", "2 from 3 until noon", "2 from 3 until 2026-01-31T12:00:00",
    ],
)  # fmt: skip
def test_parse_returns_none_for_invalid_text(text):
    assert ShardCounts.parse(text) is None


@given(st.integers(1, 64), st.integers(0, 64), st.sets(st.integers(0, 63)))
def test_sidecar_reads_the_written_document(current, previous, secure):
    document = ShardCounts(current, previous, NOON).document(ENDPOINTS, secure, "/etc/ca")
    shards_file = read_shards("f", document)
    assert shards_file.secure == {Endpoint(f"s-{n}.s.team.svc", 6379) for n in secure}
    assert shards_file.ca == ("/etc/ca" if secure else "")
    assert (len(shards_file.current), len(shards_file.previous)) == (current, previous)
    assert shards_file.until == (NOON.timestamp() if previous else 0)
    assert shards_file.current[-1] == Endpoint(f"s-{current - 1}.s.team.svc", 6379)


class ListMachine(RuleBasedStateMachine):
    """For any sequence of specs: each removed shard stays readable for the whole window, and finally the list
    matches the spec."""

    def __init__(self) -> None:
        super().__init__()
        self.now = NOON
        self.wanted = 2
        self.live = next_shards(None, self.wanted, set(), self.now)
        self.removed_at: dict[int, datetime] = {}  # shards that get no new rows

    @rule(wanted=st.integers(1, 5))
    def declare(self, wanted: int) -> None:
        self.wanted = wanted

    @rule(seconds=st.integers(0, 1200), ready=st.sets(st.integers(0, 5)), is_forgotten=st.booleans())
    def advance(self, seconds: int, ready: set[int], is_forgotten: bool) -> None:
        self.now += timedelta(seconds=seconds)
        live = ShardCounts.parse(str(self.live)) if is_forgotten else self.live
        new = next_shards(live, self.wanted, ready, self.now)
        for number in range(self.live.current, new.current):
            assert number in ready or number in range(self.live.previous)
        for number in range(max(self.live.current, self.live.previous)):
            if number < new.current:
                self.removed_at.pop(number, None)
            else:
                self.removed_at.setdefault(number, self.now)
            if number >= max(new.current, new.previous):
                assert self.now - self.removed_at[number] >= WINDOW
        self.live = new

    @invariant()
    def check_list_settles(self) -> None:
        live = self.live
        for windows in range(3):
            live = next_shards(live, self.wanted, ALL, self.now + windows * WINDOW)
        assert live == ShardCounts(self.wanted)


TestList = ListMachine.TestCase
