"""What a decision starts from and what it comes to: plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from lmcache.curves import Window
from lmcache_operator.autoscaling.tier import LimitedBy


class Obstacle(NamedTuple):
    """Why nothing can be decided now, or not be done."""

    limited_by: LimitedBy
    reason: str


@dataclass(frozen=True)
class Seen:
    """What is known of one tier at the moment of a decision."""

    time: float
    """Seconds; the only clock there is."""
    namespace: str
    """Whose keys were counted; of another one nothing is known."""
    size: float
    """Bytes of one copy, as all of them say of themselves."""
    fast: Window
    """With a half-life of an hour."""
    day: Window
    """With a half-life of a day."""
    settled: Window
    """As ``fast``, of what came after ``State.filled`` only."""
    new_bytes: float
    """Of distinct objects that one copy has seen."""
    miss_bytes_per_second: float
    """That one copy is filled with."""
    locality_loss: float = 0.0
    """Share of accesses that miss because they went to a pod that another one's cache would have served."""
    obstacle: Obstacle | None = None


@dataclass(frozen=True)
class Step:
    """A change of size that was asked for."""

    old: float
    new: float


@dataclass(frozen=True)
class State:
    """What has to be remembered between two decisions; times are seconds, of ``Seen.time``."""

    namespace: str | None = None
    time: float = 0.0
    """Of the latest decision."""
    started: float = 0.0
    """When the namespace was seen first."""
    size: float = 0.0
    usable: float = 0.95
    """The share of its size with which a tier hits what the curve says: being 1 % short of a cliff loses all
    hits, 5 % too much cost 5 %."""
    filled: float = -math.inf
    """When the present size will have been filled; what was hit before tells nothing of it."""
    due: float = -math.inf
    """When the last step can be judged."""
    asked: Step | None = None
    """A step that is not seen yet."""
    pending: Step | None = None
    """The step to the present size, until it is judged."""
    num_wrong: int = 0
    """Growths in a row that did not bring what was predicted."""
    back_to: float = 0.0
    """The size before a step that was wrong, until it is seen again or ``calm_until`` is over; 0: none."""
    calm_until: float = -math.inf
    """No change before."""
    no_shrink_until: float = -math.inf
    shrinks_since: float | None = None
    """Since when a smaller size has been better without a break."""
    frozen_until: float = -math.inf
    recommended: float = 0.0
    """0: nothing yet."""
    recommended_at: float = -math.inf

    def moved(self, seconds: float) -> State:
        """The same by a clock that was set: what would come in an hour still does."""
        times = {name: getattr(self, name) + seconds for name in _TIMES}
        if self.shrinks_since is not None:
            times["shrinks_since"] = self.shrinks_since + seconds
        return replace(self, **times)

    def as_json(self) -> dict[str, Any]:
        """Plain values; ``from_json`` reads them."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> State:
        """Raise ValueError for what ``as_json`` did not return."""
        try:
            steps = {name: Step(**step) for name in ("asked", "pending") if (step := values[name])}
            state = cls(**{**values, **steps})
            numbers = [getattr(state, name) for name in _NUMBERS]
            numbers += [value for step in steps.values() for value in asdict(step).values()]
            if any(math.isnan(number) for number in numbers):
                raise ValueError("not a number")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not the state of an autoscaler: {error}") from error
        return state


_TIMES = (
    "time", "started", "filled", "due", "calm_until", "no_shrink_until", "frozen_until", "recommended_at",
)  # fmt: skip
_NUMBERS = (*_TIMES, "size", "usable", "num_wrong", "back_to", "recommended")


class Point(NamedTuple):
    """One size of the curve."""

    size: float
    hits: float
    low: float
    high: float
    net: float
    """USD per hour, compared with the present size."""


@dataclass(frozen=True)
class Decision:
    """What would be best, what to do now, and why."""

    size: float
    """At present, bytes of one copy."""
    target: float
    """The best size, as far as it is known."""
    recommended: float
    """As ``target``, but changed only when that differs by more than a tenth, or once a day."""
    next: float
    """The size to go to now; the present one when nothing is to be done."""
    reason: str
    """A sentence, with figures."""
    limited_by: LimitedBy = "None"
    saving: float = 0.0
    """USD per hour that ``target`` is worth more than the present size."""
    saving_error: float = 0.0
