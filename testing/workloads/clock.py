"""An accelerated clock. It has no dependencies, because an operator in its pod uses it, too."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple


class Clock(NamedTuple):
    """Time of a replayed workload, ``factor`` times as fast as real time since ``origin``."""

    origin: float
    """Seconds since 1970 at which both times are equal."""
    factor: float

    def workload_time(self, real: float) -> float:
        """The workload's time at a real time, both in seconds since 1970."""
        return self.origin + (real - self.origin) * self.factor

    def now(self) -> float:
        return self.workload_time(time.time())

    def wait_until(self, moment: float, stop: threading.Event) -> None:
        """Wait until this moment of the workload's time, or until ``stop`` is set."""
        stop.wait(max(0.0, (moment - self.now()) / self.factor))
