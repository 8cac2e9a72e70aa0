"""Requests with KV hints on the scheduler side, from their arrival to their end.

The lookup thread sends the hints to the sidecar, once per request. No request waits for the answer. A request
that ends before it gets a deferred answer.

``HintsRoute`` sends requests that shall not be computed. They are held, until their client leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc

from lmcache_client.core.lookups import LookupThread
from lmcache_client.core.parted_lookups import PartedLookups
from lmcache_client.core.requests import Ticket
from lmcache_client.rpc.errors import RpcRefusedError, SidecarError
from lmcache_client.rpc.session import SidecarSession
from lmcache_client.vllm.hints import RequestHints, decisions, refused
from lmcache_store.hints import HintDecision, HintOutcome

HOLD_SECONDS = 15.0
"""Longest time for which a request is held. Then the engine computes it: clients must not block a queue."""

OLDER_SIDECAR = "the sidecar is older than this engine's connector, and does not know KV hints"

_NOT_ATTACHED = "no sidecar is attached"
_NO_ANSWER = "the sidecar had not answered at the end of the request"
_SEVERAL_NODES = "the engine's ranks span several nodes, whose sidecars take no KV hints"
_RESUMABLE = "the request is a streaming session, which is not cached"


class _Hinted:
    """The hints of one request. The lookup thread writes ``answer``."""

    def __init__(self, asked: RequestHints, held_until: float) -> None:
        self.asked, self.held_until = asked, held_until
        self.answer = decisions(asked.hints, HintOutcome.DEFERRED, _NOT_ATTACHED)

    def apply(self, ticket: Ticket, groups: Sequence[int], refusal: str, session: SidecarSession) -> None:
        """Send the hints, and write the answer. Raises SidecarError."""
        hints, answer_id = self.asked
        if ticket.extra_keys is None:
            refusal = f"the request is not cached: {ticket.uncached_reason or 'its keys are not known'}"
        if refusal:
            hints = refused(hints, refusal)
        keys = [b"".join(part) for part in ticket.keys or [()] * len(groups)]
        accepted: list[HintDecision] = []
        try:
            if hints.actions or answer_id:
                group_keys = list(zip(groups, keys, strict=True))
                accepted = session.apply_hints(ticket.request_id, group_keys, ticket.tenant, hints, answer_id)
        except SidecarError as error:
            is_older = isinstance(error, RpcRefusedError) and error.code is grpc.StatusCode.UNIMPLEMENTED
            outcome = HintOutcome.REFUSED if is_older else HintOutcome.DEFERRED
            self.answer = decisions(hints, outcome, OLDER_SIDECAR if is_older else str(error))
            raise
        self.answer = [*accepted, *hints.refusals]


class HintedRequests:
    """The requests of an engine that have hints. Used by the scheduler's thread only."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._requests: dict[str, _Hinted] = {}

    def add(
        self, request: Any, asked: RequestHints, ticket: Ticket | None, lookups: LookupThread | None,
        groups: Sequence[int],
    ) -> None:  # fmt: skip
        """Send the hints of a request that arrived. Call this after the lookup thread was asked.

        ``ticket``, ``lookups``: None if the request or the engine has no lookups; ``groups``: the KV groups
        of the ticket's keys.
        """
        hinted = self._requests[request.request_id] = _Hinted(asked, self._clock() + HOLD_SECONDS)
        if getattr(request, "resumable", False):
            hinted.answer = decisions(refused(asked.hints, _RESUMABLE), HintOutcome.REFUSED, "")
        elif ticket is not None and lookups is not None:
            if lookups.is_attached:
                hinted.answer = decisions(asked.hints, HintOutcome.DEFERRED, _NO_ANSWER)
            refusal = _SEVERAL_NODES if isinstance(lookups, PartedLookups) else ""
            lookups.run(partial(hinted.apply, ticket, groups, refusal))

    def is_held(self, request_id: str) -> bool:
        """Return True if the engine shall not compute the request now, because only its hints count."""
        hinted = self._requests.get(request_id)
        return hinted is not None and bool(hinted.asked.answer_id) and self._clock() < hinted.held_until

    def end(self, request_id: str) -> list[dict[str, Any]]:
        """Forget the request. Return the answer to its hints for its response; empty if it has none."""
        hinted = self._requests.pop(request_id, None)
        return [decision.as_json() for decision in hinted.answer] if hinted is not None else []
