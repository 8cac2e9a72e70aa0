"""Limits on what peers may take from a pod: bytes, and processor time for their questions."""

from __future__ import annotations

import math
import threading
import time
from typing import NamedTuple

MIN_BYTES_PER_SECOND = 16 << 20
"""Smallest rate that may be set. A client waits for a piece of 1 MiB for a second at most, by default."""
MAX_DELAY_SECONDS = 0.5
"""Longest time for which a column waits for its turn. A client's deadline for a piece is 1 s by default."""
_BURST_SECONDS = 0.1
"""Unused time that later questions may take."""
_SHARE = 0.25
"""Share of one processor that questions may take. They run Python code, which delays the event loop."""
_SECONDS_PER_QUESTION, _SECONDS_PER_ROW = 200e-6, 5e-6
"""Estimated processor time of a message with questions, and of each row in it, in all threads together."""


class Pace:
    """Limits a rate, summed over all threads. 0 means no limit."""

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._free_at = 0.0  # time at which all reservations end

    def reserve(self, number: float) -> Turn | None:
        """Reserve the time for ``number`` bytes. Returns None if it would begin too late.

        A column is reserved as a whole. So no column is refused after its first piece.
        """
        if not self._per_second:
            return Turn(0.0, math.inf, self._is_closed)
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_at)
            if begin > now + MAX_DELAY_SECONDS:
                return None
            self._free_at = begin + number / self._per_second
        return Turn(begin, self._per_second, self._is_closed)

    def close(self) -> None:
        """End all waits."""
        self._is_closed.set()


class Turn(NamedTuple):
    """Reserved time in which bytes may be sent."""

    begin: float
    per_second: float
    is_closed: threading.Event

    def wait_for(self, offset: float) -> bool:
        """Wait until the byte at ``offset`` may be sent. Returns False if the server closes."""
        return not self.is_closed.wait(max(0.0, self.begin + offset / self.per_second - time.monotonic()))


class QuestionBudget:
    """Limits the processor time of questions, summed over all connections."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_at = 0.0

    def has_time(self) -> bool:
        """Is there time for a question now? If not, its answer is that the rows are absent."""
        with self._lock:
            return time.monotonic() >= self._free_at

    def spend(self, num_rows: int) -> None:
        """Count a message that asks for ``num_rows`` rows."""
        seconds = (_SECONDS_PER_QUESTION + num_rows * _SECONDS_PER_ROW) / _SHARE
        with self._lock:
            self._free_at = max(time.monotonic() - _BURST_SECONDS, self._free_at) + seconds
