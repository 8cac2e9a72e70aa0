"""Load or recompute? Pure.

A row that a lower tier holds is worth bringing only if that is sooner done than computing it again: a slow
disk, or a Redis that everybody reads from at once, would otherwise make a request wait for its own cache.
"""

from __future__ import annotations

_WORTH = 0.8
"""Of the time of recomputing: below it loading wins by more than the estimate's error."""

_HALF_LIFE_SECONDS = 2.0
"""Loads before so many seconds of loading count half."""

_CERTAIN_SECONDS = 1.0
"""Of loading, at least, to pass a tier by: less may have been one stall, and it costs a minute's hits."""

_KNOWN_SECONDS = 60.0
"""A rate that was measured longer ago is not known any more: else a tier that was slow once would never be
tried again."""


class Rate:
    """Bytes per second of a tier at work, all its readers together. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._num_active = 0
        self._mark = 0.0  # how far time is accounted for
        self._bytes = 0.0
        self._seconds = 0.0
        self._measured_at = 0.0

    @property
    def is_certain(self) -> bool:
        """Was it measured for long enough to decide by it?"""
        return self._seconds >= _CERTAIN_SECONDS

    def begin(self, now: float) -> None:
        """A load begins."""
        if now - self._measured_at >= _KNOWN_SECONDS:
            self._bytes = self._seconds = 0.0
        if self._num_active == 0:
            self._mark = now
        self._num_active += 1

    def end(self, now: float, num_bytes: int) -> None:
        """A load ends; one that brought nothing measures nothing."""
        self._num_active -= 1
        if num_bytes:
            seconds = now - self._mark
            kept = 0.5 ** (seconds / _HALF_LIFE_SECONDS)
            self._bytes = kept * self._bytes + num_bytes
            self._seconds = kept * self._seconds + seconds
            self._measured_at = now
        self._mark = now

    def bytes_per_second(self, now: float) -> float:
        """The rate, 0.0 when it is not known."""
        is_known = self._seconds > 0 and now - self._measured_at < _KNOWN_SECONDS
        return self._bytes / self._seconds if is_known else 0.0


def should_load(num_bytes: int, bytes_per_second: float, recompute_seconds: float) -> bool:
    """Is bringing ``num_bytes`` clearly sooner done than recomputing?

    0.0 for either rate: not known, and then it is tried. What other requests have queued before does not
    count: those wait for the engine as well, so their computing would be queued just the same. An engine that
    has nothing else to do does not wait for rows that are slow to come (its connector watches them).
    """
    if not bytes_per_second or not recompute_seconds:
        return True
    return num_bytes / bytes_per_second < _WORTH * recompute_seconds
