"""Sets the cache salt of a request from a header that a gateway sets, so that clients can't choose it.

A salt separates the KV of tenants, and budgets of tenants go by it. vLLM reads it from ``cache_salt`` in the
body, which the client writes. A gateway that knows the tenant can set a header more easily than a body.

- With the header, its value replaces ``cache_salt``. A request whose salt can't be set gets status 400.
- Without the header, nothing is changed. The gateway must therefore set the header in each request, and
  replace a header of the client. Clients must not reach the engine by another way.
- Requests without a body, such as ``GET /health``, pass.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

HEADER = b"x-lmcache-tenant"
MAX_BODY_BYTES = 32 << 20
"""Longest body that the middleware changes. It holds the body in memory several times."""

MAX_SALT_BYTES = 256
PATHS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/completions/render",
        "/v1/chat/completions/render",
    }
)
"""Paths whose requests have a ``cache_salt`` in all supported versions. At other paths vLLM may ignore it."""

_POLICY_VIOLATION = 1008  # code of a closed WebSocket

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]


class _RefusedError(Exception):
    """The salt of this request can't be set; the text says why."""


class TenantHeader:
    """ASGI middleware for ``vllm serve --middleware lmcache.engines.vllm.tenant_header.TenantHeader``."""

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Pass a request on with the salt of its header, or refuse it."""
        salts = [value for name, value in scope.get("headers", ()) if name.lower() == HEADER]
        if not salts or scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            salt = _read_salt(salts)
            if scope["type"] == "websocket":
                raise _RefusedError("a WebSocket can't have a tenant: send requests over HTTP")
            body = await _read_body(scope, receive)
            if body is None:
                return
            changed = _with_salt(scope, body, salt) if body else body
        except _RefusedError as error:
            await _refuse(scope, receive, send, f"X-LMCache-Tenant: {error}")
            return
        await self._app(_with_length(scope, len(changed)), _again(changed, receive), send)


def _read_salt(values: list[bytes]) -> str:
    if len(values) > 1:
        raise _RefusedError("the header is set more than once: the gateway must replace the client's header")
    try:
        salt = values[0].decode("utf-8").strip()
    except UnicodeDecodeError:
        raise _RefusedError("the header is not UTF-8 text") from None
    if not salt or len(values[0]) > MAX_SALT_BYTES:
        raise _RefusedError(f"the header must have 1 to {MAX_SALT_BYTES} bytes")
    return salt


async def _read_body(scope: _Message, receive: _Receive) -> bytes | None:
    """Return the whole body of a request; None if the client left."""
    parts: list[bytes] = []
    num_bytes, has_more = 0, True
    while has_more:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > MAX_BODY_BYTES:
            raise _RefusedError(f"the body is longer than {MAX_BODY_BYTES} bytes")
        has_more = message.get("more_body", False)
    return b"".join(parts)


def _with_salt(scope: _Message, body: bytes, salt: str) -> bytes:
    """Return the body with this ``cache_salt``."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if path not in PATHS:
        raise _RefusedError(f"requests to {path[:100]!r} can't have a tenant")
    headers = {name.lower(): value.lower() for name, value in scope["headers"]}
    media_type = headers.get(b"content-type", b"").partition(b";")[0].strip()
    if media_type != b"application/json":
        raise _RefusedError("the body must be JSON, with Content-Type: application/json")
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise _RefusedError("the body must not be compressed")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise _RefusedError("the body is not valid JSON") from None
    if not isinstance(content, dict):
        raise _RefusedError("the body must be a JSON object")
    content["cache_salt"] = salt
    return json.dumps(content, separators=(",", ":")).encode()


def _with_length(scope: _Message, num_bytes: int) -> _Message:
    """Return the scope for a body of this length, without the header, so that no log shows the salt."""
    replaced = (HEADER, b"content-length", b"transfer-encoding")
    headers = [(name, value) for name, value in scope["headers"] if name.lower() not in replaced]
    return {**scope, "headers": [*headers, (b"content-length", str(num_bytes).encode())]}


def _again(body: bytes, receive: _Receive) -> _Receive:
    """Return a function that returns the body once, and then what ``receive`` returns."""
    messages: list[_Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> _Message:
        return messages.pop() if messages else await receive()

    return receive_again


async def _refuse(scope: _Message, receive: _Receive, send: _Send, reason: str) -> None:
    """Answer with status 400 and the reason; a WebSocket is closed before it opens."""
    kind = "http.response"
    if scope["type"] == "websocket":
        await receive()
        kind = "websocket.http.response"
        if kind not in (scope.get("extensions") or {}):
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": reason[:100]})
            return
    error = {"error": {"message": reason, "type": "BadRequestError", "code": 400}}
    body = json.dumps(error).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": f"{kind}.start", "status": 400, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})
