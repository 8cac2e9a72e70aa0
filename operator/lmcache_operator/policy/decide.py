"""The decision about the size of a tier.

Pure. The only clock is ``Measurements.time``. ``decide`` checks in this order:

- Without usable measurements, or with an obstacle, the size stays.
- A size outside the bounds changes to the bound.
- A step that failed its verification is reverted (``verify``). After two failed growths the size is frozen.
- Otherwise the best size by money is chosen (``choose``).
"""

from __future__ import annotations

import math
from dataclasses import replace

from lmcache_operator.policy import DAY, HOUR, MINUTE
from lmcache_operator.policy.choose import choose
from lmcache_operator.policy.state import Measurements, Outcome, Point, State, keep_size, set_size
from lmcache_operator.policy.tier import LimitedBy, Tier
from lmcache_operator.policy.verify import calibrate, note_size, verify
from lmcache_store.common.units import format_seconds

DECIDE_SECONDS = 900.0
"""Interval between two decisions."""
FAST_HALF_LIFE, DAY_HALF_LIFE = HOUR, DAY

_MIN_DATA = 30 * MINUTE
"""Data that any decision needs."""
_INFEASIBLE = 6 * HOUR
"""Pause after a size that the pods could not get."""


def decide(tier: Tier, state: State, measured: Measurements) -> Outcome:
    """Decide, and return the state for the next decision. Never raises, even for invalid measurements."""
    if not math.isfinite(measured.time):
        return keep_size(state, measured, "Samples", "the time of the decision is unknown")
    if measured.time < state.time:
        shifted = state.shifted(measured.time - state.time)
        return keep_size(shifted, measured, "Samples", "the operator's clock was set back")
    if measured.namespace != state.namespace:
        state = _in_new_namespace(state, measured)
    elapsed = measured.time - state.time
    state = note_size(replace(state, time=measured.time), measured)
    if measured.obstacle:
        # The hour before a shrink pauses, and does not restart: pods may come and go more often than that.
        since = None if state.shrinks_since is None else state.shrinks_since + elapsed
        state, asked = replace(state, shrinks_since=since), state.asked
        decision, state = keep_size(state, measured, *measured.obstacle)
        if measured.obstacle.limited_by == "Infeasible":
            until = max(state.calm_until, measured.time + _INFEASIBLE)
            return decision, replace(state, back_to=0.0, calm_until=until)
        return decision, replace(state, asked=asked)  # the obstacle may be this very change
    if reason := _unusable(tier, measured):
        return keep_size(replace(state, shrinks_since=None), measured, "Samples", reason)
    if not 0.99 * tier.sizes[0] <= measured.size <= 1.01 * tier.sizes[-1]:
        return _into_bounds(tier, state, measured)
    if (age := measured.time - state.started) < _MIN_DATA:
        known, needed = (format_seconds(seconds) for seconds in (age, _MIN_DATA))
        return keep_size(state, measured, "Young", f"lookups counted for {known}; a decision needs {needed}")
    # A growth that costs nothing is never reverted, and the next one need not wait for its result.
    is_harmless = tier.is_free and state.pending is not None and state.pending.new > state.pending.old
    if is_harmless and measured.time >= state.due:
        state = replace(state, pending=None)
    elif state.pending and measured.time >= state.due:
        reverting, state = verify(tier, state, measured)
        if reverting:
            return reverting, state
    return _unless_verifying(tier, state, measured, is_harmless)


def _unless_verifying(tier: Tier, state: State, measured: Measurements, is_harmless: bool) -> Outcome:
    """Choose a size, unless a step is still to be verified or reverted, or the size is frozen."""
    if state.back_to and measured.time < state.calm_until:
        old, new = tier.describe(state.back_to), tier.describe(measured.size)
        reason = f"back to {old}: hits of {new} stayed below the prediction"
        return set_size(state, measured, state.back_to, "Verifying", reason)
    if measured.time < state.frozen_until:
        left = format_seconds(state.frozen_until - measured.time)
        reason = f"hits stayed below the prediction twice; size kept for another {left}"
        return keep_size(state, measured, "Frozen", reason)
    if state.pending and not is_harmless:
        left = format_seconds(state.due - measured.time)
        reason = f"verifying {tier.describe(measured.size)}; result in {left}"
        return keep_size(state, measured, "Verifying", reason)
    return choose(tier, calibrate(tier, state, measured), measured)


def points(tier: Tier, state: State, measured: Measurements, recommended: float) -> list[Point]:
    """Return the curve at the bounds, the octaves between them, the present and the recommended size."""
    lowest, highest = tier.sizes[0], tier.sizes[-1]
    octaves = [lowest * 2**i for i in range(1, math.ceil(math.log2(highest / lowest)))]
    curve = []
    for size in sorted({lowest, highest, measured.size, recommended, *octaves}):
        share, error = measured.day.between(0.0, tier.effective(size, state.usable))
        net = tier.gain(measured.day, measured.size, size, state.usable).net
        curve.append(Point(size, share, max(0.0, share - error), min(1.0, share + error), net))
    return curve


def _into_bounds(tier: Tier, state: State, measured: Measurements) -> Outcome:
    is_small = measured.size < tier.sizes[0]
    target = tier.sizes[0] if is_small else tier.sizes[-1]
    limited_by: LimitedBy = tier.limited_at_min if is_small else "Max"
    bound = "minimum for its traffic" if limited_by == "Bandwidth" else "minimum" if is_small else "maximum"
    side = "below" if is_small else "above"
    reason = f"{tier.describe(measured.size)} is {side} the {bound}, {tier.describe(target)}"
    return set_size(state, measured, target, limited_by, reason)


def _in_new_namespace(state: State, measured: Measurements) -> State:
    """Start counting again for other keys. What is known of the tier itself stays."""
    return State(
        namespace=measured.namespace, time=measured.time, started=measured.time, size=state.size,
        filled=measured.time, usable=state.usable,
        recommended=state.recommended, recommended_at=state.recommended_at,
    )  # fmt: skip


def _unusable(tier: Tier, measured: Measurements) -> str:
    """Return why the measurements allow no decision; empty if they do."""
    figures = [
        measured.time, measured.size, measured.new_bytes, tier.usd_per_access, tier.usd_per_byte_hour,
        *(x for demand in (measured.fast, measured.day)
          for x in (demand.num_accesses, demand.accesses_per_hour)),
    ]  # fmt: skip
    shares = (measured.day.measured_hits, measured.settled.measured_hits)
    are_valid = all(0 <= x < math.inf for x in figures) and all(0 <= x <= 1.01 for x in shares)
    if not are_valid or not measured.size:
        return "a measured figure is invalid (negative, infinite, or a share above 100 %)"
    return "" if measured.day.accesses_per_hour else "no lookups were counted"
