"""What the scheduler half knows of the engine's requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lmcache.engines.core.jobs import Offer, Patience
from lmcache.engines.core.lookups import Ticket


class RequestState:
    """What is known of one request."""

    def __init__(self, request: Any, ticket: Ticket) -> None:
        self.request = request
        self.is_finished = False
        self.has_failed = False  # a load failed: don't try again, it could fail for ever
        self.is_loading = False
        self.num_stores = 0  # StoreJobs that not all ranks ended
        self.begin_anew(ticket)

    def begin_anew(self, ticket: Ticket) -> None:
        """Nothing of it is computed, or not any more."""
        self.ticket = ticket
        self.is_settled = False  # it was allocated: to be asked for again means to begin anew
        self.offer: Offer | None = None
        self.patience: Patience | None = None  # while it waits for rows
        self.num_found = 0  # leading chunks in memory, when it was last asked for
        self.forget_progress()

    def forget_progress(self) -> None:
        """Its blocks are given away."""
        self.offer = None
        self.blocks: list[int] = []
        self.num_stored_chunks = 0  # leading chunks that need no store: stored, or found


class Computing:
    """Chunks that are being computed now, until they are stored: whoever needs one waits for it."""

    def __init__(self) -> None:
        self._states: dict[bytes, RequestState] = {}

    def __contains__(self, name: bytes) -> bool:
        return name in self._states

    def begin(self, state: RequestState) -> None:
        """The request computes what was not found."""
        self._states |= dict.fromkeys(state.ticket.names[state.num_stored_chunks :], state)

    def end(self, state: RequestState, names: Iterable[bytes]) -> None:
        """The request does not compute these any more, or they are stored."""
        for name in names:
            if self._states.get(name) is state:
                del self._states[name]

    def clear(self) -> None:
        """Nothing that is computed now is for others."""
        self._states.clear()
