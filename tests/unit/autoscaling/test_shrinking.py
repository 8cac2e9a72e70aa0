"""When a tier becomes smaller, and when it goes back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lmcache_operator.autoscaling.decide import decide
from lmcache_operator.autoscaling.state import Obstacle, Step
from lmcache_operator.autoscaling.tier import GIB, memory_tier

from tests.unit.autoscaling.test_decide import OLD, PRICES, SMALL, Known, seen

HOUR = 3600.0
WIDE = memory_tier(16 * GIB, 512 * GIB, SMALL, PRICES)
FLAT = Known([(16, 0.4), (512, 0.4)])
CHURN = Obstacle("Cooldown", "7 of 8 pods are ready and as declared")


@pytest.mark.parametrize(("busy", "hours"), [(1, 1.25), (2, 2.0), (4, 4.0)])
def test_pods_that_come_and_go_delay_a_shrink_but_do_not_forbid_it(busy, hours):
    """Only the time without a rollout counts: an hour of it, however long that takes."""
    state, waited = replace(OLD, time=10 * HOUR, shrinks_since=10 * HOUR), 0
    while True:
        waited += 1
        is_busy = waited % (busy + 1) and busy > 1
        now = seen(FLAT, time=10 * HOUR + 900 * waited, obstacle=CHURN if is_busy else None)
        decision, state = decide(WIDE, state, now)
        if decision.next < decision.size:
            break
        assert waited < 100
    assert 900 * waited / HOUR >= 1
    assert waited >= 4 * busy


@pytest.mark.parametrize(("measured", "size"), [(0.40, 64), (0.37, 64), (0.10, 96)])
def test_a_shrink_that_was_to_cost_nothing_goes_back_if_hits_fall(measured, size):
    """The curve is flat, as below the size of the engine's own cache."""
    step = Step(96 * GIB, 64 * GIB)
    state = replace(OLD, time=10 * HOUR, shrinks_since=None, pending=step, due=10 * HOUR)
    after = replace(FLAT, measured_hits=measured)
    decision, state = decide(WIDE, state, seen(after, time=10.1 * HOUR, settled=after))
    assert decision.next == size * GIB
    if size == 96:
        assert decision.reason.startswith("64Gi per pod hit 30.0 % fewer than 96Gi per pod")
        assert state.no_shrink_until >= 34 * HOUR
