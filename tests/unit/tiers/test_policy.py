from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from lmcache.tiers.base import Slot
from lmcache.tiers.policy import LRU
from lmcache.tiers.writes import WriteQueue


def order(policy: LRU) -> list[int]:
    """Return the rows as they would go."""
    return list(policy.victims())


def test_tails_go_before_heads():
    policy = LRU()
    policy.admit([1, 2, 3])
    policy.admit([7, 8, 9])
    policy.touch([1, 2])
    assert order(policy) == [3, 9, 8, 7, 2, 1]


def test_touching_what_is_not_held_holds_nothing():
    policy = LRU()
    policy.admit([1])
    policy.touch([5])
    policy.remove(6)
    assert order(policy) == [1]


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans()), max_size=60))
def test_write_queue_against_a_list(capacity, steps):
    queue = WriteQueue(capacity)
    oracle: list[tuple[Slot, int]] = []
    for number, (depth, is_pop, is_first) in enumerate(steps):
        if is_pop:
            assert queue.pop() == (oracle.pop(0) if oracle else None)
            continue
        slot = Slot(number, number)
        dropped = queue.push(slot, depth, is_first=is_first)
        oracle.insert(0 if is_first else len(oracle), (slot, depth))
        if len(oracle) > capacity:
            deepest = max(depth for _, depth in oracle)
            assert (dropped, deepest) in oracle
            oracle.remove((dropped, deepest))
        else:
            assert dropped is None
        assert len(queue) == len(oracle)
    assert [queue.pop() for _ in oracle] == oracle


def test_write_queue_forgets_rows_that_left():
    queue = WriteQueue(4)
    for number in range(1000):
        queue.push(Slot(number, 1), 0)
        queue.pop()
    assert len(queue._deepest) <= 9
