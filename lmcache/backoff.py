"""How long to wait before the next try. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Twice as long after every failure in a row, up to a cap."""

    base: float
    """Seconds, after the first failure."""

    cap: float
    """Seconds, at most."""

    jitter: float = 0.0
    """Up to this share of them is left off at random, so that not all who wait come back at once."""

    def seconds(self, failures: int) -> float:
        """Return the seconds to wait after this many failures in a row."""
        # The exponent is bounded: what fails for days must not overflow a float.
        whole = min(self.cap, self.base * 2.0 ** min(failures - 1, 30))
        return whole * random.uniform(1.0 - self.jitter, 1.0)
