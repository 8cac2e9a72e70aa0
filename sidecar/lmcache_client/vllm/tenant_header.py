"""Sets the cache salt of a request from a header that a gateway sets, so that clients can't choose it.

A salt separates the KV of tenants, and budgets of tenants go by it. vLLM reads it from ``cache_salt`` in the
body, which the client writes. A gateway that knows the tenant can set a header more easily than a body.

- With the header, its value replaces ``cache_salt``. A request whose salt can't be set gets status 400.
- Without the header, requests are not changed. The gateway must therefore set the header in each request, and
  replace a header of the client. Clients must not reach the engine by another way.
- Requests without a body, such as ``GET /health``, pass. WebSockets are refused, with and without the header.
- A client can name its images by a ``uuid``. vLLM's own caches of images ignore the salt, so a client could
  get an image of another tenant by its name, or replace it. The middleware adds the tenant to each name.
- Errors of vLLM may repeat the request's body. The salt in them is replaced by ``***``. vLLM's logs of errors
  and its debug logs may still contain it.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from lmcache_client.vllm import asgi
from lmcache_client.vllm.asgi import App, Message, Receive, Send, UnusableRequestError

HEADER = b"x-lmcache-tenant"
MAX_ERROR_BYTES = 1 << 20
"""Longest error that is passed to the client. Another text replaces a longer one."""

MAX_SALT_BYTES = 256
PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/lmcache/hints"})
"""Paths whose requests have a ``cache_salt`` in all supported versions, and whose answers do not show it.

At other paths vLLM may ignore it. The answers at ``/v1/completions/render`` and the like contain it.
"""

_MIN_PIECE = 3  # bytes of a shortened salt


class TenantHeader:
    """ASGI middleware for ``vllm serve --middleware lmcache_client.vllm.tenant_header.TenantHeader``."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on with the salt of its header, or refuse it."""
        if scope["type"] == "websocket":
            await _refuse(scope, receive, send, "a WebSocket can't have a tenant: send requests over HTTP")
            return
        salts = [value for name, value in scope.get("headers", ()) if name.lower() == HEADER]
        if not salts or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            salt = _read_salt(salts)
            body = await asgi.read_body(receive)
            if body is None:
                return
            changed = _with_salt(scope, body, salt) if body else body
        except UnusableRequestError as error:
            await _refuse(scope, receive, send, str(error))
            return
        # Without the header, no log shows the salt.
        changed_scope = asgi.with_length(scope, len(changed), HEADER)
        await self._app(changed_scope, asgi.again(changed, receive), _Errors(send, salt).send)


class RoutedTenantHeader(TenantHeader):
    """ASGI middleware for engines behind vLLM's router. It refuses requests with a body and no header.

    vllm-router 0.1.17 passes the header on at ``/v1/completions`` and ``/v1/chat/completions``, and drops it
    at most other paths. The engine can't know by the path whether the router dropped the header: it gets
    ``/v1/%63ompletions`` and ``/x/../v1/completions`` as ``/v1/completions``. Without the header, the client
    would choose its tenant by the salt in the body.
    """

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on with the salt of its header, or refuse it."""
        has_header = any(name.lower() == HEADER for name, _ in scope.get("headers", ()))
        if scope["type"] != "http" or has_header:
            await super().__call__(scope, receive, send)
            return
        first = await receive()
        if first.get("body") or first.get("more_body"):
            reason = "the header is missing. The gateway must set it, and vLLM's router passes it on only at"
            paths = "/v1/completions and /v1/chat/completions"
            await _refuse(scope, receive, send, f"{reason} {paths}")
        elif first["type"] == "http.request":
            await self._app(scope, asgi.again(b"", receive), send)


class _Errors:
    """The answer to one request. Successful answers pass as they are; the salt is removed from errors."""

    def __init__(self, send: Send, salt: str) -> None:
        self._send = send
        self._salt = salt
        self._start: Message | None = None  # of an error, until its body is complete
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        """Send a message, or wait for the rest of an error."""
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._start = message
        elif self._start is None or message["type"] != "http.response.body":
            await self._send(message)
        else:
            self._body += message.get("body", b"")[: MAX_ERROR_BYTES + 1 - len(self._body)]
            if not message.get("more_body", False):
                start, self._start = self._start, None
                await self._send_error(start)

    async def _send_error(self, start: Message) -> None:
        headers = [header for header in start.get("headers", ()) if header[0].lower() != b"content-length"]
        is_encoded = any(name.lower() == b"content-encoding" for name, _ in headers)
        if is_encoded or len(self._body) > MAX_ERROR_BYTES:
            headers = [(b"content-type", b"application/json")]
            body = asgi.error_body(
                "the server's error is withheld: it is too long or compressed", start["status"]
            )
        else:
            body = _without_salt(bytes(self._body), self._salt)
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _escaped(text: str) -> tuple[str, ...]:
    """Return the text as it may appear in JSON or a representation. One with both quotes escapes ``'``."""
    quotes = "\"'"
    return (
        json.dumps(text)[1:-1],
        json.dumps(text, ensure_ascii=False)[1:-1],
        *(represent(text)[1:-1] for represent in (repr, ascii)),
        *(represent(quotes + text)[4:-1] for represent in (repr, ascii)),
    )


def _without_salt(body: bytes, salt: str) -> bytes:
    """Return the text of an error without the salt, which may be escaped, or shortened by ``...``."""
    forms = {salt}
    for _ in range(3):  # such as the representation of a body in JSON, in JSON
        forms.update(*map(_escaped, tuple(forms)))
    for known in sorted((form.encode() for form in forms), key=len, reverse=True):
        body = body.replace(known, b"***")
        if len(known) > _MIN_PIECE and b"..." in body:
            body = _without_start(body, known)
            body = _without_start(body[::-1], known[::-1])[::-1]
    return body


def _without_start(body: bytes, known: bytes) -> bytes:
    """Replace parts before ``...`` with which ``known`` starts. Takes time in proportion to the body."""
    rest = known[_MIN_PIECE:]
    parts = b"|".join(re.escape(rest[:length]) for length in range(len(rest), -1, -1))
    return re.sub(re.escape(known[:_MIN_PIECE]) + b"(?:" + parts + b")(?=\\.\\.\\.)", b"***", body)


def _read_salt(values: list[bytes]) -> str:
    if len(values) > 1:
        raise UnusableRequestError(
            "the header is set more than once: the gateway must replace the client's header"
        )
    try:
        salt = values[0].decode("utf-8").strip()
    except UnicodeDecodeError:
        raise UnusableRequestError("the header is not UTF-8 text") from None
    if not salt or len(values[0]) > MAX_SALT_BYTES:
        raise UnusableRequestError(f"the header must have 1 to {MAX_SALT_BYTES} bytes")
    return salt


def _with_salt(scope: Message, body: bytes, salt: str) -> bytes:
    """Return the body with this ``cache_salt``."""
    path = asgi.path_of(scope)
    if path not in PATHS:
        raise UnusableRequestError(f"requests to {path[:100]!r} can't have a tenant")
    headers = {name.lower(): value.lower() for name, value in scope["headers"]}
    media_type = headers.get(b"content-type", b"").partition(b";")[0].strip()
    if media_type != b"application/json":
        raise UnusableRequestError("the body must be JSON, with Content-Type: application/json")
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise UnusableRequestError("the body must not be compressed")
    content = {**asgi.parse_body(body), "cache_salt": salt}
    _rename_media(content, salt)
    return json.dumps(content, separators=(",", ":")).encode()


def _rename_media(content: dict[str, Any], salt: str) -> None:
    """Replace the names of images, videos and sounds in a prompt by names of this tenant.

    vLLM takes names of any type as texts. Arguments of tools are text of the prompt, and no media.
    Source: vLLM 0.32, ``renderers/chat_utils.py``, ``_parse_chat_message_content_part``.
    """
    pending = [content.get(field) for field in ("messages", "input")]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending.extend(value)
        elif isinstance(value, dict):
            pending.extend(each for key, each in value.items() if key != "tool_calls")
            if (name := value.get("uuid")) is not None:
                value["uuid"] = hashlib.sha256(json.dumps([salt, str(name)]).encode()).hexdigest()


async def _refuse(scope: Message, receive: Receive, send: Send, problem: str) -> None:
    await asgi.refuse(scope, receive, send, f"X-LMCache-Tenant: {problem}")
