"""Sizing decisions: calculated by hand, with invalid measurements, and with routing losses; shrinks."""

import json
import math
from dataclasses import asdict, replace
from itertools import pairwise

import pytest

from lmcache_operator.policy.decide import decide, points
from lmcache_operator.policy.state import Obstacle, State, Step
from lmcache_operator.policy.tier import GIB, memory_tier, remote_tier
from tests.harness.operator.known_demand import (
    BY_HAND,
    FLAT,
    HOUR,
    LARGE,
    PRICES,
    SETTLED,
    SMALL,
    STEEP,
    WIDE,
    KnownDemand,
    measurements,
    tier,
)


def test_growth_that_costs_more_than_it_saves_is_refused():
    """2 pods, 12,000 tokens/s: growth saves 0.06 * 3.00 = 0.180 USD/h, and costs 0.256."""
    decision, _ = decide(tier(), SETTLED, measurements(BY_HAND))
    assert (decision.next, decision.limited_by) == (64 * GIB, "Min")
    gain = tier().gain(BY_HAND, 64 * GIB, 96 * GIB, 1.0)
    assert (gain.saved, gain.paid) == (pytest.approx(0.180), pytest.approx(0.256))
    assert "no size between 64Gi and 96Gi saves at least" in decision.reason


def test_growth_that_saves_more_than_it_costs_is_chosen():
    """Recomputing everything costs 15.0 USD/h: growth saves 0.900, and costs 0.256."""
    decision, state = decide(tier(LARGE), SETTLED, measurements(BY_HAND))
    assert (decision.next, decision.limited_by) == (96 * GIB, "Max")
    assert decision.saving == pytest.approx(0.644)
    assert decision.reason == (
        "96Gi per pod instead of 64Gi: 6.0 percentage points more hits, 0.90 USD/h of GPU time, "
        "for 0.26 USD/h of memory"
    )
    assert state.asked == Step(64 * GIB, 96 * GIB)


def test_hits_of_the_engine_cache_reduce_the_gain():
    """Up to 80 GiB, where the curve is at 44 %, the engine's own cache has all hits.

    The net value of 0.300 - 0.256 = 0.044 is below 0.5 % of the cost of misses and memory.
    """
    service = replace(LARGE, engine_cache_bytes=80 * GIB)
    demand = KnownDemand([(64, 0.40), (80, 0.44), (96, 0.46)], measured_hits=0.4)
    decision, _ = decide(tier(service), SETTLED, measurements(demand))
    assert decision.limited_by == "Engine"
    assert "the engine's own cache of 80Gi already hits what 64Gi per pod would" in decision.reason
    assert tier(service).gain(demand, 64 * GIB, 96 * GIB, 1.0).net == pytest.approx(0.044)


def test_loading_time_reduces_the_value_of_a_hit():
    """At 3 GB/s from the remote tier, a hit is worth 56 % for the small model, and nothing for the large."""
    rates = {"load_bytes_per_second": 3e9}
    assert SMALL.usd_per_token(PRICES) == pytest.approx(6.94e-8, rel=1e-3)
    share = replace(SMALL, **rates).usd_per_token(PRICES) / SMALL.usd_per_token(PRICES)
    assert (share, replace(LARGE, **rates).usd_per_token(PRICES)) == (pytest.approx(0.56, abs=0.005), 0)
    assert SMALL.break_even_seconds(PRICES) == pytest.approx(512, abs=0.5)
    assert LARGE.break_even_seconds(PRICES) == pytest.approx(1024, abs=0.5)


def test_hits_of_lower_tiers_reduce_the_gain():
    """Each hit of the lower tiers saves half as much as a memory hit.

    To recompute everything costs 3.00 USD/h.
    """
    for lower_hits, saved, lost in ((0.0, 0.18, 0.30), (0.02, 0.15, 0.27), (0.50, 0.09, 0.15)):
        memory = tier(replace(SMALL, lower_hits=lower_hits, lower_worth=0.5))
        gains = [memory.gain(BY_HAND, 64 * GIB, gib * GIB, 1.0).saved for gib in (96, 32)]
        assert gains == pytest.approx([saved, -lost])


@pytest.mark.parametrize(
    ("change", "limited_by"),
    [
        ({"obstacle": Obstacle("Samples", "2 of 5 pods do not answer")}, "Samples"),
        ({"day": replace(STEEP, tokens_per_hour=0.0)}, "Samples"),
        ({"day": replace(STEEP, tokens_per_hour=math.nan)}, "Samples"),
        ({"settled": replace(STEEP, measured_hits=math.nan)}, "Samples"),
        ({"day": replace(STEEP, measured_hits=1.5)}, "Samples"),
        ({"size": math.nan}, "Samples"),
        ({"size": 0.0}, "Samples"),
        ({"new_bytes": math.inf}, "Samples"),
        ({"time": math.nan}, "Samples"),
        ({"time": -HOUR}, "Samples"),
    ],
)
def test_invalid_measurement_prevents_a_decision(change, limited_by):
    decision, state = decide(WIDE, SETTLED, replace(measurements(STEEP), **change))
    assert decision.limited_by == limited_by
    assert decision.reason
    assert decision.next == decision.size or math.isnan(decision.size)
    # Invalid measurements leave no trace: valid measurements continue as before.
    decision, _ = decide(WIDE, state, measurements(STEEP))
    assert decision.next > 64 * GIB


def test_infeasible_size_is_retried_after_six_hours():
    infeasible = measurements(STEEP, obstacle=Obstacle("Infeasible", "no node has free memory"))
    _, state = decide(WIDE, SETTLED, measurements(STEEP))
    decision, state = decide(WIDE, state, infeasible)
    what = decision.next, decision.limited_by, decision.reason
    assert what == (64 * GIB, "Infeasible", "no node has free memory")
    decision, state = decide(WIDE, state, measurements(STEEP, time=infeasible.time + 5 * HOUR))
    assert (decision.next, decision.limited_by) == (64 * GIB, "Cooldown")
    decision, _ = decide(WIDE, state, measurements(STEEP, time=infeasible.time + 6 * HOUR))
    assert decision.next > 64 * GIB
    # A step is not reverted to this size repeatedly either.
    reverting = replace(SETTLED, back_to=96 * GIB, calm_until=infeasible.time + HOUR)
    decision, state = decide(WIDE, reverting, measurements(STEEP))
    assert (decision.next, decision.limited_by) == (96 * GIB, "Verifying")
    _, state = decide(WIDE, state, infeasible)
    decision, _ = decide(WIDE, state, measurements(STEEP, time=infeasible.time + HOUR))
    assert (decision.next, decision.limited_by) == (64 * GIB, "Cooldown")


def test_delayed_change_is_judged_when_pods_have_the_size():
    """No decision is made during the change. When pods have the size, the change is judged."""
    _, requested = decide(WIDE, SETTLED, measurements(STEEP))
    delayed = measurements(STEEP, obstacle=Obstacle("Cooldown", "1 of 2 pods has 128Gi"))
    decision, state = decide(WIDE, requested, delayed)
    assert decision.next == 64 * GIB
    _, state = decide(WIDE, state, measurements(STEEP, size=requested.asked.new, time=delayed.time + HOUR))
    assert state.pending == requested.asked


def test_small_change_needs_a_larger_gain():
    """A growth by an eighth of an octave for 1 % more hits is not worth a change. 10 % more hits are."""
    for hits, next_size in ((0.60, 70), (0.41, 64)):
        curve = KnownDemand([(64, 0.40), (70, hits), (512, hits)], tokens_per_hour=400e6, measured_hits=0.4)
        decision, _ = decide(WIDE, SETTLED, measurements(curve))
        assert decision.next == next_size * GIB
    assert decision.reason.startswith("70Gi per pod would save ")
    assert decision.reason.endswith("more than 64Gi: too little for such a small change")


@pytest.mark.parametrize(
    "change",
    [{"prefill_tokens_per_second": 0}, {"gpus": math.nan}, {"num_pods": 0}, {"load_bytes_per_second": -1.0}],
)
def test_invalid_service_prevents_a_decision(change):
    service = replace(SMALL, **change)
    for invalid_tier in (
        memory_tier(16 * GIB, 512 * GIB, service, PRICES),
        remote_tier([1, 2, 32], 16 * GIB, service, PRICES, 1e9),
    ):
        decision, _ = decide(invalid_tier, SETTLED, measurements(STEEP))
        assert (decision.next, decision.limited_by) == (64 * GIB, "Samples")


def test_clock_change_shifts_all_deadlines():
    state = replace(SETTLED, time=1e9, frozen_until=1e9 + HOUR, shrinks_since=1e9 - HOUR)
    decision, state = decide(WIDE, state, measurements(STEEP, time=1000.0))
    assert (decision.limited_by, decision.reason) == ("Samples", "the operator's clock was set back")
    assert (state.time, state.frozen_until, state.shrinks_since) == (1000, 1000 + HOUR, 1000 - HOUR)
    assert decide(WIDE, state, measurements(STEEP, time=1000 + HOUR / 2))[0].limited_by == "Frozen"
    assert decide(WIDE, state, measurements(STEEP, time=1001 + HOUR))[0].next > 64 * GIB


def test_new_namespace_restarts_the_waiting_times():
    """There is no decision for half an hour, and no shrink for six hours."""
    state, by_minute = SETTLED, {}
    for minute in range(0, 9 * 60, 15):
        now = measurements(FLAT, time=12 * HOUR + 60 * minute, namespace="other")
        by_minute[minute], state = decide(WIDE, state, now)
    assert [minute for minute, each in by_minute.items() if "counted for" in each.reason] == [0, 15]
    assert next(minute for minute, each in by_minute.items() if each.next != each.size) == 6 * 60
    assert by_minute[30].limited_by == "Young"
    assert "waiting another" in by_minute[30].reason


def test_recommendation_is_stable_while_a_step_is_judged():
    """The recommendation stays while a step is judged, also if other sizes are slightly better."""
    decision, state = decide(WIDE, SETTLED, measurements(STEEP))
    recommended = decision.recommended
    assert recommended == decision.target > decision.next
    decision, state = decide(WIDE, state, measurements(STEEP, gib=decision.next / GIB, time=10.25 * HOUR))
    assert (decision.limited_by, decision.recommended) == ("Verifying", recommended)


@pytest.mark.parametrize(
    ("demand", "gib", "bound", "limited_by"),
    # The last one is the minimum size, rounded as by a pod that loses a part of an extent.
    [(STEEP, 4, 16, "Min"), (STEEP, 600, 512, "Max"), (FLAT, 15.99, 15.99, "Min")],
)
def test_size_outside_the_bounds_moves_to_the_bound(demand, gib, bound, limited_by):
    size = 16 if gib == bound else gib
    decision, _ = decide(WIDE, replace(SETTLED, size=size * GIB), measurements(demand, gib=gib))
    assert (decision.next, decision.limited_by) == (bound * GIB, limited_by)


def test_wrong_step_is_reverted_also_after_a_restart():
    """The reversal survives a restart of the operator. It ends after 90 minutes if pods do not follow."""
    demand = KnownDemand([(16, 0.2), (64, 0.3), (128, 0.6)], measured_hits=0.3, tokens_per_hour=400e6)
    state = replace(SETTLED, size=128 * GIB, pending=Step(64 * GIB, 128 * GIB), due=10 * HOUR)
    reasons = []
    for minutes in (0, 15, 30, 105):
        now = measurements(demand, gib=128, time=10 * HOUR + 60 * minutes, settled=demand)
        decision, state = decide(WIDE, State.from_json(json.loads(json.dumps(asdict(state)))), now)
        reasons.append(decision.reason)
        assert (decision.next == 64 * GIB) == (minutes < 90)
    assert reasons[0].startswith("back to 64Gi per pod: 128Gi per pod hit 0.0 % more prompt tokens, not 30")
    assert reasons[1] == "back to 64Gi per pod: hits of 128Gi per pod stayed below the prediction"
    now = measurements(demand, gib=64, time=12 * HOUR)
    assert decide(WIDE, replace(state, back_to=64 * GIB), now)[1].back_to == 0


def test_shards_grow_by_one_or_to_the_minimum_for_bandwidth():
    shard = 32 * GIB
    growing = remote_tier(range(1, 9), shard, SMALL, PRICES, 1e9)
    decision, _ = decide(growing, replace(SETTLED, size=2 * shard), measurements(STEEP, gib=64))
    assert (decision.next, decision.target > 3 * shard) == (3 * shard, True)
    assert decision.reason.startswith(f"{round(decision.target / shard)} shards instead of 2: ")
    service = replace(SMALL, moved_bytes_per_second=3.4e9)
    busy = remote_tier(range(1, 9), shard, service, PRICES, 1e9)
    decision, _ = decide(busy, replace(SETTLED, size=2 * shard), measurements(FLAT, gib=64))
    assert (decision.next, decision.limited_by) == (4 * shard, "Bandwidth")
    assert decision.reason == "2 shards is below the minimum for its traffic, 4 shards"
    # A shard costs 0.128 USD/h, the value of 3,602 hits of 512 tokens. 10,000 hits an hour pay for two.
    useless = remote_tier(range(1, 9), shard, service, PRICES, 10_000)
    assert useless.sizes[0] == 2 * shard


def test_points_include_bounds_current_and_recommended_size():
    curve_points = points(WIDE, SETTLED, measurements(STEEP), 108 * GIB)
    assert [point.size / GIB for point in curve_points] == [16, 32, 64, 108, 128, 256, 512]
    assert next(point.net for point in curve_points if point.size == 64 * GIB) == 0
    assert all(low.hits <= high.hits for low, high in pairwise(curve_points))


def test_state_survives_as_json():
    _, state = decide(WIDE, SETTLED, measurements(STEEP))
    assert State.from_json(json.loads(json.dumps(asdict(state)))) == state
    whole = asdict(state)
    for invalid_state in ({}, {"x": 1}, whole | {"time": "x"}, whole | {"pending": {"old": 1}}):
        with pytest.raises(ValueError, match="saved autoscaling state is invalid"):
            State.from_json(invalid_state)


def test_profitable_growth_is_chosen_despite_routing_losses():
    without_loss, decision = (
        decide(WIDE, SETTLED, measurements(STEEP, locality_loss=loss))[0] for loss in (0.0, 0.9)
    )
    assert (decision.next, decision.limited_by) == (without_loss.next, without_loss.limited_by)
    assert f"{without_loss.reason}; 90.0 % of prompt tokens miss because another pod " in decision.reason


CHURN = Obstacle("Cooldown", "7 of 8 pods are ready and match the spec")


@pytest.mark.parametrize(("num_busy", "hours"), [(1, 1.25), (2, 2.0), (4, 4.0)])
def test_rollouts_delay_a_shrink_but_do_not_prevent_it(num_busy, hours):
    """Only time without a rollout counts, and the shrink needs an hour of it."""
    state, num_decisions = replace(SETTLED, time=10 * HOUR, shrinks_since=10 * HOUR), 0
    while True:
        num_decisions += 1
        is_busy = num_decisions % (num_busy + 1) and num_busy > 1
        now = measurements(FLAT, time=10 * HOUR + 900 * num_decisions, obstacle=CHURN if is_busy else None)
        decision, state = decide(WIDE, state, now)
        if decision.next < decision.size:
            break
        assert num_decisions < 100
    assert 900 * num_decisions / HOUR >= 1
    assert num_decisions >= 4 * num_busy


@pytest.mark.parametrize(("measured", "size"), [(0.40, 64), (0.37, 64), (0.10, 96)])
def test_shrink_is_reverted_if_hits_fall(measured, size):
    """The curve is flat, as below the size of the engine's own cache."""
    step = Step(96 * GIB, 64 * GIB)
    state = replace(SETTLED, time=10 * HOUR, shrinks_since=None, pending=step, due=10 * HOUR)
    after = replace(FLAT, measured_hits=measured)
    decision, state = decide(WIDE, state, measurements(after, time=10.1 * HOUR, settled=after))
    assert decision.next == size * GIB
    if size == 96:
        assert decision.reason.startswith("back to 96Gi per pod: 64Gi per pod hit 30.0 % fewer")
        assert state.no_shrink_until >= 34 * HOUR
