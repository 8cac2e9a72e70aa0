"""When to leave a sick tier alone, when to try it again, and what to try once more. Pure but for the clock,
which is given."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Twice as long after every failure in a row, up to a cap."""

    base: float  # seconds, after the first failure
    cap: float

    def compute(self, failures: int) -> float:
        """Seconds to wait after this many failures in a row."""
        # The exponent is bounded: a tier that is away for days must not overflow a float.
        return min(self.cap, self.base * 2.0 ** min(failures - 1, 30))


class RetryStale:
    """Once more, on a new connection, when one that had been idle turns out to be closed.

    It may have been closed by a restart of the server long ago: that says nothing about now. Nothing else is
    tried again: a deadline is spent once, and what failed on a new connection says how the server is.
    """

    def allows(self, error: OSError, *, was_idle: bool) -> bool:
        """Is the operation that ended with this error to be tried again?"""
        return was_idle and isinstance(error, ConnectionError)


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
        self._backoff = Backoff(base, cap)
        self._clock = clock
        self._failures = 0
        self._next_trial: float | None = None  # None: closed
        self._doubts = 0

    @property
    def is_open(self) -> bool:
        """Is the tier to be left alone?"""
        return self._next_trial is not None

    @property
    def seconds_to_trial(self) -> float:
        """Seconds until a trial is due; 0 when it is, or when the circuit is closed."""
        return max(0.0, (self._next_trial or 0.0) - self._clock())

    @property
    def doubts(self) -> int:
        """Changes whenever what the tier held may be lost: it was away, or was restarted."""
        return self._doubts

    def doubt(self) -> None:
        """It may have been restarted."""
        self._doubts += 1

    def failure(self) -> None:
        """An operation or a trial failed."""
        self._failures += 1
        self._next_trial = self._clock() + self._backoff.compute(self._failures)

    def trial_succeeded(self) -> None:
        """The tier answers again."""
        self.doubt()
        self._next_trial = None

    def success(self) -> None:
        """An operation succeeded."""
        self._failures = 0
        self._next_trial = None


class JointBreaker(CircuitBreaker):
    """The circuit of a tier of several servers: open only if those of all of them are. It shows, they
    decide."""

    def __init__(self, parts: Callable[[], Iterable[CircuitBreaker]]) -> None:
        super().__init__()
        self._parts = parts

    @property
    def is_open(self) -> bool:
        """Is there no server to be asked?"""
        return all(part.is_open for part in self._parts())

    @property
    def doubts(self) -> int:
        """See CircuitBreaker; of any of them."""
        return sum(part.doubts for part in self._parts())

    @property
    def seconds_to_trial(self) -> float:
        """Seconds until a trial of one of them is due; 0 when it is, or when a circuit is closed."""
        return min((part.seconds_to_trial for part in self._parts()), default=0.0)
