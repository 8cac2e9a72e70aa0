"""Fair queue: a client's items delay another client by one item at most."""

from hypothesis import given
from hypothesis import strategies as st

from lmcache.common.fair_queue import FairQueue


def test_greedy_client_does_not_starve_another():
    queue: FairQueue[str] = FairQueue()
    queue.put(1, ["greedy"] * 1000)
    queue.put(2, ["a", "b"])
    assert [queue.take_next() for _ in range(4)] == ["greedy", "a", "greedy", "b"]
    queue.put(3, ["late"])
    assert "late" in [queue.take_next() for _ in range(2)]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 3), st.lists(st.integers(1, 9), max_size=5)),
            st.tuples(st.just("take"), st.just(0)),
            st.tuples(st.just("drop"), st.integers(0, 3), st.integers(1, 9)),
        ),
        max_size=30,
    )
)
def test_items_are_neither_lost_duplicated_nor_reordered(steps):
    queue: FairQueue[tuple[int, int, int]] = FairQueue()
    waiting: dict[int, list[tuple[int, int, int]]] = {client: [] for client in range(4)}
    number = 0
    for step in steps:
        if step[0] == "put":
            items = []
            for cost in step[2]:
                number += 1
                items.append((step[1], number, cost))
            waiting[step[1]] += items
            queue.put(step[1], items)
        elif step[0] == "take":
            if queue:
                item = queue.next_item
                assert queue.take_next() == item
                assert waiting[item[0]].pop(0) == item
        else:
            dropped = queue.drop(step[1], lambda item: item[2] == step[2])  # noqa: B023
            assert dropped == [item for item in waiting[step[1]] if item[2] == step[2]]
            waiting[step[1]] = [item for item in waiting[step[1]] if item[2] != step[2]]
        assert bool(queue) == any(waiting.values())
