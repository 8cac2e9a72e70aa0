"""The decision: a size for a tier, from what is known of it. Pure, with a clock of its own (``Seen.time``).

Sizes are compared by money per hour over the whole range, never by slopes, fill levels or hit ratios:
curves have cliffs, and with an engine's own cache two summits. A growth has to pay for the last hour and for
the last day; a shrink waits, goes slowly, and has to pay for an hour without a break. Each step is judged by
what was measured, against what the curve says of the old size and of the new one *for the same traffic*; it
is taken back if it did not bring half of that, and after two of those nothing is done for a day.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from lmcache.curves import Window
from lmcache_operator.autoscaling import reasons
from lmcache_operator.autoscaling.state import Decision, Point, Seen, State, Step
from lmcache_operator.autoscaling.tier import Gain, LimitedBy, Tier

DECIDE_SECONDS = 900.0
"""How often to decide."""
MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
FAST_HALF_LIFE, DAY_HALF_LIFE = HOUR, DAY

_FIRST = 30 * MINUTE  # of data, before anything is decided
_YOUNG = 6 * HOUR  # a young curve has not seen far reuse: it makes shrinking look better than it is
_CALM = 30 * MINUTE  # after any change
_HOLD = HOUR
_REVERSE = 6 * HOUR  # after a growth
_FREEZE = DAY
_INFEASIBLE = 6 * HOUR  # after a size that could not be had
_WORTH_IT = 0.005  # of what is spent: a change that saves less is not made
_WORTH_MUCH = 10  # times that much: for this also a size that is not far is gone to, as before a cliff
_LONGEST_FILL = 3 * HOUR
_FEWEST_TO_JUDGE, _FEWEST_TO_FIT = 1000, 5000  # accesses
_SEEN = 0.01  # a difference in hits that can be told from noise
_FALL = (
    0.05  # in hits after a shrink that was to cost nothing; curves are up to 2 points off (benchmarks sizing)
)
_BLAMED = 0.05  # of prompt tokens; sticky pods that share system prompts lose up to 4.6 % (test_closed_loop)
_USABLE = [x / 100 for x in range(95, 45, -5)]


def decide(tier: Tier, state: State, seen: Seen) -> tuple[Decision, State]:
    """Decide, and return what the next decision starts from. It never raises for what was measured."""
    if not math.isfinite(seen.time):
        return _stay(state, seen, "Samples", "there is no time")
    if seen.time < state.time:
        moved = state.moved(seen.time - state.time)
        return _stay(moved, seen, "Samples", "the clock went back")
    if seen.namespace != state.namespace:
        state = _renewed(state, seen)
    elapsed = seen.time - state.time
    state = _noticed(replace(state, time=seen.time), seen)
    if seen.obstacle:
        # Its time does not count. The hour need not begin anew: pods may come and go more often than that.
        since = None if state.shrinks_since is None else state.shrinks_since + elapsed
        decision, stays = _stay(replace(state, shrinks_since=since), seen, *seen.obstacle)
        if seen.obstacle.limited_by == "Infeasible":
            until = max(state.calm_until, seen.time + _INFEASIBLE)
            return decision, replace(stays, back_to=0.0, calm_until=until)
        return decision, replace(stays, asked=state.asked)  # it may be the change itself that is under way
    if reason := _unusable(tier, seen):
        return _stay(replace(state, shrinks_since=None), seen, "Samples", reason)
    if not 0.99 * tier.sizes[0] <= seen.size <= 1.01 * tier.sizes[-1]:
        return _into_bounds(tier, state, seen)
    if seen.time - state.started < _FIRST:
        return _stay(state, seen, "Young", f"counted for {reasons.span(seen.time - state.started)} so far")
    # A growth that costs nothing is never taken back, and the next one need not wait for what it brings.
    is_harmless = tier.is_free and state.pending is not None and state.pending.new > state.pending.old
    if is_harmless and seen.time >= state.due:
        state = replace(state, pending=None)
    elif state.pending and seen.time >= state.due:
        wrong, state = _judge(tier, state, seen)
        if wrong:
            return wrong, state
    if state.back_to and seen.time < state.calm_until:
        old, new = tier.describe(state.back_to), tier.describe(seen.size)
        reason = f"back to {old}: what {new} were to bring did not come"
        return _at_once(state, seen, state.back_to, "Verifying", reason)
    if seen.time < state.frozen_until:
        left = reasons.span(state.frozen_until - seen.time)
        return _stay(state, seen, "Frozen", f"what was predicted did not come, twice; held for {left}")
    if state.pending and not is_harmless:
        reason = f"what {tier.describe(seen.size)} bring is seen in {reasons.span(state.due - seen.time)}"
        return _stay(state, seen, "Verifying", reason)
    return _choose(tier, _calibrated(tier, state, seen), seen)


def points(tier: Tier, state: State, seen: Seen, recommended: float) -> list[Point]:
    """The curve at the bounds, at present, where it is recommended to go, and at octaves between."""
    lowest, highest = tier.sizes[0], tier.sizes[-1]
    octaves = [lowest * 2**i for i in range(1, math.ceil(math.log2(highest / lowest)))]
    sizes = sorted({lowest, highest, seen.size, recommended, *octaves})
    found = []
    for size in sizes:
        share, error = seen.day.between(0.0, tier.effective(size, state.usable))
        net = tier.gain(seen.day, seen.size, size, state.usable).net
        found.append(Point(size, share, max(0.0, share - error), min(1.0, share + error), net))
    return found


class _Wait(NamedTuple):
    limited_by: LimitedBy
    until: float


@dataclass(frozen=True)
class _Options:
    """All sizes that are worth going to, and by how much at least."""

    threshold: float
    best_of_all: float
    """Also of those that are too near to be gone to; 0: none."""
    ups: Mapping[float, float]
    downs: Mapping[float, float]
    is_uncertain: bool
    """Whether there would be more if all were known for certain."""

    def best(self, values: Mapping[float, float]) -> float:
        """The smallest size that is nearly as good as the best."""
        return min(
            size for size, value in values.items() if value >= max(values.values()) - self.threshold / 2
        )


def _weighed(tier: Tier, state: State, seen: Seen) -> _Options:
    paid = tier.usd_per_byte_hour * seen.size
    lost = tier.saved(seen.day, 1 - seen.day.measured_hits)
    threshold = _WORTH_IT * (lost + paid)

    def gains(size: float) -> list[Gain]:
        demands = (seen.fast, seen.day) if size > seen.size else (seen.day,)
        return [tier.gain(demand, seen.size, size, state.usable) for demand in demands]

    found = {size: gains(size) for size in tier.sizes if not is_near(size, seen.size)}
    better = {
        size: low for size, values in found.items()
        if (low := min(gain.low for gain in values)) >= threshold and low > 0
    }  # fmt: skip
    worth = {
        size: low for size, low in better.items()
        if not tier.is_similar(seen.size, size) or low >= _WORTH_MUCH * threshold
    }  # fmt: skip
    return _Options(
        threshold,
        max(better, key=better.__getitem__, default=0.0),
        {size: low for size, low in worth.items() if size > seen.size},
        {size: low for size, low in worth.items() if size < seen.size},
        any(
            0 < min(gain.net for gain in values) >= threshold
            for size, values in found.items()
            if size not in better
        ),
    )


def _choose(tier: Tier, state: State, seen: Seen) -> tuple[Decision, State]:
    options = _weighed(tier, state, seen)
    since = None if not options.downs else seen.time if state.shrinks_since is None else state.shrinks_since
    state = replace(state, shrinks_since=since)
    best_up, best_down = (max(found.values(), default=0.0) for found in (options.ups, options.downs))
    if options.ups and best_up >= best_down:
        target = _steady(state, seen, options.best(options.ups), options.ups)
        # Never stop in a valley: as far as it first pays.
        size = max(tier.step(seen.size, target), min(options.ups))
        wait = _Wait("Cooldown", state.calm_until) if seen.time < state.calm_until else None
        decision, state = _go(tier, state, seen, target, size, wait)
    elif options.downs:
        decision, state = _shrink(tier, state, seen, options)
    else:
        why = _why_stay(tier, state, seen, options)
        decision, state = _stay(_recommended(state, seen.size, seen.time), seen, *why)
    lost = tier.saved(seen.day, seen.locality_loss)
    if seen.locality_loss >= _BLAMED and lost > max(options.threshold, best_up):
        # A growth that pays is made, whatever routing loses.
        limited_by = decision.limited_by if decision.target > seen.size else "Locality"
        reason = f"{decision.reason}; {reasons.locality(seen.locality_loss, lost)}"
        decision = replace(decision, limited_by=limited_by, reason=reason)
    return decision, state


def _shrink(tier: Tier, state: State, seen: Seen, options: _Options) -> tuple[Decision, State]:
    target = _steady(state, seen, options.best(options.downs), options.downs)
    return _go(tier, state, seen, target, tier.step(seen.size, target), _shrink_waits(state, seen))


def _shrink_waits(state: State, seen: Seen) -> _Wait | None:
    """What keeps it from shrinking now, and until when."""
    assert state.shrinks_since is not None
    young = state.started + _YOUNG
    if seen.time < young or seen.new_bytes < 2 * seen.size:
        return _Wait("Young", young)
    until = max(state.calm_until, state.no_shrink_until, state.shrinks_since + _HOLD)
    return _Wait("Cooldown", until) if seen.time < until else None


def _go(
    tier: Tier, state: State, seen: Seen, target: float, size: float, wait: _Wait | None
) -> tuple[Decision, State]:
    gain = tier.gain(seen.day, seen.size, target, state.usable)
    reason = reasons.change(tier, seen.size, target, gain)
    limited_by: LimitedBy = "None"
    if target == tier.sizes[-1] and target > seen.size:
        limited_by = "Max"
    elif target == tier.sizes[0] and target < seen.size:
        limited_by = tier.least_is
    if wait:
        limited_by, until = wait
        size = seen.size
        if until > seen.time:
            reason += f"; not before {reasons.span(until - seen.time)} from now"
        else:
            reason += f"; not before {tier.describe(2 * seen.size)} of different keys went by"
    state = _recommended(state, target, seen.time)
    if size != seen.size:
        state = replace(state, asked=Step(seen.size, size), shrinks_since=None)
    decision = Decision(seen.size, target, state.recommended, size, reason, limited_by, gain.net, gain.error)
    return decision, state


def _stay(state: State, seen: Seen, limited_by: LimitedBy, reason: str) -> tuple[Decision, State]:
    """Nothing is to be done now; what is recommended stays."""
    size = state.recommended or seen.size
    return Decision(seen.size, size, size, seen.size, reason, limited_by), replace(state, asked=None)


def _why_stay(tier: Tier, state: State, seen: Seen, options: _Options) -> tuple[LimitedBy, str]:
    size = tier.describe(seen.size)
    if options.is_uncertain:
        return "Uncertain", f"what other sizes than {size} would save is not more than may be wrong about it"
    if options.best_of_all:
        best = tier.gain(seen.day, seen.size, options.best_of_all, state.usable)
        return "None", reasons.similar(tier, seen.size, options.best_of_all, best)
    reason = reasons.nothing_better(tier, seen.size, options.threshold)
    if tier.nearer_bytes >= state.usable * seen.size:
        engine = reasons.size_of(tier.nearer_bytes)
        return "Engine", f"the engine's own {engine} already hits what {size} would; {reason}"
    if is_near(seen.size, tier.sizes[-1]):
        return "Max", reason
    if is_near(seen.size, tier.sizes[0]):
        return tier.least_is, reason
    return "None", reason


def _into_bounds(tier: Tier, state: State, seen: Seen) -> tuple[Decision, State]:
    is_small = seen.size < tier.sizes[0]
    target = tier.sizes[0] if is_small else tier.sizes[-1]
    limited_by: LimitedBy = tier.least_is if is_small else "Max"
    allowed = "its traffic needs" if limited_by == "Bandwidth" else "is allowed"
    less = "less" if is_small else "more"
    reason = f"{tier.describe(seen.size)} is {less} than {tier.describe(target)}, which {allowed}"
    return _at_once(state, seen, target, limited_by, reason)


def _at_once(
    state: State, seen: Seen, target: float, limited_by: LimitedBy, reason: str
) -> tuple[Decision, State]:
    """Go there, whatever it is worth; it is not judged."""
    state = _recommended(replace(state, asked=None), target, seen.time)
    return Decision(seen.size, target, state.recommended, target, reason, limited_by), state


def _steady(state: State, seen: Seen, target: float, worth: Mapping[float, float]) -> float:
    """What was recommended before, for a day, if that is near ``target`` and worth going to as well."""
    is_close = state.recommended in worth and abs(target / state.recommended - 1) <= 0.1
    return state.recommended if is_close and seen.time - state.recommended_at < DAY else target


def _recommended(state: State, target: float, time: float) -> State:
    return state if target == state.recommended else replace(state, recommended=target, recommended_at=time)


def _renewed(state: State, seen: Seen) -> State:
    """Other keys: of how they come back nothing is known, but what the tier is like still is."""
    return State(
        namespace=seen.namespace, time=seen.time, started=seen.time, size=state.size,
        filled=seen.time, usable=state.usable,
        recommended=state.recommended, recommended_at=state.recommended_at,
    )  # fmt: skip


def _unusable(tier: Tier, seen: Seen) -> str:
    """Why nothing can be decided with these figures; empty: it can."""
    figures = [
        seen.time, seen.size, seen.new_bytes, tier.usd_per_access, tier.usd_per_byte_hour,
        *(x for demand in (seen.fast, seen.day)
          for x in (demand.num_accesses, demand.accesses_per_hour)),
    ]  # fmt: skip
    shares = (seen.day.measured_hits, seen.settled.measured_hits)
    if (
        not all(0 <= x < math.inf for x in figures)
        or not seen.size
        or not all(0 <= x <= 1.01 for x in shares)
    ):
        return "a figure that was measured makes no sense"
    if not seen.day.accesses_per_hour:
        return "nothing was looked up"
    return ""


def _noticed(state: State, seen: Seen) -> State:
    """The size has changed, by us or by somebody else: it fills, and is to be judged if we asked for it."""
    if not 0 < seen.size < math.inf or is_near(seen.size, state.size):
        return state
    if not state.size:  # the first that is seen
        return replace(state, size=seen.size)
    fill, no_shrink_until = 0.0, state.no_shrink_until
    if (grown := seen.size - state.size) > 0:
        rate = seen.miss_bytes_per_second
        fill = min(_LONGEST_FILL, grown / rate) if rate > 0 else _LONGEST_FILL
        no_shrink_until = max(no_shrink_until, seen.time + _REVERSE)
    asked = state.asked
    is_ours = asked is not None and is_near(asked.new, seen.size)
    return replace(
        state, size=seen.size, asked=None, pending=asked if is_ours else None, back_to=0.0,
        filled=seen.time + fill, due=seen.time + fill + max(30 * MINUTE, fill), shrinks_since=None,
        calm_until=max(state.calm_until, seen.time + _CALM), no_shrink_until=no_shrink_until,
    )  # fmt: skip


def is_near(one: float, other: float) -> bool:
    """The same size, as pods round it."""
    return math.isclose(one, other, rel_tol=0.01)


def _hits(tier: Tier, demand: Window, size: float, usable: float) -> float:
    return demand.between(0.0, tier.effective(size, usable)).share


def _judge(tier: Tier, state: State, seen: Seen) -> tuple[Decision | None, State]:
    """Did the step bring what was said? If not, back to the old size."""
    step = state.pending
    assert step is not None
    state = replace(state, pending=None)
    low, high = (tier.effective(size, state.usable) for size in sorted((step.old, step.new)))
    predicted, error = seen.settled.between(low, high)
    is_growth, is_visible = step.new > step.old, predicted >= max(_SEEN, 2 * error)
    if seen.settled.num_accesses < _FEWEST_TO_JUDGE or (is_growth and not is_visible):
        return None, state  # nothing to be seen
    got = seen.settled.measured_hits - _hits(tier, seen.settled, step.old, state.usable)
    is_wrong = got < predicted / 2 - error
    if not is_growth:
        is_wrong = -got > 2 * predicted + (error if is_visible else max(error, _FALL))
    if not is_wrong:
        return None, replace(state, num_wrong=0)
    num_wrong = state.num_wrong + is_growth
    limited_by: LimitedBy = "Verifying"
    state = _calibrated(tier, state, seen)
    if num_wrong >= 2:
        num_wrong, limited_by = 0, "Frozen"
        state = replace(state, frozen_until=seen.time + _FREEZE)
    state = replace(
        state, num_wrong=num_wrong, calm_until=seen.time + 3 * _CALM, back_to=step.old,
        no_shrink_until=state.no_shrink_until if is_growth else seen.time + _FREEZE,
    )  # fmt: skip
    reason = reasons.taken_back(tier, step, got, predicted)
    return _at_once(state, seen, step.old, limited_by, reason)


def _calibrated(tier: Tier, state: State, seen: Seen) -> State:
    """Fit the usable share of the size to the hits that were measured."""
    if seen.settled.num_accesses < _FEWEST_TO_FIT:
        return state
    got = seen.settled.measured_hits + 0.005
    fit = next((x for x in _USABLE if _hits(tier, seen.settled, seen.size, x) <= got), _USABLE[-1])
    return replace(state, usable=state.usable + (fit - state.usable) / 2)
