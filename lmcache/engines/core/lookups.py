"""What the sidecar has for a request: read from its index in shared memory, or asked for on another thread.

The scheduler's thread reads the index itself (``find``); hints, leases and releases it only enqueues.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from lmcache.engines.core.hits import Hit, Index, find_hit, no_hit
from lmcache.engines.core.jobs import EngineIdentity
from lmcache.engines.core.requests import Ticket
from lmcache.rpc.client import Scheduled, Session, SidecarClient
from lmcache.rpc.errors import SidecarError, SidecarUnavailableError
from lmcache.tiers.memory.contracts import LookupResult
from lmcache.units import ceil_div

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CALL_SECONDS = 0.5
"""Of one call, unless answers may take longer."""

_PAUSE_SECONDS = 1.0
"""No calls for so long after one without an answer: a frozen sidecar must cost requests nothing."""

MIN_ANSWER_SECONDS, MAX_ANSWER_SECONDS = 0.02, 0.2

_FEW_KEYS = 32
"""As many are made where they are asked for, in 20 us: waking a thread and waiting for it takes longer."""


class LookupThread:
    """Serves tickets and releases in the order they come. All methods return at once and never raise."""

    def __init__(
        self,
        client: SidecarClient,
        identity: EngineIdentity,
        rate: Callable[[], float],
        answer_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``rate``: the engine's prefill rate as it is now known, in tokens per second; ``answer_seconds``:
        see the property, 0.0: as measured."""
        self._client = client
        self._namespace = identity.hello.namespace
        self._grid = identity.grid
        self._groups = [group.group for group in self._grid.stored]
        self._rate = rate
        self._clock = clock
        self._fixed_seconds = answer_seconds
        self._call_seconds = max(_CALL_SECONDS, answer_seconds)
        self.answer_seconds = answer_seconds or MIN_ANSWER_SECONDS
        """The sidecar may be silent for so long: twice the 99th percentile of its answers, within bounds."""
        self._heard_at = -math.inf  # the sidecar's last answer, whatever it was about
        self._latest: deque[float] = deque(maxlen=100)  # seconds of answers
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._unleased: dict[Ticket, tuple[int, Scheduled]] = {}  # loads, with their chunks
        self._has_unreleased = False  # releases that were not answered
        self._silent_epoch = 0
        self._paused_until = 0.0
        self.answered = threading.Event()  # set after every answer
        self._thread = threading.Thread(target=self._run, name="lmcache-lookup", daemon=True)
        self._thread.start()

    @property
    def is_attached(self) -> bool:
        """Is there a sidecar?"""
        return self._client.session is not None

    @property
    def index(self) -> Index | None:
        """What is in memory, now and without a call; None: there is no sidecar."""
        session = self._client.session
        return session.index if session is not None else None

    def knows_all(self, ticket: Ticket) -> bool:
        """True when no answer would tell of more than the index shows."""
        session = self._client.session
        return ticket.namespace != self._namespace or session is None or session.memory_only

    def is_late(self, ticket: Ticket, missing_seconds: float) -> bool:
        """Has the sidecar been silent for too long? While it answers others, the ticket waits for its turn.

        ``missing_seconds``: what computing takes that the answer may spare; 0.0: not known.
        """
        bound = self.answer_seconds
        if not self._fixed_seconds:
            bound = max(bound, min(missing_seconds, MAX_ANSWER_SECONDS))
        return self._clock() - max(ticket.asked_at, self._heard_at) >= bound

    def find(self, ticket: Ticket, at_least: int = 0) -> Hit | None:
        """Find where the request can resume by what is in memory now, without a call; None while its keys are
        not known. The engine itself has ``at_least`` chunks."""
        if not self._has_keys(ticket):
            return None
        session = self._client.session
        if session is None or session.index is None or not ticket.keys or not ticket.keys[0]:
            return no_hit(self._grid)
        return find_hit(session.index, self._grid, ticket.words, at_least)

    def ask(self, ticket: Ticket) -> None:
        """Find out what is on its way, and let lower tiers bring theirs; leases nothing."""
        ticket.asked_at = self._clock()
        if self._has_all(ticket):
            ticket.answer, ticket.answered_at = LookupResult(), ticket.asked_at
            return
        ticket.is_asking = True
        self._queue.put(partial(self._serve, ticket))

    def note_scheduled(self, ticket: Ticket, num_held: int, start: int = 0, num_tokens: int = 0) -> None:
        """Count the request's chunks: the engine has ``num_held`` of them and loads ``num_tokens`` from token
        ``start`` on. A load is counted with its lease, or when it ends without one."""
        num_loaded = ceil_div(start + num_tokens, self._grid.chunk_tokens) if num_tokens else 0
        scheduled = Scheduled(num_held, max(num_held, num_loaded), num_tokens)
        if num_loaded:
            self._unleased[ticket] = num_loaded, scheduled
        else:
            self._queue.put(partial(self._tell, ticket, 0, scheduled))

    def lease_loads(self) -> None:
        """Keep the chunks of all loads under way where they are."""
        for ticket, (num_loaded, scheduled) in self._unleased.items():
            self._queue.put(partial(self._tell, ticket, num_loaded, scheduled))
        self._unleased.clear()

    def release(self, ticket: Ticket) -> None:
        """End the ticket's lease, if it has one: its load has ended."""
        if ticket in self._unleased:
            self._queue.put(partial(self._tell, ticket, 0, self._unleased.pop(ticket)[1]))
        self._queue.put(partial(self._release, ticket))

    def close(self) -> None:
        """Serve what is queued, then end the thread and detach."""
        self._queue.put(None)

    def _run(self) -> None:
        while True:
            try:
                task = self._queue.get(timeout=_PAUSE_SECONDS if self._has_unreleased else None)
            except queue.Empty:
                task = partial(self._release_ids, [])
            if task is None:
                break
            try:
                task()
            except Exception:  # this thread serves all requests: one bad ticket must not end it
                logger.exception("A lookup failed")
        self._client.close()

    def _serve(self, ticket: Ticket) -> None:
        answer = LookupResult()
        try:
            if ticket.extra_keys is None and ticket.find_extra_keys is not None:
                ticket.extra_keys = ticket.find_extra_keys()
                ticket.make_keys(self._groups)
            elif ticket.keys is None:
                ticket.make_keys(self._groups)
            if not self._has_all(ticket):
                answer = self._look_up(ticket)
        finally:
            now = self._clock()
            if ticket.keys is None:  # what raised would do so again: it is not cached, nor waited for
                ticket.keys = tuple([] for _ in self._groups)
            ticket.answer, ticket.answered_at = answer, now
            ticket.is_asking = False
            self._adapt(now - ticket.asked_at)
            self.answered.set()

    def _has_all(self, ticket: Ticket) -> bool:
        """Is there nothing to ask?"""
        if not self._has_keys(ticket):
            return False
        if not ticket.is_read or self.knows_all(ticket):
            return True
        hit = self.find(ticket)
        return hit is not None and ticket.keys is not None and hit.num_chunks == len(ticket.keys[0])

    def _has_keys(self, ticket: Ticket) -> bool:
        """Are the keys known? A few are made at once."""
        if ticket.keys is None and ticket.extra_keys is not None and len(ticket.hashes) <= _FEW_KEYS:
            ticket.make_keys(self._groups)
        return ticket.keys is not None

    def _look_up(self, ticket: Ticket) -> LookupResult:
        return self._call(lambda session: self._lookup(session, ticket, is_hint=True)) or LookupResult()

    def _tell(self, ticket: Ticket, num_leased: int, scheduled: Scheduled) -> None:
        """In one call if all chunks are leased."""
        num_chunks = len(ticket.keys[0]) if ticket.keys else 0
        counted = scheduled if ticket.is_read else None
        if num_leased:
            ticket.may_be_leased = True
            told = counted if num_leased == num_chunks else None
            self._call(lambda session: self._lookup(session, ticket, num_leased, scheduled=told))
        if num_leased < num_chunks and counted is not None:
            self._call(lambda session: self._lookup(session, ticket, is_hint=True, scheduled=counted))

    def _lookup(
        self,
        session: Session,
        ticket: Ticket,
        num_chunks: int | None = None,
        *,
        is_hint: bool = False,
        scheduled: Scheduled | None = None,
    ) -> LookupResult:
        """Ask for the first chunks in all groups together."""
        keys = [b"".join(part[:num_chunks]) for part in ticket.keys or ()]
        return session.lookup(
            ticket.request_id,
            list(zip(self._groups, keys, strict=True)),
            tenant=ticket.tenant,
            prefill_tokens_per_second=self._rate(),
            hint=is_hint,
            scheduled=scheduled,
            timeout=self._call_seconds,
        )

    def _release(self, ticket: Ticket) -> None:
        if not ticket.may_be_leased:
            return
        ticket.may_be_leased = False
        self._release_ids([ticket.request_id])

    def _release_ids(self, request_ids: list[str]) -> None:
        """End these leases, and those that could not be ended before."""

        def release(session: Session) -> bool:
            session.release(request_ids, timeout=self._call_seconds)
            return True

        if self._session() is None:
            for request_id in request_ids:
                self._client.release_later(request_id)
        self._has_unreleased = not self._call(release)  # the session remembers what was not answered

    def _call(self, call: Callable[[Session], T]) -> T | None:
        session = self._session()
        if session is None:
            return None
        try:
            reply = call(session)
        except SidecarError as error:
            if isinstance(error, SidecarUnavailableError):
                self._silent_epoch, self._paused_until = session.epoch, time.monotonic() + _PAUSE_SECONDS
            logger.debug("The sidecar did not answer: %s", error)
            return None
        self._heard_at = self._clock()
        return reply

    def _adapt(self, seconds: float) -> None:
        if self._fixed_seconds:
            return
        self._latest.append(seconds)
        twice = 2 * sorted(self._latest)[-2 if len(self._latest) > 1 else -1]
        self.answer_seconds = min(max(MIN_ANSWER_SECONDS, twice), MAX_ANSWER_SECONDS)

    def _session(self) -> Session | None:
        """The session, unless it was silent just now. Another one may be asked: its Attach was answered."""
        session = self._client.session
        if session is None or session.epoch != self._silent_epoch or time.monotonic() >= self._paused_until:
            return session
        return None
