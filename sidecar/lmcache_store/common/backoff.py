"""Exponential back-off: the time to wait before the next attempt. Pure: no I/O and no clock."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """A waiting time that doubles after every consecutive failure, up to a cap."""

    base: float
    """Seconds to wait after the first failure."""

    cap: float
    """Longest wait in seconds."""

    jitter: float = 0.0
    """Largest share of the wait that is subtracted at random, so that not all clients retry at once."""

    def seconds(self, failures: int) -> float:
        """Return the seconds to wait after ``failures`` consecutive failures."""
        # The exponent is bounded, so that days of failures do not overflow a float.
        longest = min(self.cap, self.base * 2.0 ** min(failures - 1, 30))
        return longest * random.uniform(1.0 - self.jitter, 1.0)
