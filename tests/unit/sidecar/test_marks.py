"""Tables of documents' marks, and their exchange with other pods."""

import asyncio
import logging
import math
import struct
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_client.rpc import service
from lmcache_sidecar import marks_exchange
from lmcache_sidecar.marks import MAX_NAMESPACES, MarkScope, MarkTables, ScopeMarks
from lmcache_sidecar.marks_exchange import MarksExchange
from lmcache_store.tiers.errors import ServerError, TierUnavailableError
from tests.harness.loops import in_a_loop

PLACE = MarkScope(b"n" * 32, is_private=False)
PRIVATE = MarkScope(b"n" * 32, is_private=True)
MANY = 16


def array(*marks: int) -> np.ndarray:
    return np.array(marks, np.uint64)


def pack(*marks: int) -> bytes:
    return struct.pack(f"<{len(marks)}Q", *marks)


@pytest.fixture
def small(monkeypatch):
    """Tables of at most 16 marks, and pages of 5."""
    with monkeypatch.context() as patch:
        patch.setattr(service, "MAX_MARKS", MANY)
        patch.setattr(service, "MAX_MARKS_PER_CALL", 5)
        yield


@given(st.lists(st.lists(st.integers(0, 40), max_size=24), max_size=12), st.integers(1, 1 << 63))
@pytest.mark.usefixtures("small")
def test_table_is_a_bounded_list_without_repetitions(calls, first):
    """A reader that asks after each call receives each new mark once, in order."""
    table, model, received, since = ScopeMarks(first), deque[int](), [], 0
    added: list[int] = []
    for marks in calls:
        new = [mark for mark in dict.fromkeys(marks[-MANY:]) if mark not in model]
        assert table.add(array(*marks)).tolist() == new
        added += new
        model.extend(new)
        if len(model) > MANY:
            while len(model) > MANY * 7 // 8:
                model.popleft()
        assert len(table) == len(model)
        page = [0] * service.MAX_MARKS_PER_CALL
        while len(page) == service.MAX_MARKS_PER_CALL:
            page, since = (table.since(since)[0].tolist(), table.since(since)[1])
            received += page
        assert received[len(received) - len(model) :] == list(model)
        assert table.since(0)[0].tolist() == list(model)[:5]
        assert sorted(table.unknown_to(array(*range(20)))) == sorted(mark for mark in model if mark >= 20)
    assert not len(table.since((1 << 64) - 1)[0])


def test_marks_of_a_dropped_table_are_not_confused_with_new_ones():
    tables = MarkTables()
    tables.table(PLACE).add(array(1, 2, 3))
    _, since = tables.table(PLACE).since(0)
    for number in range(MAX_NAMESPACES):
        tables.table(MarkScope(bytes([number]) * 32, is_private=False))
    assert len(tables) == 0
    tables.table(PLACE).add(array(4))
    assert tables.table(PLACE).since(since)[0].tolist() == [4]


def test_least_recently_used_table_is_dropped():
    tables = MarkTables()
    for number in range(MAX_NAMESPACES):
        tables.table(MarkScope(bytes([number]) * 32, is_private=False)).add(array(number))
    tables.table(MarkScope(bytes(32), is_private=False))
    tables.table(PLACE)
    assert len(tables.table(MarkScope(bytes(32), is_private=False))) == 1
    assert len(tables.table(MarkScope(bytes([1]) * 32, is_private=False))) == 0


class TierDouble:
    """The remote tier of pods that share ``stored``, marks with their scores."""

    address = "redis.test:6379"

    def __init__(self) -> None:
        self.stored: dict[int, int] = {}
        self.calls: list[tuple[list[int], int, int]] = []  # added, since, limit
        self.error: Exception | None = None
        self.meanwhile: Callable[[], object] = lambda: None  # runs while Redis answers

    def exchange_marks(self, namespace, added, now, capacity, query) -> bytes:
        self.meanwhile()
        marks = list(struct.unpack(f"<{len(added) // 8}Q", added))
        self.calls.append((marks, *query))
        if self.error is not None:
            raise self.error
        self.stored |= dict.fromkeys(marks, now)
        marks = [mark for mark, score in self.stored.items() if score >= query.since]
        return pack(*marks[-query.limit :])


class Pod:
    """The tables of a sidecar, and their exchange."""

    def __init__(self, tier: TierDouble) -> None:
        self.tables = MarkTables()
        self.exchange = MarksExchange(self.tables, tier)

    def share(self, *marks: int, place: MarkScope = PLACE) -> list[int]:
        table = self.tables.table(place)
        table.add_of_engine(array(*marks))
        return table.since(0)[0].tolist()


@in_a_loop
async def test_pods_exchange_marks():
    tier = TierDouble()
    first, second = Pod(tier), Pod(tier)
    first.share(1, 2)
    assert await first.exchange.step() == 5
    second.share()
    await second.exchange.step()
    assert second.share(3) == [1, 2, 3]
    await second.exchange.step()
    first.share()
    await first.exchange.step()
    assert first.share() == [1, 2, 3]
    assert [added for added, *_ in tier.calls] == [[1, 2], [], [3], []], "each mark is sent once"
    assert [since > 0 for _, since, _ in tier.calls] == [False, False, True, True], "all marks are read once"


@in_a_loop
async def test_engine_that_asks_while_redis_answers_loses_no_marks():
    tier = TierDouble()
    first, second = Pod(tier), Pod(tier)
    first.share(1, 2)
    await first.exchange.step()
    second.share()
    tier.meanwhile = second.share
    await second.exchange.step()
    assert second.share() == [1, 2]


@in_a_loop
async def test_calls_of_engines_run_while_many_marks_are_added(monkeypatch):
    tier, add = TierDouble(), ScopeMarks.add
    pod = Pod(tier)
    tier.stored = dict.fromkeys(range(40_000), 0)
    loop, order = asyncio.get_running_loop(), []

    def note(table, marks):
        order.append(len(marks))
        loop.call_soon(order.append, "call")
        return add(table, marks)

    pod.share()
    monkeypatch.setattr(ScopeMarks, "add", note)
    await pod.exchange.step()
    assert order[::2] == [8192] * 4 + [40_000 - 4 * 8192]
    assert set(order[1::2]) == {"call"}
    assert len(pod.tables) == 40_000


@in_a_loop
@pytest.mark.usefixtures("small")
async def test_full_table_does_not_receive_its_oldest_marks_again():
    tier = TierDouble()
    pod = Pod(tier)
    tier.stored = dict.fromkeys(range(100, 100 + MANY), 0)
    for marks in (), (1, 2, 3):
        pod.share(*marks)
        await pod.exchange.step()
    table = pod.tables.table(PLACE)
    end, table.next_all = table.end, -math.inf  # ten minutes later
    await pod.exchange.step()
    assert table.end == end


@in_a_loop
async def test_private_marks_and_idle_namespaces_are_not_exchanged():
    tier = TierDouble()
    pod = Pod(tier)
    assert pod.share(1, place=PRIVATE) == [1]
    assert not pod.tables.asked.is_set()
    await pod.exchange.step()
    assert tier.calls == []
    assert pod.share(2) == [2]
    assert pod.tables.asked.is_set()
    await pod.exchange.step()
    assert not pod.tables.asked.is_set()
    await pod.exchange.step()
    assert [added for added, *_ in tier.calls] == [[2]]


@in_a_loop
async def test_marks_are_sent_again_after_a_failure_and_after_redis_lost_them(caplog):
    tier = TierDouble()
    pod = Pod(tier)
    tier.error = TierUnavailableError("down")
    pauses = []
    for _ in range(3):
        pod.share(1)
        pauses.append(await pod.exchange.step())
    assert pauses == [5, 10, 20]
    assert not caplog.records, "the tier logs an outage"
    tier.error = None
    pod.share()
    assert await pod.exchange.step() == 5
    assert tier.stored.keys() == {1}
    tier.stored.clear()
    pod.tables.table(PLACE).next_all = -math.inf  # ten minutes later
    for _ in range(2):
        pod.share()
        await pod.exchange.step()
    assert tier.stored.keys() == {1}


@in_a_loop
async def test_refusal_is_logged_once_with_the_remedy(caplog):
    tier = TierDouble()
    pod = Pod(tier)
    tier.error = ServerError("NOPERM this user has no permissions to run the 'zadd' command")
    for _ in range(3):
        pod.share(1)
        await pod.exchange.step()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith(
        "'zadd' command. Grant the Redis user +zadd +zremrangebyrank +expire +zrevrangebyscore"
    )
    assert not record.exc_info
    tier.error = None
    pod.share()
    assert await pod.exchange.step() == marks_exchange._PAUSE_SECONDS


@in_a_loop
async def test_bug_in_an_exchange_is_logged_and_the_next_one_works(caplog):
    tier = TierDouble()
    pod = Pod(tier)
    tier.error = RuntimeError("boom")
    pod.share(1)
    await pod.exchange.step()
    assert caplog.records[0].exc_info
    tier.error = None
    pod.share()
    await pod.exchange.step()
    assert tier.stored.keys() == {1}
