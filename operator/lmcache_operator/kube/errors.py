"""What can go wrong with a call: it may go away, or the request or the permissions have to change first."""

from __future__ import annotations

import json

from ..queue import RetryableError

_TRANSIENT_STATUSES = frozenset({0, 408, 409, 429})


class ApiError(RetryableError):
    """No answer, 408, 409, 429 or 5xx: the server is busy or gone, or somebody was faster."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(f"{what}: {message}")
        self.message = message


class Refused(ApiError):
    """Every other status: 400, 403, 422 and the like."""


def error_of(what: str, status: int, body: bytes) -> ApiError:
    """The error that an answer stands for: `what` names the call, status 0 is no answer."""
    try:
        message = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace") or f"HTTP {status}"
    is_transient = status in _TRANSIENT_STATUSES or status >= 500
    return (ApiError if is_transient else Refused)(what, message)
