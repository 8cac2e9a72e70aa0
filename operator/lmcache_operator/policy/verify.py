"""Verification of steps: compare the measured hits with the prediction, and correct the curve. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

from lmcache_operator.policy import DAY, HOUR, MINUTE, explanations
from lmcache_operator.policy.state import Decision, Measurements, State, set_size
from lmcache_operator.policy.tier import LimitedBy, Tier, is_near
from lmcache_store.curves import Window

_COOLDOWN = 30 * MINUTE
"""Pause after any change."""
_NO_SHRINK_AFTER_GROWTH = 6 * HOUR
_FREEZE = DAY
_MAX_FILL = 3 * HOUR
_MIN_ACCESSES_TO_VERIFY, _MIN_ACCESSES_TO_FIT = 1000, 5000
_MIN_VISIBLE_HITS = 0.01
"""Difference in the share of hits that stands out from noise."""
_MAX_LOSS_OF_FREE_SHRINK = 0.05
"""Share of hits that a shrink may lose although the curve predicts no loss. Curves are up to 2 points off
(``python -m benchmarks sizing``)."""
_USABLE = [x / 100 for x in range(95, 45, -5)]


def note_size(state: State, measured: Measurements) -> State:
    """Note a changed size. If the policy asked for it, the step is verified once the new size is full."""
    if not 0 < measured.size < math.inf or is_near(measured.size, state.size):
        return state
    if not state.size:  # the first decision
        return replace(state, size=measured.size)
    fill, no_shrink_until = 0.0, state.no_shrink_until
    if (grown := measured.size - state.size) > 0:
        rate = measured.miss_bytes_per_second
        fill = min(_MAX_FILL, grown / rate) if rate > 0 else _MAX_FILL
        no_shrink_until = max(no_shrink_until, measured.time + _NO_SHRINK_AFTER_GROWTH)
    asked = state.asked
    is_ours = asked is not None and is_near(asked.new, measured.size)
    return replace(
        state, size=measured.size, asked=None, pending=asked if is_ours else None, back_to=0.0,
        filled=measured.time + fill, due=measured.time + fill + max(30 * MINUTE, fill), shrinks_since=None,
        calm_until=max(state.calm_until, measured.time + _COOLDOWN), no_shrink_until=no_shrink_until,
    )  # fmt: skip


def verify(tier: Tier, state: State, measured: Measurements) -> tuple[Decision | None, State]:
    """Verify the pending step, and decide to return to the old size if the step failed.

    A growth fails if it gains less than half of the predicted hits. A shrink fails if it loses more than
    twice the predicted hits. After two failed growths in a row, the size is frozen for a day.

    Returns:
        None and the new state if the step did not fail.
    """
    step = state.pending
    assert step is not None
    state = replace(state, pending=None)
    low, high = (tier.effective(size, state.usable) for size in sorted((step.old, step.new)))
    predicted, error = measured.settled.between(low, high)
    is_growth, is_visible = step.new > step.old, predicted >= max(_MIN_VISIBLE_HITS, 2 * error)
    if measured.settled.num_accesses < _MIN_ACCESSES_TO_VERIFY or (is_growth and not is_visible):
        return None, state  # too little data
    # Both sizes are compared for the same traffic: the old size by the curve, the new one by its hits.
    gained = measured.settled.measured_hits - _hits(tier, measured.settled, step.old, state.usable)
    tolerance = error if is_visible else max(error, _MAX_LOSS_OF_FREE_SHRINK)
    is_wrong = gained < predicted / 2 - error if is_growth else -gained > 2 * predicted + tolerance
    if not is_wrong:
        return None, replace(state, num_wrong=0)
    num_wrong = state.num_wrong + is_growth
    limited_by: LimitedBy = "Verifying"
    state = calibrate(tier, state, measured)
    if num_wrong >= 2:
        num_wrong, limited_by = 0, "Frozen"
        state = replace(state, frozen_until=measured.time + _FREEZE)
    state = replace(
        state, num_wrong=num_wrong, calm_until=measured.time + 3 * _COOLDOWN, back_to=step.old,
        no_shrink_until=state.no_shrink_until if is_growth else measured.time + _FREEZE,
    )  # fmt: skip
    reason = explanations.reverted(tier, step, gained, predicted)
    return set_size(state, measured, step.old, limited_by, reason)


def calibrate(tier: Tier, state: State, measured: Measurements) -> State:
    """Return a state whose usable share of the size moved towards the measured hits."""
    if measured.settled.num_accesses < _MIN_ACCESSES_TO_FIT:
        return state
    hits = measured.settled.measured_hits + 0.005
    shares = (x for x in _USABLE if _hits(tier, measured.settled, measured.size, x) <= hits)
    return replace(state, usable=state.usable + (next(shares, _USABLE[-1]) - state.usable) / 2)


def _hits(tier: Tier, demand: Window, size: float, usable: float) -> float:
    return demand.between(0.0, tier.effective(size, usable)).share
