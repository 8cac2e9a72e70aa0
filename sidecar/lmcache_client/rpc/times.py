"""How long a request took, as an engine reports it to the sidecar. Pure."""

from __future__ import annotations

from typing import NamedTuple


class RequestTimes(NamedTuple):
    """Durations of one request. The fields are those of ``kvcache.proto``; 0.0: not known, or it had none."""

    request_id: str
    lookup_seconds: float = 0.0
    wait_seconds: float = 0.0
    load_seconds: float = 0.0
    first_token_seconds: float = 0.0
    num_failed_tokens: int = 0
    num_blended_tokens: int = 0
    num_recomputed_tokens: int = 0
