"""The number of shards and exact tiers in a loop: where it ends, how soon, and what it costs.

Four pods have 32 GiB each, any of them gets the next turn of a conversation, and a shard has 64 GiB.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from testing.workloads.closed_loop import scattered, sticky
from testing.workloads.remote_loop import RemoteSetup, simulate_remote
from testing.workloads.requests import Workload, chat, row_hash, unique
from testing.workloads.tiers import Rows, Service, Shards, owner


@cache
def talk() -> Workload:
    return chat(14, 0.4, scale=16)


@cache
def constant(count: int) -> float:
    """USD per hour."""
    return setup(talk()).with_shards(count)


def setup(workload: Workload, **others: object) -> RemoteSetup:
    return RemoteSetup(workload, **{"num_pods": 4, "route": scattered, "start": 32.0, **others})


@pytest.mark.parametrize("start_count", [1, 8])
def test_it_comes_close_to_the_best_number_from_either_side(start_count):
    run = simulate_remote(setup(talk(), start_count=start_count))
    assert constant(round(run.moments[-1].size / 64)) <= 1.02 * min(map(constant, range(2, 7)))
    assert len(run.resizes) <= 6
    sizes = [64 * start_count, *(size for _, size in run.resizes)]
    assert all(abs(after - before) == 64 for before, after in pairwise(sizes))


def test_what_never_comes_back_gets_no_shards_however_much_is_written():
    run = simulate_remote(setup(unique(9, 40, scale=16), start_count=3))
    assert [size for _, size in run.resizes] == [128, 64]
    assert run.decisions[-1][1].limited_by == "Min"


def test_pods_that_keep_their_sessions_need_few_shards():
    """Their own memory hits what a tier of the same size as all of it would."""
    shards = setup(chat(9, 0.2, scale=16), route=sticky, start=64.0, start_count=3)
    run = simulate_remote(shards)
    assert run.moments[-1].size <= 64 * 2


def test_refreshing_by_what_the_tier_lives_for_keeps_what_is_hot():
    """Every 600 s is too rare for a tier that lives as long: what pods hit themselves is pushed out."""
    assert constant(4) < setup(talk(), refresh=600.0).with_shards(4)


def test_a_row_stays_or_goes_to_the_new_shard():
    keys = [row_hash(9, number) for number in range(4000)]
    moved = [owner(key, 4) for key in keys if owner(key, 4) != owner(key, 3)]
    assert set(moved) == {3}
    assert len(moved) / len(keys) == pytest.approx(1 / 4, abs=0.03)


def test_what_moved_is_still_read_where_it_was_and_written_anew():
    keys = [row_hash(9, number) for number in range(400)]
    shards = Shards(3, 400)
    shards.touch(keys, 0, 0.0)
    shards.resize(4, 1000.0)
    assert shards.run(keys, 0, 1000.0) == 400
    assert shards.run(keys, 0, 1000.0 + Shards.TRANSITION) < 400
    shards.touch(keys, 0, 1001.0)
    assert shards.run(keys, 0, 1000.0 + Shards.TRANSITION) == 400
    shards.resize(2, 5000.0)
    assert shards.run(keys, 0, 5000.0) == 400
    assert shards.run(keys, 0, 5000.0 + Shards.TRANSITION) < 400


def test_a_service_asks_the_nearest_first_and_its_tiers_are_lru():
    pods = Service(2, engine_rows=2, memory_rows=4, remote=Shards(2, 100))
    assert pods.serve(0, [1, 2, 3, 4, 5, 6]) == (0, 0, 0, 6)
    # The tail was touched first: the engine has 1 and 2, the memory 1 to 4, and the shards all.
    assert pods.serve(0, [1, 2, 3, 4, 5, 7]) == (2, 2, 1, 1)
    assert pods.serve(1, [1, 2, 3]) == (0, 0, 3, 0)
    rows = Rows(3)
    rows.touch([1, 2, 3])
    rows.resize(2)
    assert list(rows) == [2, 1]
