"""Decides whether to load a row from a lower tier, or to compute its tokens again. Pure.

A row (one chunk of one KV group) in a lower tier is worth loading only if loading is faster than computing it
again. Otherwise a slow disk, or a Redis that many pods read at once, would make a request wait for its own
cache.
"""

from __future__ import annotations

_WORTH = 0.8
"""Loading must take less than this share of the recompute time. The rest is a margin for errors of the
estimate."""

_HALF_LIFE_SECONDS = 2.0
"""Seconds of loading after which a measurement counts half."""

_CERTAIN_SECONDS = 1.0
"""Seconds of loading to measure before a tier is skipped. A shorter measurement may be one stall."""

_KNOWN_SECONDS = 60.0
"""Seconds for which a measured rate is valid. Without a limit, a tier that was slow once would never be tried
again."""


class Rate:
    """Loading rate of a busy tier, over all its readers. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._num_active = 0
        self._mark = 0.0  # time up to which loading is counted
        self._bytes = 0.0
        self._seconds = 0.0
        self._measured_at = 0.0

    @property
    def is_certain(self) -> bool:
        """Was the rate measured long enough for decisions?"""
        return self._seconds >= _CERTAIN_SECONDS

    def begin(self, now: float) -> None:
        """Note the start of a load."""
        if now - self._measured_at >= _KNOWN_SECONDS:
            self._bytes = self._seconds = 0.0
        if self._num_active == 0:
            self._mark = now
        self._num_active += 1

    def end(self, now: float, num_bytes: int) -> None:
        """Note the end of a load. A load of 0 bytes is not measured."""
        self._num_active -= 1
        if num_bytes:
            seconds = now - self._mark
            weight = 0.5 ** (seconds / _HALF_LIFE_SECONDS)
            self._bytes = weight * self._bytes + num_bytes
            self._seconds = weight * self._seconds + seconds
            self._measured_at = now
        self._mark = now

    def bytes_per_second(self, now: float) -> float:
        """Return the rate; 0.0 if unknown."""
        is_known = self._seconds > 0 and now - self._measured_at < _KNOWN_SECONDS
        return self._bytes / self._seconds if is_known else 0.0


def should_load(num_bytes: int, bytes_per_second: float, recompute_seconds: float) -> bool:
    """Is loading ``num_bytes`` clearly faster than recomputing?

    If ``bytes_per_second`` or ``recompute_seconds`` is 0.0 (unknown), the answer is True. The queue of other
    requests does not count: they wait for the engine as well, so computing would be queued just the same. An
    idle engine does not wait for rows that load slowly; its connector takes care of that.
    """
    if not bytes_per_second or not recompute_seconds:
        return True
    return num_bytes / bytes_per_second < _WORTH * recompute_seconds
