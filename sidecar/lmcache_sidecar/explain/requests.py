"""One recent request with its causes and times, and the page ``/requests``. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from lmcache_client.rpc.times import RequestTimes
from lmcache_store.causes import TIERS
from lmcache_store.explain.benefit import TokenSource
from lmcache_store.tenant_names import DEFAULT_NAME

_MAX_ANSWER = 100
LOAD_FAILED = "load_failed"
"""Cause of tokens that the engine computes because their load failed."""
BLENDED, RECOMPUTED = "blended", "recomputed"
"""Causes of tokens whose KV was computed at another position: used as it is, and computed again."""


class RequestEngine(NamedTuple):
    """The engine of a request, as the sidecar knew it when the request was scheduled."""

    uuid: bytes
    num_gpus: int
    tokens_per_second: float
    """Prompt tokens that the engine computes per second; 0: not known yet."""


UNKNOWN_ENGINE = RequestEngine(b"", 1, 0.0)


@dataclass(slots=True)
class ExplainedRequest:
    """One recent request."""

    time: float
    """Seconds since 1970."""
    request_id: str
    tokens: dict[str, int]
    """Tokens of the prompt by cause. Causes without tokens are left out."""
    common_tokens: int
    """Leading tokens that an earlier request had, too; a lower bound."""
    engine: RequestEngine = UNKNOWN_ENGINE
    tenant: str = DEFAULT_NAME
    """Name of the budget of the request's tenant."""
    uncached_reason: str = ""
    """Why the engine gave the request no keys; empty: it has keys, or the engine gave no reason."""
    load_tier: str = ""
    """The slowest tier that held tokens which the engine loads; BLENDED: it also recomputes some of them;
    empty: it loads none."""
    times: RequestTimes | None = None
    """Durations; None: the engine has not reported them, because the request has no first token yet."""
    is_counted: bool = False

    def __post_init__(self) -> None:
        tiers = (BLENDED, *reversed(TIERS))
        self.load_tier = next((tier for tier in tiers if self.tokens.get(tier)), "")

    @property
    def source(self) -> TokenSource:
        """Place of the request's first tokens. Tiers held recomputed tokens, too."""
        if any(tier in self.tokens for tier in (*TIERS, BLENDED, RECOMPUTED)):
            return "tier"
        return "engine" if "engine" in self.tokens else "none"

    def end_load(self, times: RequestTimes) -> None:
        """Move the tokens that the engine computed after all to the reasons for that.

        All loads fail between memory and the engine. So rows that were in memory already lose tokens first.
        """
        self._move(times.num_recomputed_tokens, BLENDED, RECOMPUTED)
        self._move(max(0, self.tokens.get(BLENDED, 0) - times.num_blended_tokens), BLENDED, LOAD_FAILED)
        num_failed = times.num_failed_tokens
        for tier in TIERS:
            num_failed -= self._move(num_failed, tier, LOAD_FAILED)

    def _move(self, num_tokens: int, cause: str, to: str) -> int:
        """Give at most ``num_tokens`` tokens of a cause another cause. Return how many."""
        number = min(num_tokens, self.tokens.get(cause, 0))
        if number:
            self.tokens[to] = self.tokens.get(to, 0) + number
            self.tokens[cause] -= number
            if not self.tokens[cause]:
                del self.tokens[cause]
        return number

    def document(self) -> dict[str, Any]:
        """Return the request as the page ``/requests`` shows it. Times that are not known are null."""
        times = self.times or RequestTimes("")
        is_known = self.times is not None
        load = {self.load_tier: round(times.load_seconds, 6)} if self.load_tier else {}
        return {
            "time": self.time,
            "request_id": self.request_id,
            "tenant": self.tenant,
            "tokens": self.tokens,
            "common_tokens": self.common_tokens,
            "lookup_seconds": round(times.lookup_seconds, 6) if is_known else None,
            "wait_seconds": round(times.wait_seconds, 6) if is_known else None,
            "load_seconds": load if is_known else None,
            "first_token_seconds": round(times.first_token_seconds, 6) or None,
        } | ({"uncached_reason": self.uncached_reason} if self.uncached_reason else {})


def page_of(requests: Iterable[ExplainedRequest], query: str) -> bytes:
    """Return the JSON text of up to 100 requests whose ids contain the ``id`` of the query.

    Raises ValueError for a bad query.
    """
    wanted = ""
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name != "id":
            raise ValueError(f"unknown parameter {name[:32]!r}: use id")
        wanted = value
    matching = (request for request in requests if wanted in request.request_id)
    fields = [request.document() for request in islice(matching, _MAX_ANSWER)]
    return json.dumps({"version": 1, "requests": fields}).encode() + b"\n"
