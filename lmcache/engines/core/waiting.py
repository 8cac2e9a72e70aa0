"""How long a request waits for rows on their way, and how fast the engine would compute them. Pure."""

from __future__ import annotations

STALL_SECONDS = 0.05
"""Rows that are on their way and do not come for so long are waited for no longer, unless computing them
takes longer."""

FIRST_ROW_SECONDS = 0.2
"""The first one may take longer: nothing is known of its tier yet."""

_WEIGHT = 0.3
"""Of the latest measurement in an average."""


class Arrivals:
    """How fast rows come up, seen by all requests of the engine that wait for some."""

    def __init__(self) -> None:
        self.at = 0.0
        """When the last ones came."""
        self.seconds_per_row = 0.0
        """0: not known yet."""

    def note(self, num_rows: int, began_at: float, now: float) -> None:
        """Rows came since the last ones, or since somebody began to wait; just now: that tells no pace."""
        seconds = (now - max(self.at, began_at)) / num_rows
        if seconds > 0:
            self.seconds_per_row = _averaged(self.seconds_per_row, seconds)
        self.at = now


class RowWait:
    """How long one request waits for rows on their way up: as long as they come, and come faster than its
    engine would compute them.

    Silence is tolerated for as long as computing what is missing would take, within bounds: it may be the
    machine's, which is as busy for who computes.
    """

    def __init__(self, num_found: int, now: float, num_steps: int, silence_seconds: float = 0.0) -> None:
        """``silence_seconds``: silence that may be tolerated at most, if more than ``FIRST_ROW_SECONDS``."""
        self._began_at = self._looked_at = now
        self._num_found = num_found
        self._num_steps = num_steps
        self._silence_seconds = max(FIRST_ROW_SECONDS, silence_seconds)
        self._has_some = False
        self._is_excused = False

    def is_over(
        self,
        num_found: int,
        num_missing: int,
        now: float,
        arrivals: Arrivals,
        chunk_seconds: float,
        num_steps: int,
    ) -> bool:
        """``num_found``: rows here now; ``num_missing``: that may come yet; ``chunk_seconds``: what computing
        one takes (0.0: not known); ``num_steps``: in which the engine computed something, so far."""
        is_unseen = num_steps != self._num_steps and now - self._looked_at >= STALL_SECONDS
        self._looked_at, self._num_steps = now, num_steps
        # During a long step nobody looked at what came, and it took the processor from who brings it: once,
        # such a time says nothing.
        is_excused = is_unseen and not self._is_excused
        if num_found > self._num_found:
            arrivals.note(num_found - self._num_found, now if is_excused else self._began_at, now)
            self._num_found, self._has_some = num_found, True
        if is_excused:
            self._is_excused, self._began_at = True, now
            return False
        pace, missing_seconds = arrivals.seconds_per_row, num_missing * chunk_seconds
        if self._has_some and 0 < chunk_seconds < pace and now - self._began_at >= missing_seconds:
            return True
        has_begun = self._has_some or arrivals.at >= self._began_at
        stall = max(STALL_SECONDS, 4 * pace, min(missing_seconds, self._silence_seconds))
        return now - max(self._began_at, arrivals.at) >= (stall if has_begun else self._silence_seconds)


class PrefillRate:
    """Tokens per second of the engine's prefill, from timed steps. Steps may overlap (async scheduling)."""

    MIN_STEP_TOKENS = 256
    """Smaller steps are dominated by fixed costs."""

    def __init__(self, fixed_tokens_per_second: float = 0.0) -> None:
        """``fixed_tokens_per_second``: said by the user, not measured; 0.0: measure it."""
        self.tokens_per_second = fixed_tokens_per_second
        """0: not known yet."""
        self._is_fixed = fixed_tokens_per_second > 0
        self._steps: dict[int, tuple[int, float]] = {}  # step -> (tokens, time it was scheduled)
        self._num_steps = 0
        self._last_end = 0.0

    def begin(self, num_tokens: int, now: float) -> int:
        """Time a step of ``num_tokens``; returns its number, 0 when it is too small to tell something."""
        if self._is_fixed or num_tokens < self.MIN_STEP_TOKENS:
            return 0
        self._num_steps += 1
        self._steps[self._num_steps] = (num_tokens, now)
        return self._num_steps

    def end(self, step: int, now: float) -> None:
        """The step is over; unknown numbers are ignored."""
        num_tokens, began = self._steps.pop(step, (0, now))
        seconds = now - max(began, self._last_end)
        self._last_end = now
        if seconds > 0 and num_tokens:
            self.tokens_per_second = _averaged(self.tokens_per_second, num_tokens / seconds)


def _averaged(known: float, latest: float) -> float:
    """A moving average; 0.0 is not known yet."""
    return known + _WEIGHT * (latest - known) if known else latest
