"""How long a request took, from its arrival to its first token. Pure: callers pass the time.

::

    arrived ─▶ lookup answered ─▶ offered ─▶ load begins ─▶ load ends ─▶ last prompt token computed
    └──── lookup ────┘└── wait ──┘           └─── load ────┘
    └───────────────────────────── first token ───────────────────────────────┘

**Wait** is the time for which the connector holds the request back: for rows that lower tiers or other
requests deliver, or for the engine's memory. The time in the engine's own queue is no wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_client.rpc.times import RequestTimes


@dataclass(slots=True, eq=False)
class RequestClock:
    """Time stamps of one request, in seconds of the scheduler side's clock. None: not known (yet)."""

    request_id: str
    num_tokens: int
    """Tokens to compute or to load until the first new token."""
    asked_at: float
    """Time of the first lookup."""
    arrived_at: float | None
    """Time of the request's arrival; None: its first token was computed before this start."""
    answered_at: float | None = None
    held_since: float | None = None
    wait_seconds: float = 0.0
    load_began_at: float | None = None
    load_ended_at: float | None = None
    first_token_at: float | None = None
    num_loaded_tokens: int = 0
    loaded_end: int = 0
    """Tokens before the end of the load; 0: there was no load."""
    num_failed_tokens: int = 0
    """Tokens of the load that the engine computes, because the load failed."""
    num_blended_tokens: int = 0
    num_recomputed_tokens: int = 0
    is_reported: bool = False
    """True if the engine reported how the request gets its tokens. The sidecar then expects the times."""

    def note_decision(self, now: float, answered_at: float | None, *, is_held: bool) -> None:
        """Record that the connector holds the request back, or lets it go on.

        ``answered_at``: time of the lookup's answer; None: not answered.
        """
        if self.answered_at is None:
            self.answered_at = answered_at
        if is_held:
            if self.held_since is None:
                self.held_since = now
            return
        if self.answered_at is None:  # the request goes on without an answer
            self.answered_at = now
        if self.held_since is not None:
            self.wait_seconds += max(0.0, now - max(self.held_since, self.answered_at))
            self.held_since = None

    def begin_load(self, now: float, end: int, num_tokens: int) -> None:
        """Record a load of the ``num_tokens`` tokens before token ``end``."""
        self.load_began_at, self.loaded_end, self.num_loaded_tokens = now, end, num_tokens

    def note_failed(self) -> None:
        """Record that the load failed. Until ``note_first_step``, all of its tokens count as failed."""
        self.num_failed_tokens = self.num_loaded_tokens
        self.num_blended_tokens = self.num_recomputed_tokens = 0

    def note_first_step(self, num_computed_tokens: int) -> None:
        """Record how many leading tokens the engine had when it first scheduled the request after the load.

        After a failed load, an engine may go on with the part that was loaded.
        """
        if self.num_failed_tokens and self.loaded_end:
            num_missing = max(0, self.loaded_end - num_computed_tokens)
            self.num_failed_tokens = min(self.num_loaded_tokens, num_missing)
            self.loaded_end = 0  # later steps have more tokens

    def times(self) -> RequestTimes:
        """Return the durations as the sidecar wants them."""
        return RequestTimes(
            self.request_id,
            _between(self.asked_at, self.answered_at),
            self.wait_seconds,
            _between(self.load_began_at, self.load_ended_at),
            _between(self.arrived_at, self.first_token_at),
            self.num_failed_tokens,
            self.num_blended_tokens,
            self.num_recomputed_tokens,
        )


def _between(start: float | None, end: float | None) -> float:
    return max(0.0, end - start) if start is not None and end is not None else 0.0
