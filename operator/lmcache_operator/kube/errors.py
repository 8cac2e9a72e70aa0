"""What can go wrong with a call, sorted once by what to do about it.

ApiError
├── Transient   the server is busy, gone, or somebody was faster: it goes away
└── Refused     the request, or the permissions, have to change first
"""

from __future__ import annotations

import json

from ..queue import RetryableError

_TRANSIENT_STATUSES = frozenset({0, 408, 409, 429})


class ApiError(RetryableError):
    """A call to the API server failed. `status` is the HTTP status, 0 when there was no answer."""

    def __init__(self, what: str, status: int, message: str) -> None:
        super().__init__(f"{what}: {message}")
        self.status = status
        self.message = message


class Transient(ApiError):
    """No answer, 408, 409, 429 or 5xx."""


class Refused(ApiError):
    """Every other status: 400, 403, 422 and the like."""


def error_of(what: str, status: int, body: bytes) -> ApiError:
    """The error that an answer stands for; `what` names the call, as in 'apply Service a/b'."""
    try:
        message = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace") or f"HTTP {status}"
    is_transient = status in _TRANSIENT_STATUSES or status >= 500
    return (Transient if is_transient else Refused)(what, status, message)
