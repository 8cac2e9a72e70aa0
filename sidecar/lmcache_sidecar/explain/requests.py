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
    """The slowest tier that held tokens which the engine loads; empty: it loads none."""
    times: RequestTimes | None = None
    """Durations; None: the engine has not reported them, because the request has no first token yet."""
    is_counted: bool = False

    def __post_init__(self) -> None:
        self.load_tier = next((tier for tier in reversed(TIERS) if self.tokens.get(tier)), "")

    @property
    def source(self) -> TokenSource:
        """Place of the request's first tokens."""
        if any(tier in self.tokens for tier in TIERS):
            return "tier"
        return "engine" if "engine" in self.tokens else "none"

    def fail_load(self, num_tokens: int) -> None:
        """Move tokens that were not loaded from the tiers to the cause ``LOAD_FAILED``.

        All loads fail between memory and the engine. So rows that were in memory already lose tokens first.
        """
        for tier in TIERS:
            num_failed = min(num_tokens, self.tokens.get(tier, 0))
            if num_failed:
                num_tokens -= num_failed
                self.tokens[LOAD_FAILED] = self.tokens.get(LOAD_FAILED, 0) + num_failed
                self.tokens[tier] -= num_failed
                if not self.tokens[tier]:
                    del self.tokens[tier]

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
