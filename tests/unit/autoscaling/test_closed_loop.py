"""The autoscaler and exact LRU tiers in a loop: where it ends, how soon, and what it costs.

Workloads are thinned (``scale``); bounds are 16 to 512 GiB a pod, the start is 64, and there are 2 pods.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache

import pytest
from lmcache_operator.autoscaling.reasons import size_of
from lmcache_operator.autoscaling.state import Obstacle
from lmcache_operator.autoscaling.tier import Prices

from testing.workloads import requests
from testing.workloads.closed_loop import Run, Setup, scattered, simulate
from testing.workloads.requests import HOUR, Workload, chat, together, uniform, unique


@cache
def talk() -> Workload:
    return chat(24, 0.2)


@cache
def days() -> Workload:
    """70 % more sessions than on average at noon, 70 % fewer at midnight."""
    return chat(48, 0.15, seed=2, diurnal=0.7)


def sizes_of(run: Run) -> list[float]:
    return [size for _, size in run.resizes]


@pytest.mark.parametrize("workload", [unique(14), uniform(14, 4000)], ids=["unique", "uniform"])
def test_where_nothing_comes_back_it_shrinks_to_the_minimum(workload):
    """Slowly, and not before it has seen six hours; it never grows."""
    run = simulate(Setup(workload))
    assert sizes_of(run) == [43, 28.5, 19, 16]
    assert 6 <= run.resizes[0][0] <= 6.5
    assert run.resizes[-1][0] <= 11


def test_a_loop_is_jumped_to_at_once():
    """Less than 150 GiB hit nothing: no size between is any use."""
    setup = Setup(requests.loop(4, 300), route=lambda num_pods: lambda request: request.session % num_pods)
    run = simulate(setup)
    assert len(run.resizes) == 1
    hour, size = run.resizes[0]
    assert hour <= 1.1
    assert 152 <= size <= 168
    assert run.moments[-1].hits > 0.99


@cache
def talk_costs() -> tuple[Callable[[float], float], float]:
    """What each size would cost, and the best size."""
    setup = Setup(talk())
    return setup.constant(), setup.best_constant()[0]


def test_chat_comes_close_to_the_best_size_within_hours():
    cost, best = talk_costs()
    run = simulate(Setup(talk()))
    assert 0.8 * best <= run.size_at(4.2) <= 1.2 * best
    assert len(run.resizes) <= 6
    assert run.usd_per_hour <= 1.02 * cost(best)


@pytest.mark.parametrize("share", [0.25, 4.0])
def test_it_ends_at_the_best_size_from_far_below_and_far_above(share):
    """In a few changes, and with the hits that were predicted."""
    cost, best = talk_costs()
    run = simulate(Setup(talk(), start=round(share * best)))
    assert cost(run.moments[-1].size) <= 1.05 * cost(best)
    assert len(run.resizes) <= 6
    assert statistics.mean(run.surprises) <= 0.02


def test_what_the_engine_hits_is_no_reason_to_grow():
    """Its own cache of 48 GiB takes most of what the tier would hit."""
    setup = Setup(days(), engine_gib=48)
    run = simulate(setup)
    assert run.moments[-1].size == 16
    assert len(run.resizes) <= 6
    assert run.decisions[-1][1].limited_by == "Engine"
    assert run.usd_per_hour <= 1.04 * setup.best_constant()[1]


def test_days_and_nights_don_t_make_it_swing():
    run = simulate(Setup(days()))
    assert all(45 <= size <= 99 for size in run.sizes_after(12))
    assert len(run.resizes) <= 6


def test_an_hour_of_something_else_is_not_grown_for():
    """A flash crowd that would fill 150 GiB, and a scan of what never comes back."""
    calm = chat(26, 0.15, seed=4)
    crowd = requests.documents(18 * HOUR, HOUR, 150, 2400)
    scan = requests.shifted(unique(2, 40), 21 * HOUR)
    for workload in (together(calm, crowd), together(calm, scan)):
        run = simulate(Setup(workload))
        before = run.size_at(17.9)
        assert all(size <= 1.1 * before for size in run.sizes_after(17.9))


def test_the_price_of_memory_decides():
    dear = simulate(Setup(talk(), prices=Prices(2.5, 0.016, 0.016)))
    assert 16 <= dear.moments[-1].size <= 20
    free = simulate(Setup(talk(), prices=Prices(2.5, 0.0, 0.0), bounds=(16.0, 256.0)))
    assert free.moments[-1].size >= 0.92 * 256
    assert len(free.resizes) <= 5


def test_bounds_that_are_one_size_are_kept():
    run = simulate(Setup(chat(6, 0.2), bounds=(64.0, 64.0)))
    assert run.resizes == []
    assert run.decisions[-1][1].reason


def test_a_tier_that_uses_less_than_its_size_is_not_distrusted():
    """80 % of it hold rows: it asks for more, and what is predicted comes."""
    run = simulate(Setup(talk(), usable=lambda gib: 0.8 * gib))
    assert not any(decision.limited_by == "Frozen" for _, decision in run.decisions)
    assert 0.75 <= run.state.usable <= 0.87
    assert run.moments[-1].size >= 90


def test_growth_that_brings_nothing_is_taken_back_and_then_left_alone():
    """No more than 64 GiB ever hold rows."""
    run = simulate(Setup(talk(), usable=lambda gib: min(gib, 64.0)))
    frozen = [hour for hour, decision in run.decisions if decision.limited_by == "Frozen"]
    assert frozen[0] <= 8
    sizes = sizes_of(run)
    assert sizes[1] == sizes[3] == 64
    assert min(sizes[0], sizes[2]) > 64
    assert all(size == 64 for size in run.sizes_after(frozen[0] + 0.1))
    assert frozen[-1] - frozen[0] > 12
    reason = next(decision.reason for _, decision in run.decisions if "as predicted" in decision.reason)
    assert reason.endswith("back to 64Gi per pod")


def test_requests_that_are_scattered_are_told_and_not_grown_for():
    """Sixteen pods, any of which gets the next turn of a conversation."""
    run = simulate(Setup(chat(3, 1.6), num_pods=16, route=scattered))
    assert run.resizes == []
    assert run.decisions[-1][1].limited_by == "Locality"
    assert "Routing by prefix or by session would save that" in run.decisions[-1][1].reason


def test_sentence_and_number_of_a_recommendation_agree():
    run = simulate(Setup(talk()))
    changes = [decision for _, decision in run.decisions if " instead of " in decision.reason]
    assert len({decision.recommended for decision in changes}) > 1
    for decision in changes:
        assert decision.reason.startswith(f"{size_of(decision.recommended)} per pod instead of ")
        assert (
            min(decision.size, decision.recommended)
            <= decision.next
            <= max(decision.size, decision.recommended)
        )


def test_sticky_routing_of_two_pods_is_not_blamed():
    run = simulate(Setup(talk()))
    assert not any(decision.limited_by == "Locality" for _, decision in run.decisions)


def test_without_data_nothing_moves():
    """Pods do not answer from the third hour on, when it would grow."""
    gone = Obstacle("Samples", "1 of 2 pods did not answer for 3 minutes")
    run = simulate(Setup(chat(6, 0.2), obstacle=lambda time: gone if time > HOUR else None))
    assert run.resizes == []
    assert {decision.limited_by for hour, decision in run.decisions if hour > 1} == {"Samples"}
