"""When to leave a sick tier alone, and when to try it again. Pure but for the clock, which is given."""

from __future__ import annotations

import time
from collections.abc import Callable


class CircuitBreaker:
    """Opens at the first failure; while it is open nobody asks the tier anything but a trial in the
    background.

    So a tier that is down, slow or frozen costs one deadline once, and its users nothing per request. A trial
    that succeeds closes the circuit but does not forget the failures: a tier that answers trials and fails at
    work is left alone for longer each time: ``base`` seconds, doubled by every failure in a row up to
    ``cap``. Threads may use it together (a failure counted once too few is harmless).
    """

    def __init__(
        self, base: float = 0.05, cap: float = 0.5, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._base = base
        self._cap = cap
        self._clock = clock
        self._failures = 0
        self._next_trial: float | None = None  # None: closed

    @property
    def is_open(self) -> bool:
        """Is the tier to be left alone?"""
        return self._next_trial is not None

    @property
    def seconds_to_trial(self) -> float:
        """Seconds until a trial is due; 0 when it is, or when the circuit is closed."""
        return max(0.0, (self._next_trial or 0.0) - self._clock())

    def failure(self) -> None:
        """An operation or a trial failed."""
        self._failures += 1
        # The exponent is bounded: a tier that is away for days must not overflow a float.
        self._next_trial = self._clock() + min(self._cap, self._base * 2.0 ** min(self._failures - 1, 30))

    def trial_succeeded(self) -> None:
        """The tier answers again."""
        self._next_trial = None

    def success(self) -> None:
        """An operation succeeded."""
        self._failures = 0
        self._next_trial = None
