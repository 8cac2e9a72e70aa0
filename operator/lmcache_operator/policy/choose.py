"""Choice of a size by its net value in USD per hour. Pure.

Sizes are compared over the whole range. Slopes, fill levels and hit ratios mislead: curves have cliffs, and
an engine's own cache adds a second local maximum. A growth must pay for the last hour and for the last day.
A shrink must pay for an hour without a break, and goes in small steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from lmcache_operator.policy import DAY, HOUR, explanations
from lmcache_operator.policy.state import Decision, Measurements, Outcome, State, Step, keep_size
from lmcache_operator.policy.tier import Gain, LimitedBy, Tier, is_near
from lmcache_store.common.units import format_seconds, format_size

_MIN_SHRINK_DATA = 6 * HOUR
"""Data that a shrink needs. A young curve lacks reuse over long distances, and so favours small sizes."""
_SHRINK_DELAY = HOUR
_MIN_SAVING = 0.005
"""Smallest saving that is worth a change, as a share of the present cost."""
_SIMILAR_SIZE_FACTOR = 10
"""Multiple of the smallest saving that a similar size must save, for example because of a cliff."""
_MIN_LOCALITY_LOSS = 0.05
"""Share of prompt tokens from which on the status names routing. Pods with sticky sessions that share system
prompts lose up to 4.6 % (test_closed_loop)."""


class _Wait(NamedTuple):
    limited_by: LimitedBy
    until: float


@dataclass(frozen=True)
class _Options:
    """Sizes that are worth a change, each with the lower bound of its net value in USD per hour."""

    threshold: float
    """Smallest saving that is worth a change."""
    best_of_all: float
    """Best size, similar sizes included; 0: none is better than the present size."""
    larger: Mapping[float, float]
    smaller: Mapping[float, float]
    is_uncertain: bool
    """Whether a size is excluded only because of its sampling error."""

    def best(self, values: Mapping[float, float]) -> float:
        """Return the smallest size that is nearly as good as the best one."""
        enough = max(values.values()) - self.threshold / 2
        return min(size for size, value in values.items() if value >= enough)


def choose(tier: Tier, state: State, measured: Measurements) -> Outcome:
    """Choose a size by its net value, and the step towards it."""
    options = _options(tier, state, measured)
    since = measured.time if state.shrinks_since is None else state.shrinks_since
    state = replace(state, shrinks_since=since if options.smaller else None)
    best_up, best_down = (max(sizes.values(), default=0.0) for sizes in (options.larger, options.smaller))
    if options.larger and best_up >= best_down:
        target = _steady(state, measured, options.best(options.larger), options.larger)
        # A step at least reaches the first size that pays: a size in a valley would be reverted.
        size = max(tier.step(measured.size, target), min(options.larger))
        wait = _Wait("Cooldown", state.calm_until) if measured.time < state.calm_until else None
        decision, state = _change(tier, state, measured, target, size, wait)
    elif options.smaller:
        target = _steady(state, measured, options.best(options.smaller), options.smaller)
        size = tier.step(measured.size, target)
        decision, state = _change(tier, state, measured, target, size, _shrink_wait(state, measured))
    else:
        why = _why_keep(tier, state, measured, options)
        decision, state = keep_size(state.recommend(measured.size, measured.time), measured, *why)
    lost = tier.saved(measured.day, measured.locality_loss)
    if measured.locality_loss >= _MIN_LOCALITY_LOSS and lost > max(options.threshold, best_up):
        # A growth that pays is made even if routing loses more.
        limited_by = decision.limited_by if decision.target > measured.size else "Locality"
        reason = f"{decision.reason}; {explanations.locality(measured.locality_loss, lost)}"
        decision = replace(decision, limited_by=limited_by, reason=reason)
    return decision, state


def _options(tier: Tier, state: State, measured: Measurements) -> _Options:
    present, paid = measured.size, tier.usd_per_byte_hour * measured.size
    lost = tier.saved(measured.day, 1 - measured.day.measured_hits)
    threshold = _MIN_SAVING * (lost + paid)

    def gains(size: float) -> list[Gain]:
        demands = (measured.fast, measured.day) if size > present else (measured.day,)
        return [tier.gain(demand, present, size, state.usable) for demand in demands]

    by_size = {size: gains(size) for size in tier.sizes if not is_near(size, present)}
    lows = {size: min(gain.low for gain in values) for size, values in by_size.items()}
    better = {size: low for size, low in lows.items() if low >= threshold and low > 0}
    much = _SIMILAR_SIZE_FACTOR * threshold
    worth = {size: low for size, low in better.items() if low >= much or not tier.is_similar(present, size)}
    rejected = (values for size, values in by_size.items() if size not in better)
    return _Options(
        threshold,
        max(better, key=better.__getitem__, default=0.0),
        {size: low for size, low in worth.items() if size > present},
        {size: low for size, low in worth.items() if size < present},
        any(0 < min(gain.net for gain in values) >= threshold for values in rejected),
    )


def _shrink_wait(state: State, measured: Measurements) -> _Wait | None:
    """Return why a shrink must wait, and until when; None if it need not."""
    assert state.shrinks_since is not None
    young = state.started + _MIN_SHRINK_DATA
    if measured.time < young or measured.new_bytes < 2 * measured.size:
        return _Wait("Young", young)
    until = max(state.calm_until, state.no_shrink_until, state.shrinks_since + _SHRINK_DELAY)
    return _Wait("Cooldown", until) if measured.time < until else None


def _change(
    tier: Tier, state: State, measured: Measurements, target: float, size: float, wait: _Wait | None
) -> Outcome:
    """Recommend ``target``, and set ``size`` on the way to it unless the change must wait."""
    gain = tier.gain(measured.day, measured.size, target, state.usable)
    reason = explanations.change(tier, measured.size, target, gain)
    limited_by: LimitedBy = "None"
    if target == tier.sizes[-1] and target > measured.size:
        limited_by = "Max"
    elif target == tier.sizes[0] and target < measured.size:
        limited_by = tier.limited_at_min
    if wait:
        limited_by, until = wait
        size = measured.size
        if until > measured.time:
            reason += f"; waiting another {format_seconds(until - measured.time)}"
        else:
            reason += f"; waiting for lookups of {tier.describe(2 * measured.size)} of different keys"
    state = state.recommend(target, measured.time)
    if size != measured.size:
        state = replace(state, asked=Step(measured.size, size), shrinks_since=None)
    values = (state.recommended, size, reason, limited_by, gain.net, gain.error)
    return Decision(measured.size, target, *values), state


def _why_keep(tier: Tier, state: State, measured: Measurements, options: _Options) -> tuple[LimitedBy, str]:
    size = tier.describe(measured.size)
    if options.is_uncertain:
        return "Uncertain", f"the sampling error is too large to prefer another size to {size}"
    if options.best_of_all:
        best = tier.gain(measured.day, measured.size, options.best_of_all, state.usable)
        return "None", explanations.similar(tier, measured.size, options.best_of_all, best)
    reason = explanations.nothing_better(tier, measured.size, options.threshold)
    if tier.engine_cache_bytes >= state.usable * measured.size:
        engine = format_size(tier.engine_cache_bytes)
        return "Engine", f"the engine's own cache of {engine} already hits what {size} would; {reason}"
    if is_near(measured.size, tier.sizes[-1]):
        return "Max", reason
    if is_near(measured.size, tier.sizes[0]):
        return tier.limited_at_min, reason
    return "None", reason


def _steady(state: State, measured: Measurements, target: float, worth: Mapping[float, float]) -> float:
    """Return the former recommendation for up to a day if it is close to ``target`` and still pays."""
    is_close = state.recommended in worth and abs(target / state.recommended - 1) <= 0.1
    return state.recommended if is_close and measured.time - state.recommended_at < DAY else target
