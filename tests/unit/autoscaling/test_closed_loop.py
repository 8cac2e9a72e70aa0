"""The autoscaler and exact LRU tiers in a closed loop: final size, time to reach it, and cost.

Workloads are sampled (``scale``). There are 2 pods with bounds of 16 to 512 GiB, and they start at 64 GiB.
"""

import statistics
from collections.abc import Callable
from functools import cache

import pytest

from lmcache_operator.policy.tier import Prices
from testing.workloads import requests
from testing.workloads.closed_loop import Run, Setup, scattered, simulate
from testing.workloads.requests import HOUR, Workload, chat, together, uniform, unique

pytestmark = pytest.mark.rotating


@cache
def chat_workload() -> Workload:
    return chat(24, 0.2)


@cache
def chat_run() -> Run:
    return simulate(Setup(chat_workload()))


@cache
def diurnal_workload() -> Workload:
    """70 % more sessions than on average at noon, 70 % fewer at midnight."""
    return chat(48, 0.15, seed=2, diurnal=0.7)


def sizes_of(run: Run) -> list[float]:
    return [size for _, size in run.resizes]


@pytest.mark.parametrize("workload", [unique(14), uniform(14, 4000)], ids=["unique", "uniform"])
def test_tier_shrinks_to_the_minimum_without_repeated_prompts(workload):
    """The tier shrinks in steps after six hours of samples, and never grows."""
    run = simulate(Setup(workload))
    assert sizes_of(run) == [43, 28.5, 19, 16]
    assert 6 <= run.resizes[0][0] <= 6.5
    assert run.resizes[-1][0] <= 11


def test_looping_workload_grows_the_tier_in_one_step():
    """Sizes below 150 GiB have no hits, so intermediate steps are useless."""
    setup = Setup(requests.loop(4, 300), route=lambda num_pods: lambda request: request.session % num_pods)
    run = simulate(setup)
    assert len(run.resizes) == 1
    hour, size = run.resizes[0]
    assert hour <= 1.1
    assert 152 <= size <= 168
    assert run.moments[-1].hits > 0.99


@cache
def chat_costs() -> tuple[Callable[[float], float], float]:
    """The cost of each size, and the best size."""
    setup = Setup(chat_workload())
    return setup.constant(), setup.best_constant()[0]


def test_chat_workload_reaches_the_best_size_within_hours():
    cost, best = chat_costs()
    run = chat_run()
    assert 0.8 * best <= run.size_at(4.2) <= 1.2 * best
    assert len(run.resizes) <= 6
    assert run.usd_per_hour <= 1.02 * cost(best)
    assert not any(decision.limited_by == "Locality" for _, decision in run.decisions)  # routing is sticky


@pytest.mark.parametrize("share", [0.25, 4.0])
def test_size_converges_from_far_below_and_far_above(share):
    """Few changes are enough, and hits match the prediction."""
    cost, best = chat_costs()
    run = simulate(Setup(chat_workload(), start=round(share * best)))
    assert cost(run.moments[-1].size) <= 1.05 * cost(best)
    assert len(run.resizes) <= 6
    assert statistics.mean(run.surprises) <= 0.02


def test_hits_of_the_engine_cache_do_not_grow_the_tier():
    """The engine's own cache of 48 GiB already has most hits of the tier."""
    setup = Setup(diurnal_workload(), engine_gib=48)
    run = simulate(setup)
    assert run.moments[-1].size == 16
    assert len(run.resizes) <= 6
    assert run.decisions[-1][1].limited_by == "Engine"
    assert run.usd_per_hour <= 1.04 * setup.best_constant()[1]


def test_daily_traffic_pattern_does_not_oscillate_the_size():
    run = simulate(Setup(diurnal_workload()))
    assert all(45 <= size <= 99 for size in run.sizes_after(12))
    assert len(run.resizes) <= 6


def test_short_burst_does_not_grow_the_tier():
    """A flash crowd that would fill 150 GiB, and a scan whose prompts never repeat."""
    calm = chat(26, 0.15, seed=4)
    crowd = requests.documents(18 * HOUR, HOUR, 150, 2400)
    scan = requests.shifted(unique(2, 40), 21 * HOUR)
    for workload in (together(calm, crowd), together(calm, scan)):
        run = simulate(Setup(workload))
        before = run.size_at(17.9)
        assert all(size <= 1.1 * before for size in run.sizes_after(17.9))


def test_memory_price_determines_the_size():
    dear = simulate(Setup(chat_workload(), prices=Prices(2.5, 0.016, 0.016)))
    assert 16 <= dear.moments[-1].size <= 20
    free = simulate(Setup(chat_workload(), prices=Prices(2.5, 0.0, 0.0), bounds=(16.0, 256.0)))
    assert free.moments[-1].size >= 0.92 * 256
    assert len(free.resizes) <= 5


def test_partly_usable_tier_is_not_frozen():
    """80 % of the tier hold rows. The autoscaler grows the tier, and hits match the prediction."""
    run = simulate(Setup(chat_workload(), usable=lambda gib: 0.8 * gib))
    assert not any(decision.limited_by == "Frozen" for _, decision in run.decisions)
    assert 0.75 <= run.state.usable <= 0.87
    assert run.moments[-1].size >= 90


def test_useless_growth_is_reverted_and_then_frozen():
    """At most 64 GiB hold rows."""
    run = simulate(Setup(chat_workload(), usable=lambda gib: min(gib, 64.0)))
    frozen = [hour for hour, decision in run.decisions if decision.limited_by == "Frozen"]
    assert frozen[0] <= 8
    sizes = sizes_of(run)
    assert sizes[1] == sizes[3] == 64
    assert min(sizes[0], sizes[2]) > 64
    assert all(size == 64 for size in run.sizes_after(frozen[0] + 0.1))
    assert frozen[-1] - frozen[0] > 12
    reason = next(decision.reason for _, decision in run.decisions if "as predicted" in decision.reason)
    assert reason.startswith("back to 64Gi per pod: ")


def test_scattered_requests_are_reported_and_do_not_grow_the_tier():
    """Any of sixteen pods gets the next turn of a conversation."""
    run = simulate(Setup(chat(3, 1.6), num_pods=16, route=scattered))
    assert (run.resizes, run.decisions[-1][1].limited_by) == ([], "Locality")
    assert "Route requests by prefix or by session" in run.decisions[-1][1].reason


def test_memory_without_a_price_grows_without_verification():
    """At most 64 GiB hold rows.

    With a price, the operator would revert the growth and then freeze the size.
    """
    free = Prices(2.5, 0.0, 0.004)
    run = simulate(Setup(chat(6, 0.2), prices=free, usable=lambda gib: min(gib, 64.0), bounds=(16.0, 256.0)))
    sizes = sizes_of(run)
    assert sizes == sorted(sizes)
    assert sizes[-1] > 64
    growth = next(decision for _, decision in run.decisions if decision.next > decision.size)
    assert growth.reason.endswith("USD/h of GPU time, for memory without a price")
    assert not {decision.limited_by for _, decision in run.decisions} & {"Verifying", "Frozen"}
