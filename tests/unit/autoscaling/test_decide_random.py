"""Sizing decisions with random curves, bounds, prices and measurements."""

import json
import math
from dataclasses import asdict, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_operator.policy.decide import DECIDE_SECONDS, decide
from lmcache_operator.policy.state import State, Step
from lmcache_operator.policy.tier import GIB, Prices, memory_tier, remote_tier
from tests.harness.operator.known_demand import (
    HOUR,
    LARGE,
    PRICES,
    SETTLED,
    SMALL,
    STEEP,
    KnownDemand,
    measurements,
)
from tests.harness.scope import examples


@st.composite
def curves(draw) -> KnownDemand:
    sizes = sorted(draw(st.sets(st.floats(1, 1000), min_size=1, max_size=6)))
    hits = sorted(draw(st.lists(st.floats(0, 1), min_size=len(sizes), max_size=len(sizes))))
    return KnownDemand(
        list(zip(sizes, hits, strict=True)), draw(st.floats(1e5, 1e9)), draw(st.floats(0, 1)),
        draw(st.sampled_from([0.0, 0.001, 0.05])),
    )  # fmt: skip


BOUNDS = st.tuples(st.floats(1, 1000), st.floats(1, 1000)).map(sorted)
SERVICES = st.builds(
    replace, st.sampled_from([SMALL, LARGE]), engine_cache_bytes=st.sampled_from([0.0, 20 * GIB, 200 * GIB])
)


@given(curves(), BOUNDS, SERVICES, st.floats(1, 1000), st.floats(0, 0.1))
def test_decision_is_within_bounds(demand, bounds, service, gib, price):
    lowest, highest = bounds
    any_tier = memory_tier(lowest * GIB, highest * GIB, service, Prices(2.5, price, price))
    decision, _ = decide(any_tier, replace(SETTLED, size=gib * GIB), measurements(demand, gib=gib))
    for size in (decision.next, decision.target, decision.recommended):
        # Pods round sizes by up to 1 %.
        assert 0.99 * lowest * GIB <= size <= 1.01 * highest * GIB
    assert decision.reason


ANY = st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0, 64 * GIB])
GOOD = {
    "tokens_per_hour": 400e6, "measured_hits": 0.2, "num_accesses": 1e6, "time": 10 * HOUR, "new_bytes": 1e15,
    "miss_bytes_per_second": 1e9, "locality_loss": 0.0, "size": 64 * GIB, "moved_bytes_per_second": 3.4e9,
    "prefill_tokens_per_second": 1e4, "hits_per_hour": 1e6,
}  # fmt: skip
STATES = [State(), SETTLED, replace(SETTLED, pending=Step(16 * GIB, 64 * GIB), due=0.0)]


@given(st.dictionaries(st.sampled_from(sorted(GOOD)), ANY, max_size=3), st.sampled_from(STATES))
def test_decide_never_raises_for_random_measurements(wrong_values, state):
    """Invalid measurements change no size."""
    values = {**GOOD, **wrong_values}
    demand = replace(
        STEEP, **{name: values[name] for name in ("tokens_per_hour", "measured_hits", "num_accesses")}
    )
    names = ("time", "new_bytes", "miss_bytes_per_second", "locality_loss", "size")
    now = replace(measurements(demand), settled=demand, **{name: values[name] for name in names})
    rates = ("moved_bytes_per_second", "prefill_tokens_per_second")
    service = replace(SMALL, **{name: values[name] for name in rates})
    for any_tier in (
        memory_tier(16 * GIB, 512 * GIB, service, PRICES),
        remote_tier(range(1, 9), 64 * GIB, service, PRICES, values["hits_per_hour"]),
    ):
        decision, after = decide(any_tier, state, now)
        assert decision.reason
        State.from_json(json.loads(json.dumps(asdict(after))))
        if decision.next != decision.size and not math.isnan(decision.size):  # NaN does not equal itself
            assert 0 < now.size < math.inf
            assert math.isfinite(now.time)
            assert service.is_known()
            assert any_tier.sizes[0] <= decision.next <= any_tier.sizes[-1] or decision.next == 16 * GIB


@given(curves(), SERVICES, st.floats(0, 0.1), st.floats(0, 0.1))
def test_higher_price_never_increases_the_target(demand, service, price, additional_price):
    targets = []
    for amount in (price, price + additional_price):
        at_price = memory_tier(16 * GIB, 512 * GIB, service, Prices(2.5, amount, amount))
        targets.append(decide(at_price, SETTLED, measurements(demand))[0].target)
    assert targets[1] <= targets[0]


@settings(max_examples=examples(25))
@given(curves(), SERVICES, st.floats(0, 0.05), st.floats(16, 512))
def test_size_settles_on_steady_traffic(demand, service, price, gib):
    """The size settles within two days for any curve, and the changes do not reduce the net value."""
    at_price = memory_tier(16 * GIB, 512 * GIB, service, Prices(2.5, price, price))
    state, size, sizes = State(namespace="ns", size=gib * GIB), gib * GIB, [gib * GIB]
    for turn in range(int(72 * HOUR / DECIDE_SECONDS)):
        hits = demand.hits(max(state.usable * size, service.engine_cache_bytes))
        measured = replace(demand, measured_hits=hits)
        now = measurements(measured, gib=size / GIB, time=turn * DECIDE_SECONDS, settled=measured)
        decision, state = decide(at_price, state, now)
        if decision.next != size:
            size, last_change = decision.next, turn
            sizes.append(size)
    assert len(sizes) <= 25
    assert len(sizes) == 1 or last_change < 48 * HOUR / DECIDE_SECONDS
    # The final size is no worse than the first: there is no cycle.
    nets = [at_price.gain(demand, sizes[0], size, state.usable).net for size in sizes]
    assert nets[-1] >= nets[0] - 1e-9
