"""Answers of the API server, and failed calls as errors of the operator."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

import aiohttp

from lmcache_operator.api import GROUP
from lmcache_operator.errors import ApiError, NoAnswerError, RefusedError, UnavailableError
from lmcache_operator.kube.shallow import loads
from lmcache_operator.specs import Object

_UNAVAILABLE_STATUSES = frozenset({408, 409, 410, 429})  # 410: the first page of a list is old

_NEEDED = {"cert-manager": "cert-manager", GROUP: "LMCache Cluster's chart, or a newer version of it"}
"""Projects whose installation defines kinds of objects, by a part of these kinds' paths."""
_NOT_KUBERNETES = "it does not answer like a Kubernetes API server: check its address in the kubeconfig"


def parsed(what: str, body: bytes) -> Any:
    """The answer to a call. Raises UnavailableError if it is not of an API server, but of a login page."""
    try:
        answer = loads(body)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise UnavailableError(what, _NOT_KUBERNETES)
    return answer


def with_field(name: str, answer: Object) -> Object:
    """The answer, which must have this field. Raises UnavailableError."""
    if name not in answer:
        raise UnavailableError("the server", _NOT_KUBERNETES)
    return answer


def warning_of(header: str) -> str:
    """Return the text of a header Warning, such as `299 - "the text"`."""
    return header.partition('"')[2].removesuffix('"').replace('\\"', '"')


def error_of(what: str, status: int, body: bytes) -> ApiError:
    """The error for a failed call. ``what``: the call; ``status``: HTTP status, or 0 without an answer."""
    try:
        answer = json.loads(body)
        message, is_explained = answer["message"], "reason" in answer
    except (ValueError, KeyError, TypeError):
        message, is_explained = body[:200].decode(errors="replace") or f"HTTP {status}", True
        if status == HTTPStatus.NOT_FOUND:  # for a missing object the answer has a reason
            needed = next((name for part, name in _NEEDED.items() if part in what), "a newer Kubernetes")
            message = f"the API server does not know this kind of object: it needs {needed}"
    if status == 0:
        return NoAnswerError(what, message)
    # For a schema violation, server-side apply answers 500 without a reason.
    is_unavailable = status in _UNAVAILABLE_STATUSES or (status >= 500 and is_explained)
    return (UnavailableError if is_unavailable else RefusedError)(what, message)


def no_answer(error: Exception, seconds: float) -> bytes:
    """The body that stands for a missing answer: its reason."""
    if isinstance(error, TimeoutError):
        return f"no answer within {round(seconds, 1):g} s".encode()
    return f"no answer: {str(error) or type(error).__name__}".encode()


class TooLargeError(OSError):
    """An answer is larger than its limit."""


async def bounded(content: aiohttp.StreamReader, max_bytes: float) -> bytes:
    """Read a body. Raises TooLargeError if it exceeds ``max_bytes``, before all of it is in memory."""
    body = bytearray()
    async for part in content.iter_any():
        body += part
        if len(body) > max_bytes:
            raise TooLargeError(f"the answer is larger than {max_bytes / 2**20:g} MiB")
    return bytes(body)
