"""Knows the documents that have stored KV: those of this engine, and those that other engines share.

The scheduler's thread learns and finds documents. The lookup thread exchanges marks with the sidecar.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import grpc
import numpy as np

from lmcache_client.core.lookups import LookupThread
from lmcache_client.core.requests import Ticket
from lmcache_client.rpc.errors import RpcRefusedError
from lmcache_client.vllm.blend.marks import MAX_FINGERPRINTS, MarkTable, make_mark, seed_of
from lmcache_store.common.timing import TIMING

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Shortest time between two polls of the sidecar for marks of other engines."""
REPEAT_SECONDS = 600.0
"""Time after which a document in use is sent again, so that newer documents do not replace its mark."""
MAX_PROMPTS = 16_384
_MAX_MARKS = 2048
"""Marks that the lookup thread sends or adds at a time, in a few milliseconds. Hints of requests wait."""
_LOCKED_MARKS = 128  # added under one lock, for which the scheduler's thread may wait
_TOO_OLD = (
    "The sidecar is too old to share documents between engines. Until you upgrade it, this engine finds only"
    " documents that it stored itself."
)


class KnownDocuments:
    """Proposes the documents of a prompt, by marks. No method waits for the sidecar."""

    def __init__(self, *, learns_prompts: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """``learns_prompts``: propose earlier prompts as documents, too. Their marks are not sent."""
        self._clock = clock
        self._prompts = MarkTable(MAX_PROMPTS) if learns_prompts else None
        self._lock = threading.Lock()  # of all that both threads change
        self._documents = MarkTable()
        self._is_shared = True
        self._learned: dict[int, float] = {}  # marks of this engine's documents, with the times to send them
        self._unsent: dict[int, None] = {}  # those that the sidecar has not confirmed
        self._lookups: LookupThread | None = None
        self._polled_at = self._queued_at = -math.inf
        # Only the lookup thread uses these.
        self._epoch: int | None = None
        self._since = 0
        self._is_refused = False
        self._answered_at = -math.inf
        self._received: deque[int] = deque()

    def learn(self, tokens: Sequence[int], num_tokens: int, ticket: Ticket) -> None:
        """Add a document that is stored now, and send its mark to the sidecar.

        Args:
            tokens: at least the document's first ``START_TOKENS`` tokens.
            num_tokens: length of the document in tokens.
            ticket: ticket of a request with the document's namespace and salt.
        """
        mark = _mark(tokens, num_tokens, ticket)
        if mark is None:
            return
        now = self._clock()
        with self._lock:
            self._documents.add([mark])
            if not self._is_shared or now - self._learned.get(mark, -math.inf) < REPEAT_SECONDS:
                return
            # Each task may take the GIL from this thread, so one task serves all documents of a prompt.
            is_due = not self._unsent or now - self._queued_at >= POLL_SECONDS
            self._learned.pop(mark, None)
            self._learned[mark], self._unsent[mark] = now, None
            for marks in self._learned, self._unsent:
                if len(marks) > MAX_FINGERPRINTS:
                    del marks[next(iter(marks))]
        if self._lookups is not None and is_due:
            self._queued_at = now
            self._lookups.run(partial(self._share, self._lookups))

    def learn_prompt(self, tokens: Sequence[int], num_tokens: int, ticket: Ticket) -> None:
        """Add a stored prompt, if this object learns prompts. For the arguments see ``learn``."""
        if self._prompts is not None and (mark := _mark(tokens, num_tokens, ticket)) is not None:
            self._prompts.add([mark])

    def find(self, tokens: Sequence[int], ticket: Ticket, lookups: LookupThread) -> list[range]:
        """Return the ranges of a prompt that may be known documents, see ``MarkTable.find``. Polls, too."""
        self.poll(lookups)
        return self._documents.find(tokens, seed_of(ticket.namespace, ticket.cache_salt), self._prompts)

    def poll(self, lookups: LookupThread) -> None:
        """Let the lookup thread exchange marks, if the last poll was ``POLL_SECONDS`` ago or earlier.

        From then on, the thread also does so while it is idle. So the first prompt after a pause finds the
        documents of other engines, too.
        """
        self._lookups = lookups
        lookups.idle_task = partial(self._share, lookups)
        if (now := self._clock()) - self._polled_at >= POLL_SECONDS:
            self._polled_at = now
            lookups.run(lookups.idle_task)

    def clear(self) -> None:
        """Forget all documents: a new, random namespace begins. No other engine can use its documents."""
        with self._lock:
            self._is_shared = False
            self._documents.clear()
        if self._prompts is not None:
            self._prompts.clear()

    def _share(self, lookups: LookupThread, session: Any) -> None:
        """Add marks that were received, or else exchange marks in one call. The rest follows in later tasks.

        Raises SidecarError. Marks whose call failed are sent with the next call.
        """
        if session.epoch != self._epoch:
            self._begin_session(session.epoch)
        if not self._received and not self._exchange(session):
            return
        for _ in range(0, _MAX_MARKS, _LOCKED_MARKS):
            part = [self._received.popleft() for _ in range(min(_LOCKED_MARKS, len(self._received)))]
            with self._lock:
                if self._is_shared:
                    self._documents.add(part)
        if self._received or self._unsent:
            lookups.run(partial(self._share, lookups))

    def _begin_session(self, epoch: int) -> None:
        """Prepare to send all marks to another sidecar, which may have none."""
        self._epoch, self._since, self._is_refused, self._answered_at = epoch, 0, False, -math.inf
        with self._lock:
            self._unsent = dict.fromkeys(self._learned)

    def _exchange(self, session: Any) -> bool:
        """Call the sidecar. Returns False if there is nothing to do, or if the sidecar can't share marks."""
        with self._lock:
            sent = list(islice(self._unsent, _MAX_MARKS))
        is_early = not sent and self._clock() - self._answered_at < POLL_SECONDS / 2
        if self._is_refused or is_early or not self._is_shared:
            return False
        try:
            packed = np.array(sent, "<u8").tobytes()
            shared = session.share_marks(packed, self._since, timeout=TIMING.lookup_seconds)
        except RpcRefusedError as error:
            self._is_refused = error.code is grpc.StatusCode.UNIMPLEMENTED
            if not self._is_refused:
                raise
            logger.info(_TOO_OLD)
            return False
        with self._lock:
            for mark in sent:
                self._unsent.pop(mark, None)
        self._received += np.frombuffer(shared.marks[: len(shared.marks) // 8 * 8], "<u8").tolist()
        self._since, self._answered_at = shared.since, self._clock()
        return True


def _mark(tokens: Sequence[int], num_tokens: int, ticket: Ticket) -> int | None:
    """Return the mark of a document; None: it is too short, or its KV depends on more than tokens."""
    seed = seed_of(ticket.namespace, ticket.cache_salt)
    return None if ticket.extra_keys else make_mark(tokens, num_tokens, seed)
