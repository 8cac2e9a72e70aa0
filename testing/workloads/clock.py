"""A time that runs faster than ours. It needs nothing else: an operator in its pod has it, too."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple


class Clock(NamedTuple):
    """The workload's time, while it is replayed: ``factor`` times as fast as real time since ``origin``."""

    origin: float
    """Seconds since 1970; both times are the same there."""
    factor: float

    def at(self, real: float) -> float:
        """The workload's time at a real time; both in seconds since 1970."""
        return self.origin + (real - self.origin) * self.factor

    def now(self) -> float:
        return self.at(time.time())

    def wait_until(self, moment: float, stop: threading.Event) -> None:
        """Until it is so late in the workload's time, or ``stop`` is set."""
        stop.wait(max(0.0, (moment - self.now()) / self.factor))
