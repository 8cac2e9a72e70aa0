"""Holds: budgets, ranks, ends and releases of what hints retain."""

import random

import pytest

from lmcache_store.tiers.memory import holds
from lmcache_store.tiers.memory.holds import Hold, Holds

A, B = b"a", b"b"


class Table:
    """Holds with a clock. The tenants a and b have an account each."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ended: list[Hold] = []
        self.holds = Holds(lambda: self.now, lambda tenant: tenant)
        self.holds.on_end = self.ended.append

    def add(self, keys, *, end=10.0, priority=0, tenant=A, budget=100, slots=1) -> Hold:
        hold = Hold(tenant, "request", "message", "action", end, priority)
        self.holds.add(hold, [(key.encode(), slots) for key in keys.split()], budget)
        return hold

    def held(self, keys: str) -> list[Hold | None]:
        return [self.holds.of(key.encode()) for key in keys.split()]


@pytest.fixture
def table():
    return Table()


def test_hold_ends_in_time(table):
    hold = table.add("a b")
    assert table.held("a b c") == [hold, hold, None]
    table.now = 10.0
    assert table.held("a b") == [None, None]
    assert table.holds.present == []
    assert table.ended == [hold]
    assert not table.holds


@pytest.mark.parametrize(
    ("first", "second", "is_second"),
    [((0, 10.0), (0, 11.0), True), ((0, 10.0), (0, 9.0), False), ((1, 5.0), (0, 9.0), False),
     ((0, 9.0), (1, 5.0), True)],
)  # fmt: skip
def test_a_key_has_the_hold_of_the_highest_rank(table, first, second, is_second):
    holds_of_key = [table.add("a", priority=priority, end=end) for priority, end in (first, second)]
    assert table.held("a") == [holds_of_key[is_second]]


def test_a_hold_that_lost_all_keys_has_ended(table):
    first = table.add("a", end=5.0)
    second = table.add("a b", end=9.0)
    assert table.ended == [first]
    assert table.holds.present == [second]


def test_an_expired_hold_does_not_win(table):
    table.add("a", priority=9, end=5.0)
    table.now = 6.0
    second = table.add("a")
    assert table.held("a") == [second]


def test_a_full_budget_drops_the_last_chunks_of_the_lowest_hold(table):
    first, second = table.add("a b c", end=5.0, budget=4), table.add("d e", end=9.0, budget=4)
    assert table.held("a b c d e") == [first, first, None, second, second]
    third = table.add("f g h", priority=1, end=1.0, budget=4)
    assert table.held("a b d e f g h") == [None, None, second, None, third, third, third]
    assert table.ended == [first]


def test_room_is_what_higher_holds_leave(table):
    table.add("a b", priority=1, end=5.0)
    table.add("c", end=9.0, slots=3)
    table.add("d", end=9.0, tenant=B)
    assert table.holds.room(A, (2, 1.0), 10) == 10
    assert table.holds.room(A, (0, 20.0), 10) == 8
    assert table.holds.room(A, (0, 1.0), 10) == 5
    assert table.holds.room(A, (0, 1.0), 4) == 0
    table.now = 9.0
    assert table.holds.room(A, (0, 20.0), 10) == 10


def test_accounts_do_not_touch_each_other(table):
    first = table.add("a b", tenant=A, budget=2, end=1.0)
    table.add("c d e f", tenant=B, budget=2, priority=9)
    assert table.held("a b") == [first, first]


def test_release_ends_the_hold_of_the_last_key_only(table):
    shared = table.add("a b", priority=5)
    session = table.add("a b c d")
    released = table.holds.release([b"a", b"b", b"c", b"d", b"e"])
    assert released == [b"c", b"d", b"e"]
    assert table.held("a b c d") == [shared, shared, None, None]
    assert table.ended == [session]


def test_later_rows_of_a_request_join_its_hold_while_there_is_room(table):
    hold = table.add("a", budget=2)
    table.holds.open("request", hold)
    for key in (b"b", b"c"):
        table.holds.join("request", key, 1, lambda tenant: 2)
    table.holds.join("other", b"d", 1, lambda tenant: 2)
    assert table.held("a b c d") == [hold, hold, None, None]
    table.now = 10.0
    table.holds.join("request", b"e", 1, lambda tenant: 2)
    assert table.held("e") == [None]


def test_number_of_holds_is_bounded(table, monkeypatch):
    monkeypatch.setattr(holds, "MAX_HOLDS", 4)
    added = [table.add(f"k{number}", end=10.0 + number) for number in range(9)]
    assert table.holds.present == added[5:]
    assert table.ended == added[:5]
    assert table.holds.room(A, (0, 1.0), 100) == 0
    assert table.holds.room(A, (0, 99.0), 100) == 100


def test_slots_are_counted_in_random_sequences(table):
    choices = random.Random(0)
    for _ in range(3000):
        table.now += choices.random()
        end, priority = table.now + choices.randrange(1, 9), choices.randrange(3)
        tenant = choices.choice((A, B))
        keys = [f"{tenant.decode()}{choices.randrange(40)}" for _ in range(choices.randrange(1, 8))]
        match choices.randrange(4):
            case 0:
                table.holds.release([key.encode() for key in keys])
            case 1:
                table.holds.regroup()
            case _:
                budget = {"budget": 20, "slots": choices.randrange(1, 4)}
                table.add(" ".join(keys), end=end, priority=priority, tenant=tenant, **budget)
        present = table.holds.present
        for account in (A, B):
            mine = [hold for hold in present if hold.tenant == account]
            assert table.holds._num_slots[account] == sum(hold.num_slots for hold in mine) <= 20
        assert {key for hold in present for key in hold.keys} == set(table.holds._by_key)
        assert all(hold.num_slots == sum(hold.keys.values()) for hold in present)


def test_ended_holds_are_forgotten(table):
    """A session that repeats its hint replaces its hold each time."""
    for number in range(2000):
        table.add("a b c", end=1e6 + number)
    assert len(table.holds) == 1
    assert len(table.holds._ends) < 200
    assert len(table.holds._queues[A]) < 200
