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
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lmcache import keys
from lmcache.engines.core.jobs import GROUP, KeyContext, Marks
from lmcache.rpc.client import Session, SidecarClient
from lmcache.rpc.errors import SidecarError, SidecarUnavailable
from lmcache.tiers.base import KEY_BYTES, ROW_KEY_BYTES
from lmcache.tiers.memory.contracts import Found, LookupResult

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CALL_SECONDS = 0.5

_PAUSE_SECONDS = 1.0
"""No calls for so long after one without an answer: a frozen sidecar must cost requests nothing."""

MIN_ANSWER_SECONDS, MAX_ANSWER_SECONDS = 0.02, 0.2

_FEW_KEYS = 32
"""So many are named where they are asked for, in 20 us: waking a thread, and waiting for it, takes longer."""

_WORD = np.dtype("<u8")
_NOTHING = Found(np.empty(0, np.int64), np.empty(0, np.uint64))


@dataclass(eq=False)
class Ticket:
    """One request's question. The lookup thread writes what follows ``asked_at``, the scheduler reads."""

    request_id: str
    hashes: list[bytes]  # one per chunk to look up
    cache_salt: str
    marks: Callable[[], Marks | None] | None  # may do I/O, what returns None is not cached; None: no marks
    namespace: bytes  # of the engine since its last reset; empty: as the workers said
    is_read: bool = True  # else it is only stored
    asked_at: float = 0.0  # the scheduler's own
    context: KeyContext | None = None  # None: not known yet, or not cacheable
    names: tuple[bytes, ...] = ()  # of the chunks
    row_keys: npt.NDArray[np.uint64] | None = None  # [chunks, 8 words]; None: not known yet, and never again
    answer: LookupResult | None = None  # None: not answered yet
    answered_at: float = 0.0
    is_asking: bool = False  # a hint is on its way
    may_be_leased: bool = False  # also when no answer came; the lookup thread's own


class LookupThread:
    """Serves tickets and releases in the order they come. All methods return at once and never raise."""

    def __init__(
        self,
        client: SidecarClient,
        namespace: bytes,
        rate: Callable[[], float],
        answer_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``rate``: the engine's prefill rate as it is now known, in tokens per second; ``answer_seconds``:
        see the property, 0.0: as measured."""
        self._client = client
        self._namespace = namespace
        self._rate = rate
        self._clock = clock
        self._fixed_seconds = answer_seconds
        self.answer_seconds = answer_seconds or MIN_ANSWER_SECONDS
        """The sidecar may be silent for so long: twice the 99th percentile of its answers, within bounds."""
        self._heard_at = -math.inf  # the sidecar's last answer, whatever it was about
        self._latest: deque[float] = deque(maxlen=100)  # seconds of answers
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._is_owing = False  # releases that were not answered
        self._silent_epoch = 0
        self._paused_until = 0.0
        self.answered = threading.Event()  # set after every answer
        self._thread = threading.Thread(target=self._run, name="lmcache-lookup", daemon=True)
        self._thread.start()

    @property
    def is_attached(self) -> bool:
        """Is there a sidecar?"""
        return self._client.session is not None

    def knows_all(self, ticket: Ticket) -> bool:
        """True when no answer would tell of more than the index shows."""
        session = self._client.session
        return bool(ticket.namespace) or session is None or session.memory_only

    def is_late(self, ticket: Ticket, missing_seconds: float) -> bool:
        """Has the sidecar been silent for too long? While it answers others, the ticket waits for its turn.

        ``missing_seconds``: what computing takes that the answer may spare; 0.0: not known.
        """
        bound = self.answer_seconds
        if not self._fixed_seconds:
            bound = max(bound, min(missing_seconds, MAX_ANSWER_SECONDS))
        return self._clock() - max(ticket.asked_at, self._heard_at) >= bound

    def find(self, ticket: Ticket) -> Found | None:
        """Find leading chunks in memory, now and without a call; None while their keys are not known."""
        if not self._is_named(ticket) or ticket.row_keys is None:
            return None
        session = self._client.session
        if session is None or not len(ticket.row_keys):
            return _NOTHING
        return session.index.find(ticket.row_keys)

    def ask(self, ticket: Ticket) -> None:
        """Find out what is on its way, and let lower tiers bring theirs; leases nothing."""
        if ticket.marks is None and ticket.context is None:
            self._note_marks(ticket, ())
        ticket.asked_at = self._clock()
        if self._has_all(ticket):
            ticket.answer, ticket.answered_at = LookupResult(), ticket.asked_at
            return
        ticket.is_asking = True
        self._queue.put(partial(self._serve, ticket))

    def note_computed(self, ticket: Ticket, num_found: int) -> None:
        """Tell a sidecar that was not asked what it did not have: its counters are to tell the truth."""
        if num_found < len(ticket.names) and ticket.is_read and self.knows_all(ticket):
            self._queue.put(partial(self._look_up, ticket))

    def lease(self, ticket: Ticket, num_chunks: int) -> None:
        """Keep the first chunks where they are: they are being loaded."""
        self._queue.put(partial(self._lease, ticket, num_chunks))

    def release(self, ticket: Ticket) -> None:
        """End the ticket's lease, if it has one."""
        self._queue.put(partial(self._release, ticket))

    def close(self) -> None:
        """Serve what is queued, then end the thread and detach."""
        self._queue.put(None)

    def _run(self) -> None:
        while True:
            try:
                task = self._queue.get(timeout=_PAUSE_SECONDS if self._is_owing else None)
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
            if ticket.context is None and ticket.marks is not None:
                self._note_marks(ticket, ticket.marks())
                self._name(ticket)
            elif ticket.row_keys is None:
                self._name(ticket)
            if not self._has_all(ticket):
                answer = self._look_up(ticket)
        finally:
            now = self._clock()
            ticket.answer, ticket.answered_at = answer, now
            ticket.is_asking = False
            self._adapt(now - ticket.asked_at)
            self.answered.set()

    def _has_all(self, ticket: Ticket) -> bool:
        """Is there nothing to ask?"""
        if not self._is_named(ticket):
            return False
        if not ticket.is_read or self.knows_all(ticket):
            return True
        found = self.find(ticket)
        return found is not None and len(found.rows) == len(ticket.names)

    def _is_named(self, ticket: Ticket) -> bool:
        """Are the keys known? A few are made at once."""
        if ticket.row_keys is None and ticket.context is not None and len(ticket.hashes) <= _FEW_KEYS:
            self._name(ticket)
        return ticket.row_keys is not None

    def _note_marks(self, ticket: Ticket, marks: Marks | None) -> None:
        if marks is not None:
            tenant = keys.tenant(ticket.cache_salt, self._namespace)
            namespace = ticket.namespace or self._namespace
            ticket.context = KeyContext(marks, ticket.cache_salt, tenant, namespace)

    def _name(self, ticket: Ticket) -> None:
        """Name the chunks; both threads may come to it, and do the same then."""
        joined = ticket.context.row_keys(ticket.hashes) if ticket.context is not None else b""
        steps = range(0, len(joined), ROW_KEY_BYTES)
        ticket.names = tuple(joined[at + KEY_BYTES : at + ROW_KEY_BYTES] for at in steps)
        ticket.row_keys = np.frombuffer(joined, _WORD).reshape(-1, ROW_KEY_BYTES // _WORD.itemsize)

    def _look_up(self, ticket: Ticket) -> LookupResult:
        found = self._call(lambda session: self._lookup(session, ticket, len(ticket.names), is_hint=True))
        return found or LookupResult()

    def _lease(self, ticket: Ticket, num_chunks: int) -> None:
        ticket.may_be_leased = True
        self._call(lambda session: self._lookup(session, ticket, num_chunks, is_hint=False))

    def _lookup(
        self, session: Session, ticket: Ticket, num_chunks: int, *, is_hint: bool
    ) -> LookupResult | None:
        if ticket.row_keys is None:
            return None
        [found] = session.lookup(
            ticket.request_id,
            [(GROUP, ticket.row_keys[:num_chunks].tobytes())],
            prefill_tokens_per_second=self._rate(),
            hint=is_hint,
            timeout=_CALL_SECONDS,
        )
        return found

    def _release(self, ticket: Ticket) -> None:
        if not ticket.may_be_leased:
            return
        ticket.may_be_leased = False
        self._release_ids([ticket.request_id])

    def _release_ids(self, request_ids: list[str]) -> None:
        """End these leases, and those that could not be ended before."""

        def release(session: Session) -> bool:
            session.release(request_ids, timeout=_CALL_SECONDS)
            return True

        if self._session() is None:
            for request_id in request_ids:
                self._client.release_later(request_id)
        self._is_owing = not self._call(release)  # the session remembers what was not answered

    def _call(self, call: Callable[[Session], T]) -> T | None:
        session = self._session()
        if session is None:
            return None
        try:
            reply = call(session)
        except SidecarError as error:
            if isinstance(error, SidecarUnavailable):
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
