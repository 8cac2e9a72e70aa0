"""Looks up requests in the sidecar's index in shared memory, and calls the sidecar on another thread.

The scheduler's thread reads the index itself (``find``). It only enqueues hints, leases and releases.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from lmcache_client.core.calls import PAUSE_SECONDS, Calls
from lmcache_client.core.hits import NOWHERE, Hit, RowFinder, find_chains, find_hit, no_hit, words_of
from lmcache_client.core.jobs import EngineIdentity, StepMeta
from lmcache_client.core.requests import RequestState, Ticket
from lmcache_client.core.times import RequestClock
from lmcache_client.core.waiting import PrefillRate
from lmcache_client.errors import UnnamedError
from lmcache_client.rpc.client import SidecarClient
from lmcache_client.rpc.kvcache_pb2 import Scheduled
from lmcache_client.rpc.service import MAX_FIRST_BLOCKS, MAX_TIMES, NAME_BYTES, shortened
from lmcache_client.rpc.session import SidecarSession
from lmcache_store.common.timing import TIMING
from lmcache_store.common.units import ceil_div
from lmcache_store.tiers.memory.contracts import Found, LookupResult

logger = logging.getLogger(__name__)

T = TypeVar("T")


_BATCH_SECONDS = 0.1
"""Shortest time between two calls that only report the times of requests. Releases carry them, too."""

_MAX_UNSENT_TIMES = 4096

MIN_ANSWER_SECONDS, MAX_ANSWER_SECONDS = 0.02, 0.2
"""Bounds of the measured time that the sidecar has for an answer."""

_IDLE_SECONDS = 5.0
"""Time without tasks between two calls of ``LookupThread.idle_task``."""

_FEW_KEYS = 32
"""Number of keys that the calling thread computes itself, in about 20 us. Waking a thread takes longer."""


class LookupThread:
    """Serves tickets and releases in order, on a thread. All methods return at once and never raise."""

    is_relaying = False
    """True if the sidecar of another part counts the requests."""

    def __init__(
        self,
        client: SidecarClient,
        identity: EngineIdentity,
        rate: PrefillRate,
        answer_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``rate``: the engine's prefill rate, 0.0 tokens per second if unknown;
        ``answer_seconds``: see the attribute, 0.0: as measured."""
        self._client = client
        self._calls = Calls(client)
        self._grid = identity.grid
        self._groups = [group.group for group in self._grid.stored]
        self._rate = rate
        self._clock = clock
        self._fixed_seconds = answer_seconds
        self._call_seconds = max(TIMING.lookup_seconds, answer_seconds)
        self.answer_seconds = answer_seconds or MIN_ANSWER_SECONDS
        """Longest silence of the sidecar before its answer is late, in seconds. If measured, it is twice the
        99th percentile of the latest answer times, within bounds."""
        self.idle_task: Callable[[SidecarSession], object] | None = None
        """Calls the sidecar from time to time while there are no tasks. Set this before ``run``."""
        self.private_reason = ""
        """Why keys became private after the attach, for the sidecar's pages; empty: they did not."""
        self._answered_at = -math.inf  # time of the sidecar's last answer to any call
        self._latest: deque[float] = deque(maxlen=100)  # latest answer times, in seconds
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # Loads without a lease, with their last chunks; those of documents have no report.
        self._unleased: dict[Ticket, tuple[int, Scheduled | None]] = {}
        self._has_unreleased = False  # True while releases have not been answered
        self._times: deque[RequestClock] = deque(maxlen=_MAX_UNSENT_TIMES)  # ended, not sent yet
        self._times_sent_at = -math.inf
        self.answered = threading.Event()  # set after every answer
        self._thread = threading.Thread(target=self._run, name="lmcache-lookup", daemon=True)
        self._thread.start()

    @property
    def is_attached(self) -> bool:
        """True if the client is attached to a sidecar."""
        return self._client.session is not None

    @property
    def index(self) -> RowFinder | None:
        """Index of the rows in memory, readable without a call; None: there is no sidecar."""
        session = self._client.session
        return session.index if session is not None else None

    def knows_all(self, ticket: Ticket) -> bool:
        """Return True if the sidecar's answer could not show more rows than the index does."""
        session = self._client.session
        return session is None or session.memory_only

    def answer_to(self, ticket: Ticket) -> LookupResult | None:
        """Return the answer to the ticket's last hint; None: it is still outstanding."""
        return ticket.answer

    def is_late(self, ticket: Ticket, missing_seconds: float) -> bool:
        """Return True if the sidecar has been silent for too long. Answers to other tickets end the silence,
        until ``promotion_seconds``.

        ``missing_seconds``: time to compute the chunks that the answer may save; 0.0: not known.
        """
        bound = self.answer_seconds
        if not self._fixed_seconds:
            bound = max(bound, min(missing_seconds, MAX_ANSWER_SECONDS))
        now, longest = self._clock(), max(TIMING.promotion_seconds, self._fixed_seconds)
        return now - max(ticket.asked_at, self._answered_at) >= bound or now - ticket.asked_at >= longest

    def is_store_late(self, ticket: Ticket, chunk: int, other: RequestState) -> bool:
        """Return True if the request must no longer wait for another one to store this chunk."""
        return False

    def find(self, ticket: Ticket, at_least: int = 0) -> Hit | None:
        """Find the longest hit in memory, without a call. Returns None while its keys are not known.

        ``at_least``: leading chunks that the engine itself has.
        """
        if not self._has_keys(ticket):
            return None
        session = self._client.session
        if session is None or session.index is None or not ticket.keys or not ticket.keys[0]:
            return no_hit(self._grid)
        return find_hit(session.index, self._grid, ticket.words, at_least)

    def find_rows(self, tickets: Sequence[Ticket | None]) -> list[Found]:
        """Find the leading rows of each ticket, for engines with one group of full attention; None has none.

        This takes 1 ms for 256 tickets, and 256 calls of ``find`` take 7 ms.
        """
        known = [ticket.words if ticket and self._has_keys(ticket) else () for ticket in tickets]
        chains = [words[0] if words else words_of(b"") for words in known]
        return find_chains(index, chains) if (index := self.index) is not None else [NOWHERE] * len(chains)

    def ask(self, ticket: Ticket) -> None:
        """Send a hint: ask which chunks are being promoted, and let the sidecar promote more; no lease."""
        ticket.asked_at = self._clock()
        if self._has_all(ticket):
            ticket.answered_at, ticket.answer = self._clock(), LookupResult()
            return
        ticket.is_asking = True
        self._queue.put(partial(self._serve, ticket))

    def note_scheduled(self, state: RequestState, num_tokens: int = 0) -> None:
        """Report how a scheduled request gets its chunks, for the sidecar's counts.

        The engine loads ``num_tokens`` tokens after its own. A load is reported with its lease or, if it ends
        before it gets one, at its end.
        """
        ticket, num_held, num_engine = state.ticket, state.num_held, state.num_engine_tokens
        num_loaded = ceil_div(num_engine + num_tokens, self._grid.chunk_tokens) if num_tokens else 0
        blocks = ticket.first_hashes[:MAX_FIRST_BLOCKS]
        first_blocks = b"".join(block[-NAME_BYTES:] for block in blocks)
        scheduled = Scheduled(
            num_engine_chunks=num_held,
            num_hit_chunks=max(num_held, num_loaded),
            num_loaded_tokens=num_tokens,
            num_prompt_tokens=state.request.num_tokens,
            num_engine_tokens=num_engine,
            first_blocks=first_blocks,
            block_tokens=self._grid.hash_tokens,
            reports_times=state.clock is not None,
            num_blended_tokens=state.num_blended_tokens,
        )
        if state.clock is not None:
            state.clock.is_reported = True
        if num_loaded:
            self._unleased[ticket] = num_loaded, scheduled
        else:
            self._queue.put(partial(self._report_scheduled, ticket, 0, scheduled))

    def note_loading(self, ticket: Ticket, chunks: range) -> None:
        """Record that these chunks of a document are being loaded for a prompt."""
        ticket.first_loaded, self._unleased[ticket] = chunks.start, (chunks.stop, None)

    def lease_loads(self) -> None:
        """Take leases for the chunks of all running loads that have none."""
        for ticket, (num_loaded, scheduled) in self._unleased.items():
            self._queue.put(partial(self._report_scheduled, ticket, num_loaded, scheduled))
        self._unleased.clear()

    def release(self, ticket: Ticket) -> None:
        """End the ticket's lease, if it has one. Call this when its load has ended."""
        if ticket in self._unleased:
            self._queue.put(partial(self._report_scheduled, ticket, 0, self._unleased.pop(ticket)[1]))
        self._queue.put(partial(self._release, ticket))

    def end(self, ticket: Ticket) -> None:
        """Record that the ticket's request ended without a load. It has no lease."""

    def end_step(self, meta: StepMeta) -> StepMeta:
        """Return the step's message with the calls to other parts. Call this also after ``close``."""
        return meta

    def note_output(self, report: object) -> None:
        """Record the output of a step, with the joined report of all ranks or None."""

    def note_times(self, clocks: Sequence[RequestClock]) -> None:
        """Report how long requests took that were reported as scheduled. Another call carries the times."""
        self._queue.put(partial(self._keep_times, clocks))

    def run(self, task: Callable[[SidecarSession], object]) -> None:
        """Call the sidecar on the thread, in order. Without a session that answers, the task is dropped."""
        self._queue.put(partial(self._call, task))

    def close(self) -> None:
        """Let the thread serve its queue, then end and detach. Returns at once."""
        self._queue.put(None)

    def _run(self) -> None:
        while True:
            try:
                task = self._queue.get(timeout=self._idle_seconds)
            except queue.Empty:
                if self._has_unreleased or self._times:
                    task = partial(self._release_ids, [])
                elif self.idle_task is not None:
                    task = partial(self._call, self.idle_task)
                else:
                    continue
            if task is None:
                break
            self._do(task)
        self._do(self._send_times)
        self._detach()

    def _detach(self) -> None:
        self._client.close()

    @property
    def _idle_seconds(self) -> float | None:
        """Longest wait for a task; None: nothing is left to send."""
        if self._times:
            return _BATCH_SECONDS
        if self._has_unreleased:
            return PAUSE_SECONDS
        return None if self.idle_task is None else _IDLE_SECONDS

    def _do(self, task: Callable[[], object]) -> None:
        try:
            task()
        except Exception:  # this thread serves all requests: one bad ticket must not end it
            logger.exception("A task of the lookup thread failed; the engine goes on")

    def _serve(self, ticket: Ticket) -> None:
        answer: LookupResult | None = None
        try:
            if ticket.extra_keys is None and ticket.find_extra_keys is not None:
                try:
                    ticket.extra_keys = ticket.find_extra_keys()
                except UnnamedError as error:
                    ticket.uncached_reason = str(error)
                ticket.make_keys(self._groups)
            elif ticket.keys is None:
                ticket.make_keys(self._groups)
            if not self._has_all(ticket):
                answer = self._call(lambda session: self._lookup(session, ticket, is_hint=True))
        finally:
            now = self._clock()
            if ticket.keys is None:  # finding its keys raised: the request is not cached, and does not wait
                ticket.keys = tuple([] for _ in self._groups)
            ticket.answered_at, ticket.answer = now, answer or LookupResult()
            ticket.is_asking = False
            self._adapt(now - ticket.asked_at)
            self.answered.set()

    def _has_all(self, ticket: Ticket) -> bool:
        """Return True if the sidecar need not be asked, because the index shows all that a hit needs."""
        if not self._has_keys(ticket):
            return False
        # Not the methods of a subclass: the sidecar's answer shows the rows of its own memory only.
        if not ticket.is_read or LookupThread.knows_all(self, ticket):
            return True
        hit = LookupThread.find(self, ticket)
        return hit is not None and ticket.keys is not None and hit.num_chunks == len(ticket.keys[0])

    def _has_keys(self, ticket: Ticket) -> bool:
        """Return True if the keys are known. Computes them if they are few."""
        if ticket.keys is None and ticket.extra_keys is not None and len(ticket.hashes) <= _FEW_KEYS:
            ticket.make_keys(self._groups)
        return ticket.keys is not None

    def _report_scheduled(self, ticket: Ticket, num_leased: int, scheduled: Scheduled | None) -> None:
        """Take the lease, and report the counts: in the same call if it covers all chunks."""
        if scheduled is None:
            if num_leased:
                ticket.may_be_leased = True
                self._call(lambda session: self._lookup(session, ticket, num_leased))
            return
        if any(clock.request_id == ticket.request_id for clock in self._times):
            self._send_times()  # the request starts again: the sidecar would take them for this start's times
        num_chunks = len(ticket.keys[0]) if ticket.keys and ticket.is_read else 0
        scheduled.uncached_reason = shortened(ticket.uncached_reason)
        if num_leased:
            ticket.may_be_leased = True
            with_lease = scheduled if num_leased == num_chunks else None
            self._call(lambda session: self._lookup(session, ticket, num_leased, scheduled=with_lease))
        if not num_leased or num_leased < num_chunks:
            self._call(
                lambda session: self._lookup(session, ticket, num_chunks, is_hint=True, scheduled=scheduled)
            )

    def _lookup(
        self,
        session: SidecarSession,
        ticket: Ticket,
        num_chunks: int | None = None,
        *,
        is_hint: bool = False,
        scheduled: Scheduled | None = None,
    ) -> LookupResult:
        """Look up the first ``num_chunks`` chunks of all groups, or those to load, in one call."""
        chunks = slice(0 if is_hint else ticket.first_loaded, num_chunks)
        keys = [b"".join(part[chunks]) for part in ticket.keys or ((),) * len(self._groups)]
        return session.lookup(
            ticket.request_id,
            list(zip(self._groups, keys, strict=True)),
            tenant=ticket.tenant,
            prefill_tokens_per_second=self._rate.tokens_per_second,
            hint=is_hint,
            scheduled=scheduled,
            num_handed_over=ticket.num_handed_over,
            private_reason=self.private_reason,
            is_relayed=self.is_relaying or not ticket.is_counted,
            timeout=self._call_seconds,
        )

    def _release(self, ticket: Ticket) -> None:
        if not ticket.may_be_leased:
            return
        ticket.may_be_leased = False
        self._release_ids([ticket.request_id])

    def _release_ids(self, request_ids: list[str]) -> None:
        """End these leases, and earlier ones whose release was not answered. Send times with the call."""
        num_times = min(len(self._times), MAX_TIMES)
        if num_times:
            self._times_sent_at = time.monotonic()
        clocks = [self._times.popleft() for _ in range(num_times)]

        def release(session: SidecarSession) -> bool:
            session.release(
                request_ids, timeout=self._call_seconds, times=[clock.times() for clock in clocks]
            )
            return True

        if self._calls.session is None:
            for request_id in request_ids:
                self._client.release_later(request_id)
        is_answered = self._call(release) is not None
        # The session keeps ids whose release was not answered.
        self._has_unreleased = not is_answered and (self._has_unreleased or bool(request_ids))
        # Times that were refused would be refused again. Another sidecar would not know these requests.
        if not is_answered and self.is_attached and self._calls.session is None:
            self._times.extendleft(reversed(clocks))

    def _keep_times(self, clocks: Sequence[RequestClock]) -> None:
        """Keep times for the next call. They must follow the report that the requests were scheduled."""
        self._times += clocks
        if len(self._times) >= MAX_TIMES or time.monotonic() - self._times_sent_at >= _BATCH_SECONDS:
            self._release_ids([])

    def _send_times(self) -> None:
        """Send all times that are left, if the sidecar answers."""
        num_left = len(self._times) + 1
        while 0 < len(self._times) < num_left:
            num_left = len(self._times)
            self._release_ids([])

    def _call(self, call: Callable[[SidecarSession], T]) -> T | None:
        reply = self._calls.attempt(call)
        if reply is not None:
            self._answered_at = self._clock()
        return reply

    def _adapt(self, seconds: float) -> None:
        if self._fixed_seconds:
            return
        self._latest.append(seconds)
        twice = 2 * sorted(self._latest)[-2 if len(self._latest) > 1 else -1]
        self.answer_seconds = min(max(MIN_ANSWER_SECONDS, twice), MAX_ANSWER_SECONDS)
