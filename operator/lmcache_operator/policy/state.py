"""Inputs and results of a decision, as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from lmcache_operator.policy.tier import LimitedBy
from lmcache_store.curves import Window


class Obstacle(NamedTuple):
    """Reason why the size cannot be decided or changed now."""

    limited_by: LimitedBy
    reason: str


@dataclass(frozen=True)
class Measurements:
    """Everything measured about one tier at the time of a decision."""

    time: float
    """Time of the decision, in seconds. The policy uses no other clock."""
    namespace: str
    """Namespace of the counted keys. Counts say nothing about other namespaces."""
    size: float
    """Current bytes of one copy, on which all copies agree."""
    fast: Window
    """Lookups with a half-life of an hour."""
    day: Window
    """Lookups with a half-life of a day."""
    settled: Window
    """Lookups since ``State.filled``, with a half-life of an hour."""
    new_bytes: float
    """Bytes of the distinct objects that were looked up, for each copy."""
    miss_bytes_per_second: float
    """Rate at which misses fill one copy."""
    locality_loss: float = 0.0
    """Share of accesses that miss only because another pod holds their keys."""
    obstacle: Obstacle | None = None


@dataclass(frozen=True)
class Step:
    """A requested change of size, in bytes of one copy."""

    old: float
    new: float


@dataclass(frozen=True)
class State:
    """The policy's memory between two decisions. All times are seconds of ``Measurements.time``.

    The ConfigMap stores the fields by their names, so renaming a field discards saved state.
    """

    namespace: str | None = None
    time: float = 0.0
    """Time of the latest decision."""
    started: float = 0.0
    """Time of the first decision in this namespace."""
    size: float = 0.0
    """Size at the latest decision; 0 before the first one."""
    usable: float = 0.95
    """Share of its size with which a tier's hits match the curve. The first guess is cautious: a size that is
    1 % short of a cliff loses all hits, and 5 % too much memory costs 5 %."""
    filled: float = -math.inf
    """Time at which the present size will be full. Earlier hits say nothing about this size."""
    due: float = -math.inf
    """Time at which the last step can be verified."""
    asked: Step | None = None
    """Requested step that the pods do not report yet."""
    pending: Step | None = None
    """Step to the present size, until it is verified."""
    num_wrong: int = 0
    """Growths in a row whose hits stayed below the prediction."""
    back_to: float = 0.0
    """Size before a failed step, until the tier has it again or ``calm_until`` passes; 0: none."""
    calm_until: float = -math.inf
    """End of the cooldown: no change before this time."""
    no_shrink_until: float = -math.inf
    shrinks_since: float | None = None
    """Time since which a smaller size has paid without a break."""
    frozen_until: float = -math.inf
    recommended: float = 0.0
    """Recommended size; 0: none yet."""
    recommended_at: float = -math.inf

    def shifted(self, seconds: float) -> State:
        """Shift all times after the clock was set, so that waiting times stay the same."""
        times = {name: getattr(self, name) + seconds for name in _TIMES}
        if self.shrinks_since is not None:
            times["shrinks_since"] = self.shrinks_since + seconds
        return replace(self, **times)

    def recommend(self, size: float, time: float) -> State:
        """Return this state with ``size`` recommended. ``recommended_at`` changes only with the size."""
        return self if size == self.recommended else replace(self, recommended=size, recommended_at=time)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> State:
        """Read the result of ``dataclasses.asdict``. Raises ValueError for anything else."""
        try:
            steps = {name: Step(**step) for name in ("asked", "pending") if (step := values[name])}
            state = cls(**{**values, **steps})
            numbers = [getattr(state, name) for name in _NUMBERS]
            numbers += [value for step in steps.values() for value in asdict(step).values()]
            if any(math.isnan(number) for number in numbers):
                raise ValueError("not a number")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"saved autoscaling state is invalid: {error!r}") from error
        return state


_TIMES = (
    "time", "started", "filled", "due", "calm_until", "no_shrink_until", "frozen_until", "recommended_at",
)  # fmt: skip
_NUMBERS = (*_TIMES, "size", "usable", "num_wrong", "back_to", "recommended")


class Point(NamedTuple):
    """One size on the curve: shares of hits with their 95 % bounds, and money."""

    size: float
    hits: float
    low: float
    high: float
    net: float
    """Net value in USD per hour, compared with the present size."""


@dataclass(frozen=True)
class Decision:
    """The best size, the size to set now, and the reason. Sizes are bytes of one copy."""

    size: float
    """Present size."""
    target: float
    """Best size by the present measurements."""
    recommended: float
    """``target`` without jitter: it follows a change of less than a tenth only once a day."""
    next: float
    """Size to set now; equal to ``size`` if nothing changes."""
    reason: str
    """One sentence with figures, for users."""
    limited_by: LimitedBy = "None"
    saving: float = 0.0
    """Net value of ``target`` compared with the present size, in USD per hour."""
    saving_error: float = 0.0


Outcome = tuple[Decision, State]
"""A decision, and the state for the next one."""


def keep_size(state: State, measured: Measurements, limit: LimitedBy, reason: str) -> Outcome:
    """Decide to change nothing now. The recommendation stays."""
    size = state.recommended or measured.size
    return Decision(measured.size, size, size, measured.size, reason, limit), replace(state, asked=None)


def set_size(state: State, measured: Measurements, size: float, limit: LimitedBy, reason: str) -> Outcome:
    """Decide to set ``size`` at once, regardless of its net value. The policy does not verify this step."""
    state = replace(state, asked=None).recommend(size, measured.time)
    return Decision(measured.size, size, state.recommended, size, reason, limit), state
