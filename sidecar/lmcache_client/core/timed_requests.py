"""Measures how long requests take, for the scheduler side, and reports each request once (``times``).

The OpenTelemetry spans of a request use the same time stamps: ``RequestState.clock``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmcache_client.core.requests import RequestState
from lmcache_client.core.times import RequestClock


class TimedRequests:
    """The clocks of the engine's requests. Used by the scheduler's thread only.

    A request's clock ends with the step that computes its last prompt token, or with the request.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.report: Callable[[Sequence[RequestClock]], object] = lambda _: None
        """Called with the clocks that ended, of requests that were reported as scheduled."""
        self._clock = clock
        # Clocks of requests whose last prompt token a step computes: the step being scheduled, and each step
        # that has not ended, by its number.
        self._next: list[RequestClock] = []
        self._by_step: dict[int, list[RequestClock]] = {}

    def start(self, state: RequestState, arrived_at: float | None, asked_at: float | None = None) -> None:
        """Start to measure a request. See ``RequestClock``; without ``asked_at``, its lookup is sent now."""
        request = state.request
        state.clock = RequestClock(
            request.request_id,
            request.num_tokens,
            self._clock() if asked_at is None else asked_at,
            arrived_at,
        )

    def restart(self, state: RequestState) -> None:
        """Start again to measure a request that starts again. After a failed load, measuring goes on."""
        if not state.has_failed:
            arrived_at = state.clock.arrived_at if state.clock is not None else None
            self.end(state)
            self.start(state, arrived_at)

    def note_decision(self, state: RequestState | None, *, is_held: bool) -> None:
        """Record that the connector holds the request back, or lets it go on."""
        if state is not None and state.clock is not None:
            ticket = state.ticket
            answered_at = ticket.answered_at if ticket.answer is not None else None
            state.clock.note_decision(self._clock(), answered_at, is_held=is_held)

    def begin_load(self, state: RequestState, start: int, num_tokens: int) -> None:
        """Record that a load of ``num_tokens`` tokens from token ``start`` on begins."""
        if state.clock is not None:
            state.clock.begin_load(self._clock(), start + num_tokens, num_tokens)

    def end_blend(self, state: RequestState, num_blended: int, num_recomputed: int) -> None:
        """Record how many tokens of documents the engine uses as they are, and how many it recomputed."""
        if state.clock is not None:
            state.clock.num_blended_tokens, state.clock.num_recomputed_tokens = num_blended, num_recomputed

    def end_load(self, state: RequestState) -> None:
        """Record that the request's load ended on all ranks."""
        if state.clock is not None:
            state.clock.load_ended_at = self._clock()

    def fail_load(self, state: RequestState) -> None:
        """Record that the request's load failed. For a finished request, the engine computes nothing."""
        if state.clock is not None and not state.is_finished:
            state.clock.note_failed()

    def note_scheduled(
        self, state: RequestState, clock: RequestClock, num_computed: int, num_new: int
    ) -> None:
        """Record that the step being scheduled computes ``num_new`` tokens of the request.

        ``num_computed``: tokens of the request after the step.
        """
        clock.note_first_step(num_computed - num_new)
        if num_computed >= clock.num_tokens:
            self._next.append(clock)
            state.clock = None

    @property
    def is_step_watched(self) -> bool:
        """True if the workers must report the end of the step being scheduled."""
        return bool(self._next)

    def begin_step(self, step: int) -> None:
        """Record the number of the step that was just scheduled; 0: its end is not reported."""
        if self._next:
            self._by_step[step], self._next = self._next, []

    def end_step(self, step: int, now: float) -> None:
        """Report the requests whose first token this step or an earlier one computed: steps end in order."""
        ended = [number for number in self._by_step if number <= step]
        clocks = [clock for number in ended for clock in self._by_step.pop(number)]
        for clock in clocks:
            clock.first_token_at = now
        self._send(clocks)

    def end(self, state: RequestState) -> None:
        """Report a request that ends, or starts again, before its first token."""
        if state.clock is not None:
            self._send([state.clock])
            state.clock = None

    def _send(self, clocks: Sequence[RequestClock]) -> None:
        if reported := [clock for clock in clocks if clock.is_reported]:
            self.report(reported)
