"""Asks the sidecar what it has, on a thread of its own: the scheduler's thread only enqueues."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lmcache import keys
from lmcache.engines.vllm.plan import GROUP, KeyContext, Marks
from lmcache.rpc.client import Session, SidecarClient
from lmcache.rpc.errors import SidecarError, SidecarUnavailable
from lmcache.tiers.base import Slot

logger = logging.getLogger(__name__)

_CALL_SECONDS = 0.5

_PAUSE_SECONDS = 1.0
"""No calls for so long after one without an answer: a frozen sidecar must cost requests nothing."""


@dataclass(frozen=True)
class Answer:
    """Leading chunks of a request: leased slots, and how many more lower tiers are bringing."""

    slots: tuple[Slot, ...] = ()
    num_resident: int = 0
    is_pending: bool = False  # asking again may bring more


NOTHING = Answer()


@dataclass
class Ticket:
    """One request's question. The lookup thread writes ``context`` and ``answer``, the scheduler reads."""

    request_id: str
    hashes: list[bytes]  # one per chunk to look up
    cache_salt: str
    marks: Callable[[], Marks | None]  # may do I/O; None means: do not cache
    context: KeyContext | None = None  # None: not known yet, or not cacheable
    answer: Answer | None = None  # None: not answered yet
    is_settled: bool = False  # the scheduler decided: no more questions
    may_be_leased: bool = False  # also when no answer came; the lookup thread's own


class LookupThread:
    """Serves tickets and releases in the order they come. All methods return at once and never raise."""

    def __init__(self, client: SidecarClient, namespace: bytes, rate: Callable[[], float]) -> None:
        """``rate``: the engine's prefill rate as it is now known, in tokens per second."""
        self._client = client
        self._namespace = namespace
        self._rate = rate
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._silent_epoch = 0
        self._paused_until = 0.0
        self.answered = threading.Event()  # set after every answer
        self._thread = threading.Thread(target=self._run, name="lmcache-lookup", daemon=True)
        self._thread.start()

    def ask(self, ticket: Ticket) -> None:
        """Answer the ticket as soon as possible, or again: lower tiers may have brought more."""
        self._queue.put(partial(self._serve, ticket))

    def release(self, ticket: Ticket) -> None:
        """End the ticket's lease, if it has one; may come before the answer, the queue keeps the order."""
        ticket.is_settled = True
        self._queue.put(partial(self._release, ticket))

    def close(self) -> None:
        """Serve what is queued, then end the thread and detach."""
        self._queue.put(None)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                task()
            except Exception:  # this thread serves all requests: one bad ticket must not end it
                logger.exception("A lookup failed")
        self._client.close()

    def _serve(self, ticket: Ticket) -> None:
        try:
            if ticket.context is None and (marks := ticket.marks()) is not None:
                tenant = keys.tenant(ticket.cache_salt, self._namespace)
                ticket.context = KeyContext(marks, ticket.cache_salt, tenant)
            if ticket.context is not None and ticket.hashes and not ticket.is_settled:
                ticket.answer = self._look_up(ticket, ticket.context)
        finally:
            ticket.answer = ticket.answer or NOTHING
            self.answered.set()

    def _look_up(self, ticket: Ticket, context: KeyContext) -> Answer:
        session = self._session()
        if session is None:
            return NOTHING
        names = context.chunk_keys(ticket.hashes)
        ticket.may_be_leased = True
        try:
            found = session.lookup(
                ticket.request_id,
                [(GROUP, names)],
                tenant=context.tenant,
                prefill_tokens_per_second=self._rate(),
                timeout=_CALL_SECONDS,
            )
        except SidecarError as error:
            self._note(session, error)
            return NOTHING
        is_pending = found.probing or found.num_pending > 0
        return Answer(tuple(found.slots.get(GROUP, ())), found.num_resident, is_pending)

    def _release(self, ticket: Ticket) -> None:
        if not ticket.may_be_leased:
            return
        ticket.may_be_leased = False
        session = self._session()
        if session is None:
            self._client.release_later(ticket.request_id)
            return
        try:
            session.release([ticket.request_id], timeout=_CALL_SECONDS)
        except SidecarError as error:  # the client still owes the release
            self._note(session, error)

    def _session(self) -> Session | None:
        """The session, unless it was silent just now. Another one may be asked: its Attach was answered."""
        session = self._client.session
        if session is None or session.epoch != self._silent_epoch or time.monotonic() >= self._paused_until:
            return session
        return None

    def _note(self, session: Session, error: SidecarError) -> None:
        if isinstance(error, SidecarUnavailable):
            self._silent_epoch, self._paused_until = session.epoch, time.monotonic() + _PAUSE_SECONDS
        logger.debug("The sidecar did not answer: %s", error)
