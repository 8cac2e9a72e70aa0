"""Asks the sidecar what it has, on a thread of its own: the scheduler's thread only enqueues."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lmcache import keys
from lmcache.engines.vllm.pause import Pause
from lmcache.engines.vllm.plan import GROUP, KeyContext
from lmcache.rpc.client import Session, SidecarClient
from lmcache.rpc.errors import SidecarError, SidecarUnavailable
from lmcache.tiers.base import Slot

logger = logging.getLogger(__name__)

_CALL_SECONDS = 0.5


@dataclass(frozen=True)
class Answer:
    """Leading chunks of a request: leased slots, and how many more lower tiers are bringing."""

    slots: tuple[Slot, ...] = ()
    num_resident: int = 0
    is_pending: bool = False  # asking again may bring more


NOTHING = Answer()


class Ticket:
    """One request's question. The lookup thread writes ``context`` and ``answer``, the scheduler reads."""

    def __init__(
        self,
        request_id: str,
        hashes: list[bytes],
        cache_salt: str,
        fingerprint_lora: Callable[[], bytes | None],
    ) -> None:
        """``hashes``: one per chunk to look up; ``fingerprint_lora`` may do I/O, None means: do not cache."""
        self.request_id = request_id
        self.hashes = hashes
        self.cache_salt = cache_salt
        self.fingerprint_lora = fingerprint_lora
        self.context: KeyContext | None = None  # None: not known yet, or not cacheable
        self.answer: Answer | None = None  # None: not answered yet
        self.is_settled = False  # the scheduler decided: no more questions
        self.is_released = False
        self.was_sent = False  # may have a lease, also when no answer came


class LookupThread:
    """Serves tickets and releases in the order they come. All methods return at once and never raise."""

    def __init__(self, client: SidecarClient, namespace: bytes, rate: Callable[[], float]) -> None:
        """``rate``: the engine's prefill rate as it is now known, in tokens per second."""
        self._client = client
        self._namespace = namespace
        self._rate = rate
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._unreleased: list[str] = []  # may be leased: the sidecar did not confirm their release yet
        self._pause = Pause()
        self.answered = threading.Event()  # set after every answer
        self._thread = threading.Thread(target=self._run, name="lmcache-lookup", daemon=True)
        self._thread.start()

    def ask(self, ticket: Ticket) -> None:
        """Answer the ticket as soon as possible, or again: lower tiers may have brought more."""
        self._queue.put(partial(self._serve, ticket))

    def release(self, ticket: Ticket) -> None:
        """End the ticket's lease. Once is enough."""
        ticket.is_settled = True
        if not ticket.is_released:
            ticket.is_released = True  # also before the answer: this is queued after the question
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
            if ticket.context is None and (lora := ticket.fingerprint_lora()) is not None:
                tenant = keys.tenant(ticket.cache_salt, self._namespace)
                ticket.context = KeyContext(lora, ticket.cache_salt, tenant)
            if ticket.context is not None and ticket.hashes and not ticket.is_settled:
                ticket.answer = self._look_up(ticket, ticket.context)
        finally:
            ticket.answer = ticket.answer or NOTHING
            self.answered.set()

    def _look_up(self, ticket: Ticket, context: KeyContext) -> Answer:
        session = self._client.session
        if session is None or self._pause.covers(session):
            return NOTHING
        names = context.chunk_keys(ticket.hashes)
        ticket.was_sent = True
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
        if ticket.was_sent:
            self._unreleased.append(ticket.request_id)
        session = self._client.session
        if not self._unreleased or session is None or self._pause.covers(session):
            return
        try:
            session.release(self._unreleased, timeout=_CALL_SECONDS)
            self._unreleased = []
        except SidecarError as error:
            self._note(session, error)

    def _note(self, session: Session, error: SidecarError) -> None:
        if isinstance(error, SidecarUnavailable):
            self._pause.begin(session)
        logger.debug("The sidecar did not answer: %s", error)
