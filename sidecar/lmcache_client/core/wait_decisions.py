"""Decides in each step which requests wait for rows, instead of computing them.

A request waits for rows that another request of this engine is computing, as long as that request gets steps.
It waits for no request of lower priority. It also waits for rows that the sidecar is promoting, as long as
they arrive faster than the engine would compute them (``waiting.RowWait``), and for rows that a prefill
engine has announced and is still storing. Announced rows may never arrive, so the rows of other requests do
not prolong the wait for them. ``parted_lookups`` limits the waits for other parts of the engine.
"""

from __future__ import annotations

from collections.abc import Callable

from lmcache_client.core.lookups import LookupThread
from lmcache_client.core.requests import Computing, RequestState
from lmcache_client.core.tracing import LOWER_TIERS, NO_TRACER, OTHER_REQUEST, Tracer
from lmcache_client.core.waiting import Arrivals, PrefillRate, Progress, RowWait
from lmcache_store.common.timing import TIMING

IDLE_WAIT_SECONDS = 0.0005
"""How long an idle step sleeps for an answer, unless other engines would sleep with it (``can_wait``)."""

ASK_AGAIN_SECONDS = 0.01
"""Time between two hints about rows that are being promoted, shared by all requests that wait."""

OLD_SECONDS = 1.0
"""Answers older than this are stale: the request spent the time in the queue."""


class WaitDecisions:
    """Decides which requests wait, and counts those of the last step. Used by the scheduler's thread only."""

    def __init__(
        self,
        computing: Computing,
        rate: PrefillRate,
        silence_seconds: float,
        clock: Callable[[], float],
        tracer: Tracer = NO_TRACER,
        can_wait: bool = True,
    ) -> None:
        """``silence_seconds``: see ``RowWait``; ``can_wait``: see ``SchedulerSide``."""
        self._can_wait = can_wait
        self._computing = computing
        self._rate = rate
        self._silence_seconds = silence_seconds
        self._clock = clock
        self._tracer = tracer
        self._arrivals = Arrivals()
        self._num_waiting = 0  # requests that wait in this step
        self._num_waited = 1  # requests that waited in the last step, at least 1
        self._num_steps = 0  # steps that computed something
        self._stepped_at = 0.0  # time at which the last step was scheduled: long steps delay all requests

    def is_computed_elsewhere(self, state: RequestState, num_engine: int, lookups: LookupThread) -> bool:
        """Return True if the request must wait for its next chunk, which another request computes and stores.

        It does not wait for a request of lower priority, nor for one that makes no progress any more.
        """
        chunks, chunk = state.ticket.keys[0] if state.ticket.keys else [], max(state.num_found, num_engine)
        other = self._computing.get(chunks[chunk]) if chunk < len(chunks) else None
        is_waiting = (
            other is not None
            and other.priority <= state.priority
            and self._stepped_at - other.progressed_at < TIMING.hold_seconds
            and lookups.is_attached
            and not lookups.is_store_late(state.ticket, chunk, other)
        )
        self._num_waiting += is_waiting
        if is_waiting:
            self._tracer.hold(state.ticket.request_id, OTHER_REQUEST)
        return is_waiting

    def must_wait(
        self, state: RequestState, lookups: LookupThread, num_hit: int, num_engine: int, chunk_tokens: int
    ) -> bool:
        """Return True if the request must wait for more chunks than the ``num_hit`` that it can load now.

        ``num_engine``: leading chunks that the engine itself has.
        """
        if self.is_computed_elsewhere(state, num_engine, lookups):
            return True
        is_waiting = self._pays_off(state, lookups, num_hit, chunk_tokens)
        self._num_waiting += is_waiting
        if is_waiting:
            self._tracer.hold(state.ticket.request_id, LOWER_TIERS)
        return is_waiting

    def hold(self) -> None:
        """Record that a request waits, whatever rows there are."""
        self._num_waiting += 1

    def end_step(self, num_tokens: int, lookups: LookupThread | None) -> None:
        """Close the step. If it computes nothing while requests wait, sleep shortly for an answer."""
        if self._num_waiting and not num_tokens and lookups is not None and self._can_wait:
            lookups.answered.wait(IDLE_WAIT_SECONDS)
            lookups.answered.clear()
        self._num_waiting, self._num_waited = 0, max(1, self._num_waiting)
        self._num_steps += num_tokens > 0
        self._stepped_at = self._clock()

    def _pays_off(self, state: RequestState, lookups: LookupThread, num_hit: int, chunk_tokens: int) -> bool:
        """Return True if missing chunks are expected sooner than computed, or there is no answer yet."""
        now, ticket = self._clock(), state.ticket
        rate = self._rate.tokens_per_second
        chunk_seconds = chunk_tokens / rate if rate else 0.0
        num_missing = len(ticket.hashes) - num_hit
        num_announced = ticket.num_handed_over - num_hit
        if ticket.keys is None:
            return lookups.is_attached and not lookups.is_late(ticket, num_missing * chunk_seconds)

        def progress(num_missing: int) -> Progress:
            return Progress(state.num_found, num_missing, now, self._arrivals, chunk_seconds, self._num_steps)

        if lookups.knows_all(ticket):
            is_coming = num_announced > 0 and lookups.is_attached
            return is_coming and not self._wait(state, now).is_overdue(
                progress(num_announced), is_promoted=False
            )
        answer = lookups.answer_to(ticket)
        if answer is not None and now - ticket.answered_at >= OLD_SECONDS and state.wait is None:
            ticket.answer = None
            self._wait(state, now)  # the next answer counts, even if steps take longer than OLD_SECONDS
            if not ticket.is_asking:
                lookups.ask(ticket)
            return True
        if answer is None:
            return not lookups.is_late(ticket, num_missing * chunk_seconds)
        if num_hit >= answer.num_expected and not answer.is_probing:
            return False
        if now - ticket.asked_at >= ASK_AGAIN_SECONDS * self._num_waited and not ticket.is_asking:
            lookups.ask(ticket)
        is_promoted = answer.num_expected > num_hit
        if num_announced > 0:
            wait = self._wait(state, now)
            return not wait.is_overdue(progress(num_announced), is_promoted=is_promoted)
        if not answer.is_probing:
            num_missing = answer.num_expected - num_hit
        return not self._wait(state, now).is_over(progress(num_missing))

    def _wait(self, state: RequestState, now: float) -> RowWait:
        if state.wait is None:
            state.wait = RowWait(state.num_found, now, self._num_steps, self._silence_seconds)
        return state.wait
