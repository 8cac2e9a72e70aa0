"""How long a request waits for rows that are promoted, and how fast the engine computes. Pure."""

from __future__ import annotations

from typing import NamedTuple

from lmcache_store.common.timing import TIMING

_WEIGHT = 0.3
"""Weight of the latest measurement in a moving average."""


class Arrivals:
    """How fast promoted rows arrive, measured by all requests of the engine that wait for rows."""

    def __init__(self) -> None:
        self.last_at = 0.0
        """Time at which the last rows arrived."""
        self.seconds_per_row = 0.0
        """Average time between two rows; 0: not known yet."""

    def note(self, num_rows: int, began_at: float, now: float) -> None:
        """Record ``num_rows`` rows that arrived since the last ones, or since the wait began at ``began_at``.

        If no time has passed since, they don't change the average.
        """
        seconds = (now - max(self.last_at, began_at)) / num_rows
        if seconds > 0:
            self.seconds_per_row = _averaged(self.seconds_per_row, seconds)
        self.last_at = now


class Progress(NamedTuple):
    """Rows of one request that waits, and the state of its engine, in one step."""

    num_found: int
    """Rows in memory now."""
    num_missing: int
    """Rows that may still arrive."""
    now: float
    """Present time."""
    arrivals: Arrivals
    """How fast rows arrive."""
    chunk_seconds: float
    """Time to compute one chunk; 0.0: not known."""
    num_steps: int
    """Steps so far in which the engine computed something."""

    @property
    def missing_seconds(self) -> float:
        """Time to compute the missing rows; 0.0: not known."""
        return self.num_missing * self.chunk_seconds


class RowWait:
    """How long one request waits for rows that are promoted.

    It waits as long as rows arrive faster than the engine would compute them. If no row arrives, it waits at
    most for the time that computing the missing rows would take, within bounds. The reason: a busy machine
    delays the computation just as it delays the rows. ``promotion_seconds`` limits the time without a row of
    this request, however fast the engine computes, and whatever rows other requests get.

    Rows that another engine announced have stricter limits, see ``is_overdue``.
    """

    def __init__(self, num_found: int, now: float, num_steps: int, silence_seconds: float = 0.0) -> None:
        """``silence_seconds``: longest wait for the first row, if more than ``first_row_seconds``.

        It also limits how far the time to compute the missing rows extends later waits.
        """
        self._began_at = self._checked_at = now
        self._num_found = self._num_found_before = num_found
        self._num_steps = num_steps
        self._silence_seconds = max(TIMING.first_row_seconds, silence_seconds)
        self._longest_silence = max(TIMING.promotion_seconds, silence_seconds)
        self._is_silence_set = silence_seconds > 0
        self._has_arrivals = False
        self._arrived_at = now  # time of the last row of this request, or the begin of the wait
        self._is_excused = False

    def is_over(self, progress: Progress) -> bool:
        """Return True if the request shall wait no longer."""
        if self._is_excused_now(progress):
            return False
        now, arrivals, missing_seconds = progress.now, progress.arrivals, progress.missing_seconds
        pace = arrivals.seconds_per_row
        is_slow = self._has_arrivals and 0 < progress.chunk_seconds < pace
        is_silent = now - self._arrived_at >= self._longest_silence  # only other requests get rows
        if is_silent or (is_slow and now - self._began_at >= missing_seconds):
            return True
        has_begun = self._has_arrivals or arrivals.last_at >= self._began_at
        stall = max(TIMING.row_seconds, 4 * pace, min(missing_seconds, self._silence_seconds))
        return now - max(self._began_at, arrivals.last_at) >= (stall if has_begun else self._silence_seconds)

    def is_overdue(self, progress: Progress, *, is_promoted: bool) -> bool:
        """Return True if the request shall wait no longer for rows that another engine announced.

        Only rows of this request count. Announced rows may never arrive, whatever rows other requests get.

        ``is_promoted``: the sidecar is promoting rows. They may queue behind rows of other requests.
        """
        if self._is_excused_now(progress, is_announced=True):
            return False
        now, missing_seconds, silence_seconds = progress.now, progress.missing_seconds, self._silence_seconds
        num_new = progress.num_found - self._num_found_before
        # Time to compute all rows that were missing when the wait began.
        total_seconds = missing_seconds + num_new * progress.chunk_seconds
        if is_promoted:
            silence_seconds = max(silence_seconds, min(missing_seconds, self._longest_silence))
            total_seconds = max(self._silence_seconds, total_seconds)
        if missing_seconds and not self._is_silence_set and now - self._began_at >= total_seconds:
            return True
        return now - self._arrived_at >= silence_seconds

    def _is_excused_now(self, progress: Progress, *, is_announced: bool = False) -> bool:
        """Record rows that arrived. Return True if the time before ``now`` does not count."""
        num_found, now, num_steps = progress.num_found, progress.now, progress.num_steps
        is_after_long_step = num_steps != self._num_steps and now - self._checked_at >= TIMING.row_seconds
        self._checked_at, self._num_steps = now, num_steps
        # During a long step, arrivals were not noticed, and the step took processor time from the promotion.
        # So the time of one such step does not count.
        is_excused = is_after_long_step and not self._is_excused
        if num_found > self._num_found:
            # The time in which announced rows were not stored yet says nothing about promotions.
            began_at = now if is_excused or is_announced else self._began_at
            progress.arrivals.note(num_found - self._num_found, began_at, now)
            self._num_found, self._has_arrivals, self._arrived_at = num_found, True, now
        if is_excused:
            self._is_excused, self._began_at, self._arrived_at = True, now, now
            self._num_found_before = num_found
        return is_excused


class PrefillRate:
    """The engine's prefill rate, measured in timed steps. Steps may overlap (async scheduling)."""

    MIN_STEP_TOKENS = 256
    """Smallest step that is timed. Fixed costs dominate smaller steps."""

    def __init__(self, fixed_tokens_per_second: float = 0.0) -> None:
        """``fixed_tokens_per_second``: the rate that the user has set; 0.0: measure it."""
        self.tokens_per_second = fixed_tokens_per_second
        """Tokens per second; 0: not known yet."""
        self.is_shared = False
        """True if the next step also does work that is not counted in its tokens, so it shows no rate."""
        self._is_fixed = fixed_tokens_per_second > 0
        self._steps: dict[int, tuple[int, float]] = {}  # step -> (tokens, time it was scheduled)
        self._num_steps = 0
        self._last_end = 0.0

    def begin(self, num_tokens: int, now: float, *, is_watched: bool = False) -> int:
        """Start timing a step of ``num_tokens``. Return its number; 0 if its end need not be reported.

        ``is_watched``: the caller needs the end of the step, even if it says nothing about the rate.
        """
        is_shared, self.is_shared = self.is_shared, False
        is_measured = not (self._is_fixed or is_shared) and num_tokens >= self.MIN_STEP_TOKENS
        if not (is_measured or is_watched or is_shared):  # a step that shares its time delays the next one
            return 0
        self._num_steps += 1
        self._steps[self._num_steps] = (num_tokens if is_measured else 0, now)
        return self._num_steps

    def end(self, step: int, now: float) -> None:
        """Record the end of a step. Ignores unknown numbers."""
        num_tokens, began = self._steps.pop(step, (0, now))
        seconds = now - max(began, self._last_end)
        self._last_end = now
        if seconds > 0 and num_tokens:
            self.tokens_per_second = _averaged(self.tokens_per_second, num_tokens / seconds)


def _averaged(known: float, latest: float) -> float:
    """Return the moving average after a measurement; ``known`` is 0.0 before the first one."""
    return known + _WEIGHT * (latest - known) if known else latest
