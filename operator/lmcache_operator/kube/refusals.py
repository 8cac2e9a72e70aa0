"""Failed calls to the API server, as errors of the operator."""

from __future__ import annotations

import json
from http import HTTPStatus

from lmcache_operator.errors import ApiError, NoAnswerError, RefusedError, UnavailableError

_UNAVAILABLE_STATUSES = frozenset({408, 409, 429})


def error_of(what: str, status: int, body: bytes) -> ApiError:
    """The error for a failed call. ``what``: the call; ``status``: HTTP status, or 0 without an answer."""
    try:
        answer = json.loads(body)
        message, is_explained = answer["message"], "reason" in answer
    except (ValueError, KeyError, TypeError):
        message, is_explained = body[:200].decode(errors="replace") or f"HTTP {status}", True
        if status == HTTPStatus.NOT_FOUND:  # for a missing object the answer has a reason
            needed = (
                "cert-manager" if "cert-manager" in what else "a newer Kubernetes, or the chart's definitions"
            )
            message = f"the API server does not know this kind of object: it needs {needed}"
    if status == 0:
        return NoAnswerError(what, message)
    # For a schema violation, server-side apply answers 500 without a reason.
    is_unavailable = status in _UNAVAILABLE_STATUSES or (status >= 500 and is_explained)
    return (UnavailableError if is_unavailable else RefusedError)(what, message)
