"""The number of shards in a closed loop with exact tiers: final number, time to reach it, and cost.

Four pods have 32 GiB each, and a shard has 64 GiB. Any pod gets the next turn of a conversation.
"""

from functools import cache
from itertools import pairwise

import pytest

from testing.workloads.closed_loop import scattered, sticky
from testing.workloads.remote_loop import RemoteSetup, simulate_remote
from testing.workloads.requests import Workload, chat, unique


@cache
def chat_workload() -> Workload:
    return chat(14, 0.4, scale=16)


@cache
def constant(count: int) -> float:
    """Cost in USD per hour with a constant number of shards."""
    return setup(chat_workload()).with_shards(count)


def setup(workload: Workload, **overrides: object) -> RemoteSetup:
    return RemoteSetup(workload, **{"num_pods": 4, "route": scattered, "start": 32.0, **overrides})


@pytest.mark.rotating
@pytest.mark.parametrize("start_count", [1, 8])
def test_number_of_shards_converges_from_both_sides(start_count):
    run = simulate_remote(setup(chat_workload(), start_count=start_count))
    assert constant(round(run.moments[-1].size / 64)) <= 1.02 * min(map(constant, range(2, 7)))
    assert len(run.resizes) <= 6
    sizes = [64 * start_count, *(size for _, size in run.resizes)]
    assert all(abs(after - before) == 64 for before, after in pairwise(sizes))


@pytest.mark.rotating
def test_unrepeated_prompts_reduce_shards_to_the_minimum():
    run = simulate_remote(setup(unique(9, 40, scale=16), start_count=3))
    assert ([size for _, size in run.resizes], run.decisions[-1][1].limited_by) == ([128, 64], "Min")


@pytest.mark.rotating
def test_sticky_routing_needs_few_shards():
    """The pods' memory has as many hits as a shared tier of the same total size."""
    shards = setup(chat(9, 0.2, scale=16), route=sticky, start=64.0, start_count=3)
    run = simulate_remote(shards)
    assert run.moments[-1].size <= 64 * 2
