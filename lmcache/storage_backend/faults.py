"""What happens to faults of a medium: they are counted and said, and never reach the engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_SECONDS_BETWEEN_LINES = 10.0


class FaultLog:
    """Counts faults, and writes a line about the first and then at most one every ten seconds."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_faults = 0
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()  # protects the count and the time
        self._next_line = float("-inf")

    def note(self, what: str, error: object = "") -> None:
        """Count one fault; ``what`` says what was lost by it."""
        with self._lock:
            self.num_faults += 1
            if self._clock() < self._next_line:
                return
            self._next_line = self._clock() + _SECONDS_BETWEEN_LINES
        reason = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else error
        self._logger.warning("%s: %s (%d faults so far)", what, reason, self.num_faults)
