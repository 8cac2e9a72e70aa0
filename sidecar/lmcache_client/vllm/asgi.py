"""Requests of vLLM's server, as its middlewares read and change them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 32 << 20
"""Longest body that a middleware changes. It holds the body in memory several times."""

_POLICY_VIOLATION = 1008  # code of a closed WebSocket


class UnusableRequestError(Exception):
    """A middleware can't change this request; the text says why."""


def path_of(scope: Message) -> str:
    """Return the path below the server's root, as Starlette compares it with the paths of its routes.

    Starlette ignores a line feed at the end: ``/v1/completions%0A`` reaches the route of ``/v1/completions``.
    """
    path, root = str(scope["path"]), scope.get("root_path", "")
    if path.startswith(f"{root}/"):
        path = path[len(root) :]
    return path.removesuffix("\n")


async def read_body(receive: Receive) -> bytes | None:
    """Return the body of a request; None if the client left. Raises UnusableRequestError for a long one."""
    parts: list[bytes] = []
    num_bytes, has_more = 0, True
    while has_more:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > MAX_BODY_BYTES:
            raise UnusableRequestError(f"the body is longer than {MAX_BODY_BYTES} bytes")
        has_more = message.get("more_body", False)
    return b"".join(parts)


def parse_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. Raises UnusableRequestError."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise UnusableRequestError("the body is not valid JSON") from None
    if not isinstance(content, dict):
        raise UnusableRequestError("the body must be a JSON object")
    return content


def with_length(scope: Message, num_bytes: int, *dropped: bytes) -> Message:
    """Return the scope for a body of this length, without the headers ``dropped``."""
    replaced = (*dropped, b"content-length", b"transfer-encoding")
    headers = [(name, value) for name, value in scope["headers"] if name.lower() not in replaced]
    return {**scope, "headers": [*headers, (b"content-length", str(num_bytes).encode())]}


def again(body: bytes, receive: Receive) -> Receive:
    """Return a function that returns the body once, and then what ``receive`` returns."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


async def refuse(scope: Message, receive: Receive, send: Send, reason: str) -> None:
    """Answer with status 400 and the reason; a WebSocket is closed before it opens."""
    kind = "http.response"
    if scope["type"] == "websocket":
        await receive()
        kind = "websocket.http.response"
        if kind not in (scope.get("extensions") or {}):
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": reason[:100]})
            return
    await answer(send, 400, error_body(reason, 400), kind)


async def answer(send: Send, status: int, body: bytes, kind: str = "http.response") -> None:
    """Answer a request with a JSON text."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": f"{kind}.start", "status": status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})


def error_body(reason: str, status: int) -> bytes:
    """Return the body of an error in the form of vLLM's own errors."""
    kind = "BadRequestError" if status == 400 else "Error"
    return json.dumps({"error": {"message": reason, "type": kind, "code": status}}).encode()
