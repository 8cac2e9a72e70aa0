"""Load or recompute? Pure.

A row that a lower tier holds is worth bringing only if that is sooner done than computing it anew: a slow
disk, or a Redis that everybody reads from at once, would otherwise make a request wait for its own cache.
"""

from __future__ import annotations

_WORTH = 0.8
"""Of the time of recomputing: below it loading wins by more than the estimate's error."""

_DECAY = 0.9
"""What each load leaves of the weight of those before it: about the last ten count."""

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

    def begin(self, now: float) -> None:
        """A load begins."""
        if self._num_active == 0:
            self._mark = now
        self._num_active += 1

    def end(self, now: float, num_bytes: int) -> None:
        """A load ends; one that brought nothing measures nothing."""
        self._num_active -= 1
        if num_bytes:
            self._bytes = _DECAY * self._bytes + num_bytes
            self._seconds = _DECAY * self._seconds + now - self._mark
            self._measured_at = now
        self._mark = now

    def bytes_per_second(self, now: float) -> float:
        """The rate, 0.0 when it is not known."""
        is_known = self._seconds > 0 and now - self._measured_at < _KNOWN_SECONDS
        return self._bytes / self._seconds if is_known else 0.0


def is_worth(num_bytes: int, bytes_per_second: float, recompute_seconds: float) -> bool:
    """Is bringing ``num_bytes`` clearly sooner done than recomputing?

    0.0 for either rate: not known, and then it is tried. What other requests have queued before does not
    count: those wait for the engine as well, so their computing would be queued just the same. An engine that
    has nothing else to do does not wait for rows that are slow to come (its connector watches them).
    """
    if not bytes_per_second or not recompute_seconds:
        return True
    return num_bytes / bytes_per_second < _WORTH * recompute_seconds
