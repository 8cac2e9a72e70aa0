"""The decision by hand, for whatever is measured, and for any curve."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_operator.autoscaling.decide import DECIDE_SECONDS, decide, points
from lmcache_operator.autoscaling.state import Obstacle, Seen, State, Step
from lmcache_operator.autoscaling.tier import GIB, Prices, Service, memory_tier, remote_tier

from lmcache.curves import Difference

HOUR = 3600.0
PRICES = Prices(gpu_hour=2.50, memory_gib_hour=0.004, shard_gib_hour=0.004)
SMALL = Service(
    num_pods=2, gpus=1, prefill_tokens_per_second=10_000, kv_bytes_per_token=128 << 10, tokens_per_access=512
)
LARGE = Service(
    num_pods=2, gpus=4, prefill_tokens_per_second=8_000, kv_bytes_per_token=320 << 10, tokens_per_access=512
)


@dataclass
class Known:
    """Demand whose curve is known: points (GiB, hit ratio), straight between them."""

    curve: list[tuple[float, float]]
    tokens_per_hour: float = 43.2e6
    measured_hits: float = 0.4
    error: float = 0.0
    num_accesses: float = 1e6

    @property
    def accesses_per_hour(self) -> float:
        return self.tokens_per_hour / 512

    def hits(self, size: float) -> float:
        gib = size / GIB
        for (below, low), (above, high) in pairwise([(0.0, 0.0), *self.curve]):
            if gib <= above:
                return low + (high - low) * (gib - below) / (above - below)
        return self.curve[-1][1]

    def between(self, smaller: float, larger: float) -> Difference:
        return Difference(self.hits(larger) - self.hits(smaller), self.error)


def seen(demand: Known, gib: float = 64.0, time: float = 10 * HOUR, **others: object) -> Seen:
    values = {
        "time": time, "namespace": "ns", "size": gib * GIB, "fast": demand, "day": demand,
        "settled": replace(demand, num_accesses=0),  # nothing to judge a step by
        "new_bytes": 1e15, "miss_bytes_per_second": 1e9,
    }  # fmt: skip
    return Seen(**{**values, **others})


OLD = State(namespace="ns", time=0.0, size=64 * GIB, usable=1.0, shrinks_since=0.0)
"""Long known, calm, and wholly usable, so that figures are those of a calculation by hand."""


def tier(service: Service = SMALL, lowest: float = 64, highest: float = 96, prices: Prices = PRICES):
    """By default there is one other size than 64 GiB."""
    return replace(
        memory_tier(lowest * GIB, highest * GIB, service, prices), sizes=(lowest * GIB, highest * GIB)
    )


BY_HAND = Known([(32, 0.30), (64, 0.40), (96, 0.46)])


def test_by_hand_a_gain_that_costs_more_than_it_saves_stays():
    """2 pods, 12,000 tokens/s: 0.06 * 3.00 = 0.180 USD/h saved, 0.256 paid."""
    decision, _ = decide(tier(), OLD, seen(BY_HAND))
    assert (decision.next, decision.limited_by) == (64 * GIB, "Min")
    gain = tier().gain(BY_HAND, 64 * GIB, 96 * GIB, 1.0)
    assert (gain.saved, gain.paid) == (pytest.approx(0.180), pytest.approx(0.256))
    assert "no size between 64Gi and 96Gi is better than 64Gi per pod by more than" in decision.reason


def test_by_hand_the_same_pays_for_a_larger_model():
    """15.0 USD/h would recompute all: 0.900 saved, 0.256 paid."""
    decision, state = decide(tier(LARGE), OLD, seen(BY_HAND))
    assert (decision.next, decision.limited_by) == (96 * GIB, "Max")
    assert decision.saving == pytest.approx(0.644)
    assert decision.reason == (
        "96Gi per pod instead of 64Gi: 6.0 % more prompt tokens hit, 0.90 USD/h of GPU time, "
        "for 0.26 USD/h of memory"
    )
    assert state.asked == Step(64 * GIB, 96 * GIB)


def test_by_hand_the_engines_own_cache_takes_the_gain():
    """Up to 80 GiB, where the curve is at 44 %, the engine hits it all: 0.300 - 0.256 = 0.044, under 0.5 % of
    what misses and memory cost."""
    service = replace(LARGE, engine_cache_bytes=80 * GIB)
    demand = Known([(64, 0.40), (80, 0.44), (96, 0.46)], measured_hits=0.4)
    decision, _ = decide(tier(service), OLD, seen(demand))
    assert decision.limited_by == "Engine"
    assert "the engine's own 80Gi already hits what 64Gi per pod would" in decision.reason
    assert tier(service).gain(demand, 64 * GIB, 96 * GIB, 1.0).net == pytest.approx(0.044)


def test_loading_has_a_price():
    """At 3 GB/s from the remote tier a hit of the small model is worth 56 %, of the large one nothing."""
    rates = {"load_bytes_per_second": 3e9}
    assert SMALL.usd_per_token(PRICES) == pytest.approx(6.94e-8, rel=1e-3)
    share = replace(SMALL, **rates).usd_per_token(PRICES) / SMALL.usd_per_token(PRICES)
    assert share == pytest.approx(0.56, abs=0.005)
    assert replace(LARGE, **rates).usd_per_token(PRICES) == 0
    assert SMALL.break_even_seconds(PRICES) == pytest.approx(512, abs=0.5)
    assert LARGE.break_even_seconds(PRICES) == pytest.approx(1024, abs=0.5)


def test_by_hand_what_lower_tiers_have_is_worth_the_time_to_load_it():
    """They save half of what a hit here does: up to as many as they have. 3.00 USD/h would recompute all."""
    for lower_hits, saved, lost in ((0.0, 0.18, 0.30), (0.02, 0.15, 0.27), (0.50, 0.09, 0.15)):
        found = tier(replace(SMALL, lower_hits=lower_hits, lower_worth=0.5))
        gains = [found.gain(BY_HAND, 64 * GIB, gib * GIB, 1.0).saved for gib in (96, 32)]
        assert gains == pytest.approx([saved, -lost])


STEEP = Known([(64, 0.2), (512, 0.9)], tokens_per_hour=400e6, measured_hits=0.2)
FLAT = Known([(16, 0.4), (512, 0.4)])
WIDE = memory_tier(16 * GIB, 512 * GIB, SMALL, PRICES)


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
def test_what_is_measured_wrongly_decides_nothing(change, limited_by):
    decision, state = decide(WIDE, OLD, replace(seen(STEEP), **change))
    assert decision.limited_by == limited_by
    assert decision.reason
    assert decision.next == decision.size or math.isnan(decision.size)
    # Nothing of it stays: with good figures it goes on.
    decision, _ = decide(WIDE, state, seen(STEEP))
    assert decision.next > 64 * GIB


def test_a_size_that_could_not_be_had_is_not_asked_for_again_at_once():
    infeasible = seen(STEEP, obstacle=Obstacle("Infeasible", "no node has room"))
    _, state = decide(WIDE, OLD, seen(STEEP))
    decision, state = decide(WIDE, state, infeasible)
    assert (decision.next, decision.limited_by, decision.reason) == (
        64 * GIB,
        "Infeasible",
        "no node has room",
    )
    decision, state = decide(WIDE, state, seen(STEEP, time=infeasible.time + 5 * HOUR))
    assert (decision.next, decision.limited_by) == (64 * GIB, "Cooldown")
    decision, _ = decide(WIDE, state, seen(STEEP, time=infeasible.time + 6 * HOUR))
    assert decision.next > 64 * GIB
    # Nor is a step taken back to it again and again.
    back = replace(OLD, back_to=96 * GIB, calm_until=infeasible.time + HOUR)
    decision, state = decide(WIDE, back, seen(STEEP))
    assert (decision.next, decision.limited_by) == (96 * GIB, "Verifying")
    _, state = decide(WIDE, state, infeasible)
    decision, _ = decide(WIDE, state, seen(STEEP, time=infeasible.time + HOUR))
    assert (decision.next, decision.limited_by) == (64 * GIB, "Cooldown")


def test_a_change_that_something_holds_up_is_still_judged():
    """Nothing is decided while it is under way, and when it is there it is ours."""
    _, asked = decide(WIDE, OLD, seen(STEEP))
    held_up = seen(STEEP, obstacle=Obstacle("Cooldown", "1 of 2 pods has 128Gi"))
    decision, state = decide(WIDE, asked, held_up)
    assert decision.next == 64 * GIB
    _, state = decide(WIDE, state, seen(STEEP, size=asked.asked.new, time=held_up.time + HOUR))
    assert state.pending == asked.asked


def test_a_size_that_is_near_has_to_bring_more():
    """An eighth of an octave more hits 1 %, which is worth it, but not the change; 10 % are."""
    for hits, next_size in ((0.41, 64), (0.60, 70)):
        curve = Known([(64, 0.40), (70, hits), (512, hits)], tokens_per_hour=400e6, measured_hits=0.4)
        decision, _ = decide(WIDE, OLD, seen(curve))
        assert decision.next == next_size * GIB
    reason = decide(WIDE, OLD, seen(replace(curve, curve=[(64, 0.40), (70, 0.41), (512, 0.41)])))[0].reason
    assert reason.startswith("70Gi per pod would save ")
    assert reason.endswith("more than 64Gi: too little for a change to a size so near")


@pytest.mark.parametrize(
    "change",
    [{"prefill_tokens_per_second": 0}, {"gpus": math.nan}, {"num_pods": 0}, {"load_bytes_per_second": -1.0}],
)
def test_a_service_that_makes_no_sense_decides_nothing(change):
    service = replace(SMALL, **change)
    for bad in (
        memory_tier(16 * GIB, 512 * GIB, service, PRICES),
        remote_tier([1, 2, 32], 16 * GIB, service, PRICES, 1e9),
    ):
        decision, _ = decide(bad, OLD, seen(STEEP))
        assert (decision.next, decision.limited_by) == (64 * GIB, "Samples")


def test_a_clock_that_was_set_moves_all_that_is_waited_for():
    state = replace(OLD, time=1e9, frozen_until=1e9 + HOUR, shrinks_since=1e9 - HOUR)
    decision, state = decide(WIDE, state, seen(STEEP, time=1000.0))
    assert (decision.limited_by, decision.reason) == ("Samples", "the clock went back")
    assert (state.time, state.frozen_until, state.shrinks_since) == (1000, 1000 + HOUR, 1000 - HOUR)
    assert decide(WIDE, state, seen(STEEP, time=1000 + HOUR / 2))[0].limited_by == "Frozen"
    assert decide(WIDE, state, seen(STEEP, time=1001 + HOUR))[0].next > 64 * GIB


def test_another_namespace_starts_anew():
    """No decision for half an hour, and nothing shrinks for six."""
    state = OLD
    moments = {}
    for minute in range(0, 9 * 60, 15):
        decision, state = decide(WIDE, state, seen(FLAT, time=12 * HOUR + 60 * minute, namespace="other"))
        moments[minute] = decision
    assert {minute for minute, decision in moments.items() if "counted for" in decision.reason} == {0, 15}
    first = min(minute for minute, decision in moments.items() if decision.next != decision.size)
    assert first == 6 * 60
    assert moments[30].limited_by == "Young"
    assert "not before" in moments[30].reason


def test_what_is_recommended_does_not_flutter():
    """While a step is being judged, and while others would be a little better."""
    decision, state = decide(WIDE, OLD, seen(STEEP))
    recommended = decision.recommended
    assert recommended == decision.target > decision.next
    decision, state = decide(WIDE, state, seen(STEEP, gib=decision.next / GIB, time=10.25 * HOUR))
    assert (decision.limited_by, decision.recommended) == ("Verifying", recommended)


def test_a_size_out_of_bounds_goes_to_the_bound():
    for gib, bound, limited_by in ((4, 16, "Min"), (600, 512, "Max")):
        decision, _ = decide(WIDE, replace(OLD, size=gib * GIB), seen(STEEP, gib=gib))
        assert (decision.next, decision.limited_by) == (bound * GIB, limited_by)


def test_a_step_that_was_wrong_is_taken_back_until_it_is_done():
    """Also when the operator dies before; but not for ever where it only recommends."""
    bad = Known([(16, 0.2), (64, 0.3), (128, 0.6)], measured_hits=0.3, tokens_per_hour=400e6)
    state = replace(OLD, size=128 * GIB, pending=Step(64 * GIB, 128 * GIB), due=10 * HOUR)
    reasons = []
    for minutes in (0, 15, 30, 105):
        now = seen(bad, gib=128, time=10 * HOUR + 60 * minutes, settled=bad)
        decision, state = decide(WIDE, State.from_json(json.loads(json.dumps(state.as_json()))), now)
        reasons.append(decision.reason)
        assert (decision.next == 64 * GIB) == (minutes < 90)
    assert reasons[0].startswith("128Gi per pod hit 0.0 % more than 64Gi per pod, and not 30")
    assert reasons[1] == "back to 64Gi per pod: what 128Gi per pod were to bring did not come"
    now = seen(bad, gib=64, time=12 * HOUR)
    assert decide(WIDE, replace(state, back_to=64 * GIB), now)[1].back_to == 0


def test_sizes_that_pods_round_are_the_same_size():
    """The least that is allowed, as a pod has it that loses a part of an extent."""
    decision, _ = decide(WIDE, replace(OLD, size=16 * GIB), seen(FLAT, gib=15.99))
    assert (decision.next, decision.limited_by) == (15.99 * GIB, "Min")


def test_shards_are_added_one_by_one_and_for_bandwidth_whatever_they_hit():
    shard = 32 * GIB
    growing = remote_tier(range(1, 9), shard, SMALL, PRICES, 1e9)
    decision, _ = decide(growing, replace(OLD, size=2 * shard), seen(STEEP, gib=64))
    assert (decision.next, decision.target > 3 * shard) == (3 * shard, True)
    assert decision.reason.startswith(f"{round(decision.target / shard)} shards instead of 2: ")
    service = replace(SMALL, moved_bytes_per_second=3.4e9)
    busy = remote_tier(range(1, 9), shard, service, PRICES, 1e9)
    decision, _ = decide(busy, replace(OLD, size=2 * shard), seen(FLAT, gib=64))
    assert (decision.next, decision.limited_by) == (4 * shard, "Bandwidth")
    assert decision.reason == "2 shards is less than 4 shards, which its traffic needs"
    # A shard is 0.128 USD/h, as much as 3,602 hits of 512 tokens: 10,000 an hour pay for two.
    useless = remote_tier(range(1, 9), shard, service, PRICES, 10_000)
    assert useless.sizes[0] == 2 * shard


def test_points_tell_the_curve_where_it_matters():
    found = points(WIDE, OLD, seen(STEEP), 108 * GIB)
    assert [point.size / GIB for point in found] == [16, 32, 64, 108, 128, 256, 512]
    assert next(point.net for point in found if point.size == 64 * GIB) == 0
    assert all(low.hits <= high.hits for low, high in pairwise(found))


@st.composite
def curves(draw) -> Known:
    sizes = sorted(draw(st.sets(st.floats(1, 1000), min_size=1, max_size=6)))
    hits = sorted(draw(st.lists(st.floats(0, 1), min_size=len(sizes), max_size=len(sizes))))
    return Known(
        list(zip(sizes, hits, strict=True)), draw(st.floats(1e5, 1e9)), draw(st.floats(0, 1)),
        draw(st.sampled_from([0.0, 0.001, 0.05])),
    )  # fmt: skip


BOUNDS = st.tuples(st.floats(1, 1000), st.floats(1, 1000)).map(sorted)
SERVICES = st.builds(
    replace, st.sampled_from([SMALL, LARGE]), engine_cache_bytes=st.sampled_from([0.0, 20 * GIB, 200 * GIB])
)


@given(curves(), BOUNDS, SERVICES, st.floats(1, 1000), st.floats(0, 0.1))
def test_a_decision_is_within_bounds(demand, bounds, service, gib, price):
    lowest, highest = bounds
    any_tier = memory_tier(lowest * GIB, highest * GIB, service, Prices(2.5, price, price))
    decision, _ = decide(any_tier, replace(OLD, size=gib * GIB), seen(demand, gib=gib))
    for size in (decision.next, decision.target, decision.recommended):
        # A per cent is how pods round.
        assert 0.99 * lowest * GIB <= size <= 1.01 * highest * GIB
    assert decision.reason


ANY = st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0, 64 * GIB])
GOOD = {
    "tokens_per_hour": 400e6, "measured_hits": 0.2, "num_accesses": 1e6, "time": 10 * HOUR, "new_bytes": 1e15,
    "miss_bytes_per_second": 1e9, "locality_loss": 0.0, "size": 64 * GIB, "moved_bytes_per_second": 3.4e9,
    "prefill_tokens_per_second": 1e4, "hits_per_hour": 1e6,
}  # fmt: skip
STATES = [State(), OLD, replace(OLD, pending=Step(16 * GIB, 64 * GIB), due=0.0)]


@given(st.dictionaries(st.sampled_from(sorted(GOOD)), ANY, max_size=3), st.sampled_from(STATES))
def test_whatever_is_measured_it_never_raises(wrong, state):
    """And what makes no sense changes no size."""
    values = {**GOOD, **wrong}
    demand = replace(
        STEEP, **{name: values[name] for name in ("tokens_per_hour", "measured_hits", "num_accesses")}
    )
    names = ("time", "new_bytes", "miss_bytes_per_second", "locality_loss", "size")
    now = replace(seen(demand), settled=demand, **{name: values[name] for name in names})
    names = ("moved_bytes_per_second", "prefill_tokens_per_second")
    service = replace(SMALL, **{name: values[name] for name in names})
    for any_tier in (
        memory_tier(16 * GIB, 512 * GIB, service, PRICES),
        remote_tier(range(1, 9), 64 * GIB, service, PRICES, values["hits_per_hour"]),
    ):
        decision, after = decide(any_tier, state, now)
        assert decision.reason
        State.from_json(json.loads(json.dumps(after.as_json())))
        if decision.next != decision.size and not math.isnan(decision.size):  # NaN is not even itself
            assert 0 < now.size < math.inf
            assert math.isfinite(now.time)
            assert service.is_known()
            assert any_tier.sizes[0] <= decision.next <= any_tier.sizes[-1] or decision.next == 16 * GIB


@given(curves(), SERVICES, st.floats(0, 0.1), st.floats(0, 0.1))
def test_a_higher_price_never_asks_for_more(demand, service, price, more):
    targets = []
    for amount in (price, price + more):
        at_price = memory_tier(16 * GIB, 512 * GIB, service, Prices(2.5, amount, amount))
        targets.append(decide(at_price, OLD, seen(demand))[0].target)
    assert targets[1] <= targets[0]


@settings(max_examples=25, deadline=None)
@given(curves(), SERVICES, st.floats(0, 0.05), st.floats(16, 512))
def test_it_settles_on_traffic_that_does_not_change(demand, service, price, gib):
    """Whatever the curve, within two days; and every change makes a net gain, or leads to one."""
    at_price = memory_tier(16 * GIB, 512 * GIB, service, Prices(2.5, price, price))
    state, size, sizes = State(namespace="ns", size=gib * GIB), gib * GIB, [gib * GIB]
    for turn in range(int(72 * HOUR / DECIDE_SECONDS)):
        hits = demand.hits(max(state.usable * size, service.engine_cache_bytes))
        measured = replace(demand, measured_hits=hits)
        now = seen(measured, gib=size / GIB, time=turn * DECIDE_SECONDS, settled=measured)
        decision, state = decide(at_price, state, now)
        if decision.next != size:
            size, last = decision.next, turn
            sizes.append(size)
    assert len(sizes) <= 25
    assert len(sizes) == 1 or last < 48 * HOUR / DECIDE_SECONDS
    # After a growth it never shrinks below where it came from: there is no cycle.
    nets = [at_price.gain(demand, sizes[0], size, state.usable).net for size in sizes]
    assert nets[-1] >= nets[0] - 1e-9


def test_a_state_survives_as_json():
    _, state = decide(WIDE, OLD, seen(STEEP))
    assert State.from_json(json.loads(json.dumps(state.as_json()))) == state
    for wrong in ({}, {**state.as_json(), "time": "x"}, {**state.as_json(), "pending": {"old": 1}}, {"x": 1}):
        with pytest.raises(ValueError, match="not the state"):
            State.from_json(wrong)
