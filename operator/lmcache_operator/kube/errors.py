"""What can go wrong with a call: it may go away, or the request or the permissions have to change first."""

from __future__ import annotations

import json

from lmcache_operator.queue import RetryableError

_TRANSIENT_STATUSES = frozenset({408, 409, 429})


class ApiError(RetryableError):
    """408, 409, 429 or 5xx: the server, or a webhook it asks, is busy or gone, or somebody was faster."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(f"{what}: {message}")
        self.message = message


class NoAnswer(ApiError):
    """The API server could not be reached."""


class Refused(ApiError):
    """Every other status, 400, 403, 422 and the like, and an object that does not fit the schema."""


def error_of(what: str, status: int, body: bytes) -> ApiError:
    """The error that an answer stands for: ``what`` names the call, status 0 is no answer."""
    try:
        answer = json.loads(body)
        message, is_explained = answer["message"], "reason" in answer
    except (ValueError, KeyError, TypeError):
        message, is_explained = body[:200].decode(errors="replace") or f"HTTP {status}", True
    if status == 0:
        return NoAnswer(what, message)
    # Server-side apply answers what does not fit the schema by 500 without a reason.
    is_transient = status in _TRANSIENT_STATUSES or (status >= 500 and is_explained)
    return (ApiError if is_transient else Refused)(what, message)
