"""Shrinking of a tier, and its reversal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lmcache_operator.autoscaling.policy.decide import decide
from lmcache_operator.autoscaling.policy.state import Obstacle, Step
from lmcache_operator.autoscaling.policy.tier import GIB, memory_tier

from tests.harness.known_demand import PRICES, SETTLED, SMALL, KnownDemand, measurements

HOUR = 3600.0
WIDE = memory_tier(16 * GIB, 512 * GIB, SMALL, PRICES)
FLAT = KnownDemand([(16, 0.4), (512, 0.4)])
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
