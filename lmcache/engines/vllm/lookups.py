"""Asks the sidecar what it has, on a thread of its own: the scheduler's thread only enqueues."""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from lmcache import keys
from lmcache.engines.vllm.plan import KeyContext
from lmcache.rpc.client import SidecarClient
from lmcache.rpc.errors import SidecarError, SidecarUnavailable
from lmcache.tiers.base import Slot

logger = logging.getLogger(__name__)

GROUP = 0
"""Number of the one KV group that is cached so far."""

_CALL_SECONDS = 0.5
_BACK_OFF_SECONDS = 1.0
_ASK_AGAIN_SECONDS = 0.005


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
        self.is_settled = False  # the scheduler decided: do not ask again
        self.is_released = False


class LookupThread:
    """Serves tickets and releases in the order they come. All methods return at once and never raise."""

    def __init__(self, client: SidecarClient, namespace: bytes, rate: Callable[[], float]) -> None:
        """``rate``: the engine's prefill rate as it is now known, in tokens per second."""
        self._client = client
        self._namespace = namespace
        self._rate = rate
        self._queue: queue.SimpleQueue[Ticket | str | None] = queue.SimpleQueue()
        self._again: list[tuple[float, int, Ticket]] = []  # heap of tickets to ask again
        self._order = itertools.count()
        self._closed_until = 0.0
        self.answered = threading.Event()  # set after every answer
        self._thread = threading.Thread(target=self._run, name="lmcache-lookup", daemon=True)
        self._thread.start()

    def ask(self, ticket: Ticket) -> None:
        """Answer the ticket as soon as possible."""
        self._queue.put(ticket)

    def release(self, ticket: Ticket) -> None:
        """End the ticket's lease. Once is enough."""
        ticket.is_settled = True
        if (
            ticket.hashes and not ticket.is_released
        ):  # also before the answer: it is queued after the question
            ticket.is_released = True
            self._queue.put(ticket.request_id)

    def close(self) -> None:
        """Serve what is queued, then end the thread and detach."""
        self._queue.put(None)

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=self._seconds_to_next())
            except queue.Empty:
                self._ask_again()
                continue
            if item is None:
                break
            try:
                if isinstance(item, Ticket):
                    self._serve(item)
                else:
                    self._release(item)
            except Exception:  # this thread serves all requests: one bad ticket must not end it
                logger.exception("A lookup failed")
        self._client.close()

    def _seconds_to_next(self) -> float | None:
        if not self._again:
            return None
        return max(0.0, self._again[0][0] - time.monotonic())

    def _ask_again(self) -> None:
        while self._again and self._again[0][0] <= time.monotonic():
            ticket = heapq.heappop(self._again)[2]
            if not ticket.is_settled:
                self._look_up(ticket)

    def _serve(self, ticket: Ticket) -> None:
        try:
            lora = ticket.fingerprint_lora()
            if lora is not None:
                tenant = keys.tenant(ticket.cache_salt, self._namespace)
                ticket.context = KeyContext(lora, ticket.cache_salt, tenant)
                if ticket.hashes:
                    self._look_up(ticket)
        finally:
            ticket.answer = ticket.answer or NOTHING
            self.answered.set()

    def _look_up(self, ticket: Ticket) -> None:
        session, context = self._client.session, ticket.context
        if session is None or context is None or time.monotonic() < self._closed_until:
            ticket.answer = ticket.answer or NOTHING
            return
        names = b"".join(
            keys.chunk_key(block_hash, context.lora_fingerprint, context.cache_salt, GROUP)
            for block_hash in ticket.hashes
        )
        try:
            found = session.lookup(
                ticket.request_id,
                [(GROUP, names)],
                tenant=context.tenant,
                prefill_tokens_per_second=self._rate(),
                timeout=_CALL_SECONDS,
            )
        except SidecarError as error:
            self._back_off(error)
            return
        is_pending = found.probing or found.num_pending > 0
        slots = tuple(found.slots.get(GROUP, ()))
        ticket.answer = Answer(slots, found.num_resident, is_pending)
        if is_pending:
            due = time.monotonic() + _ASK_AGAIN_SECONDS
            heapq.heappush(self._again, (due, next(self._order), ticket))
        self.answered.set()

    def _release(self, request_id: str) -> None:
        session = self._client.session
        if session is None:
            return
        try:
            session.release([request_id], timeout=_CALL_SECONDS)
        except SidecarError as error:
            self._back_off(error)

    def _back_off(self, error: SidecarError) -> None:
        if isinstance(error, SidecarUnavailable):  # a frozen sidecar must cost requests nothing
            self._closed_until = time.monotonic() + _BACK_OFF_SECONDS
        logger.debug("The sidecar did not answer: %s", error)
