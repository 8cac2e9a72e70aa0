import hypothesis.strategies as st
from hypothesis import given

from lmcache_store.tiers.memory.contracts import Slot
from lmcache_store.tiers.policy import LRU
from lmcache_store.tiers.tiered.write_queue import Write, WriteQueue
from tests.harness.tiers.memory_oracle import Order


def order(policy: LRU) -> list[int]:
    """Return the rows in eviction order."""
    return list(policy.victims())


def test_rows_of_forgotten_groups_keep_their_position(monkeypatch):
    monkeypatch.setattr("lmcache_store.tiers.policy._MAX_GROUPS", 2)
    policy = LRU(16)
    for row, group in ((1, "a"), (2, "a"), (3, "b"), (4, "c"), (5, "a")):
        policy.admit(row, group)
    assert order(policy) == [2, 1, 3, 4, 5]
    assert len(policy._groups) == 2
    assert len(policy._ends) == 2


def test_number_of_remembered_groups_is_bounded():
    policy = LRU(5000)
    for row in range(5000):
        policy.admit(row, row)
    assert len(policy._groups) < 2500
    assert len(policy._ends) < 5000
    assert order(policy) == list(range(5000))


ROWS = st.integers(0, 7)
CALLS = st.one_of(
    st.tuples(st.just("admit"), ROWS, st.sampled_from(["a", "b", "c", None])),
    st.tuples(st.just("touch"), st.lists(ROWS, max_size=5), st.sampled_from(["a", "b", "c", None])),
    st.tuples(st.just("remove"), ROWS, st.none()),
)


@given(st.lists(CALLS, max_size=40))
def test_lru_matches_oracle_lists(calls):
    policy, oracle = LRU(8), Order()
    for name, rows, group in calls:
        if name == "admit":
            policy.admit(rows, group)
            oracle.add_tail(rows, group or object())
        elif name == "touch":
            policy.touch(rows, group)
            oracle.add_head(list(dict.fromkeys(rows)), group or object())
        else:
            policy.remove(rows)
            oracle.remove(rows)
        assert order(policy) == oracle.victims()
        assert list(policy.victims(sparing="a")) == oracle.victims(sparing="a")
    for row in range(8):
        policy.remove(row)
    assert not policy._groups
    assert not policy._ends


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans()), max_size=60))
def test_write_queue_matches_a_list(capacity, steps):
    queue = WriteQueue(capacity)
    oracle: list[Write] = []
    for number, (depth, is_pop, is_first) in enumerate(steps):
        if is_pop:
            assert queue.pop() == (oracle.pop(0) if oracle else None)
            continue
        write = Write(Slot(number, number), depth, None)
        dropped = queue.push(write, is_first=is_first)
        oracle.insert(0 if is_first else len(oracle), write)
        if len(oracle) > capacity:
            assert dropped.depth == max(write.depth for write in oracle)
            oracle.remove(dropped)
        else:
            assert dropped is None
        assert len(queue) == len(oracle)
    assert [queue.pop() for _ in oracle] == oracle


def test_write_queue_forgets_removed_rows():
    queue = WriteQueue(4)
    for number in range(1000):
        queue.push(Write(Slot(number, 1), 0, None))
        if number:
            queue.pop()
    (tenant_queue,) = queue._by_tenant.values()
    assert len(tenant_queue._deepest) <= 20


def test_write_queue_serves_tenants_in_turn_and_drops_rows_of_the_flooding_one():
    queue = WriteQueue(8)
    for number in range(20):
        queue.push(Write(Slot(number, 1), number % 8), b"flood")
    dropped = queue.push(Write(Slot(100, 1), 90), b"quiet")
    assert dropped.slot.row < 100  # not the new row, although it is the deepest
    queue.push(Write(Slot(101, 1), 91), b"quiet")
    assert len(queue) == 8
    first_rows = [queue.pop().slot.row for _ in range(4)]
    assert [row >= 100 for row in first_rows] == [False, True, False, True]
