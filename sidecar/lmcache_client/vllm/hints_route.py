"""Serves ``POST /v1/lmcache/hints``: KV hints for a prompt that the engine does not compute.

The body is that of a completion or chat request, such as ``{"prompt": "Once"}`` or ``{"messages": [...]}``,
with ``hints``, a list of actions (``lmcache_store.hints``), and perhaps a ``message_id``. The answer is
``{"hints": [decision, ...]}``.

The middleware sends vLLM's server a request with this body at the usual path. So the tokens, adapter, salt,
images and the API key are those of usual requests. The connector sends the hints to the sidecar, and holds
the request. The middleware reads the answer from the sidecar, and aborts the request.

The order of this middleware and ``TenantHeader`` does not matter: the salt is set in either body.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Sequence
from typing import Any

from lmcache_client.rpc.errors import RpcRefusedError, SidecarError
from lmcache_client.rpc.hints import AnswerReader
from lmcache_client.rpc.service import DEFAULT_SOCKET
from lmcache_client.vllm import asgi, hand_over
from lmcache_client.vllm.asgi import App, Message, Receive, Send, UnusableRequestError
from lmcache_client.vllm.hinted import OLDER_SIDECAR
from lmcache_client.vllm.hints import ANSWER_FIELD, FIELD, decisions, parse_hints
from lmcache_store.hints import MAX_ACTIONS, HintDecision, HintOutcome, Hints

PATH = "/v1/lmcache/hints"
ANSWER_SECONDS = 10.0
"""Longest wait for the sidecar's answer. The engine holds the request for longer than this."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05
"""Seconds between two questions to the sidecar. They double."""

_REPLACED: dict[str, Any] = {"max_tokens": 1, "stream": False, "n": 1}
_DROPPED = {
    "hints", "message_id", "max_completion_tokens", "min_tokens", "stream_options", "best_of",
    "use_beam_search", "echo", "logprobs", "top_logprobs", "prompt_logprobs",
}  # fmt: skip
"""Fields that say how to compute an answer. vLLM holds no request for log probabilities of the prompt."""


class HintsRoute:
    """ASGI middleware for ``vllm serve --middleware lmcache_client.vllm.hints_route.HintsRoute``."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request for hints, or pass another request on."""
        if scope["type"] != "http" or scope["method"] != "POST" or asgi.path_of(scope) != PATH:
            await self._app(scope, receive, send)
            return
        try:
            if (body := await asgi.read_body(receive)) is None:
                return
            content = asgi.parse_body(body)
            _check(content)
        except UnusableRequestError as error:
            await asgi.refuse(scope, receive, send, str(error))
            return
        await self._apply(scope, receive, send, content)

    async def _apply(self, scope: Message, receive: Receive, send: Send, content: dict[str, Any]) -> None:
        envelope = {"message_id": content.get("message_id", ""), "actions": content["hints"]}
        hints, answer_id = parse_hints(envelope), secrets.token_hex(16)
        params = {FIELD: envelope, ANSWER_FIELD: answer_id}
        prompt = {name: value for name, value in content.items() if name not in _DROPPED}
        body = json.dumps({**prompt, **_REPLACED, "kv_transfer_params": params}).encode()
        is_over, response = asyncio.Event(), _Response()
        inner = _inner_scope(scope, "chat/completions" if "messages" in content else "completions", len(body))
        request = asyncio.ensure_future(self._app(inner, _receiving(body, is_over), response.send))
        answer = asyncio.create_task(_read_answer(_socket_of(scope), answer_id, hints))
        departure = asyncio.create_task(_await_departure(receive))
        try:
            await asyncio.wait({request, answer, departure}, return_when=asyncio.FIRST_COMPLETED)
            if request.done():
                request.result()
                await response.pass_on(send, hints)
            elif answer.done():
                await _answer(send, answer.result())
        finally:
            is_over.set()
            answer.cancel()
            departure.cancel()
            await request


class _Response:
    """The response of vLLM's server to the request that the middleware made up."""

    def __init__(self) -> None:
        self._start: Message = {"type": "http.response.start", "status": 500, "headers": []}
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        """Take a message of the response."""
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")

    async def pass_on(self, send: Send, hints: Hints) -> None:
        """Send an error as it is, or the hints' answer in a successful response."""
        if self._start["status"] != 200:
            await send(self._start)
            await send({"type": "http.response.body", "body": bytes(self._body)})
            return
        try:
            given = json.loads(self._body)["kv_transfer_params"][hand_over.FIELD]["hints"]
        except (ValueError, LookupError, TypeError):
            reason = "the engine is not cached now, and has computed the prompt: see its log"
            await _answer(send, decisions(hints, HintOutcome.DEFERRED, reason))
            return
        await asgi.answer(send, 200, json.dumps({"hints": given}).encode())


def _check(content: dict[str, Any]) -> None:
    """Raise UnusableRequestError if the body has no list of hints, or several prompts."""
    hints, prompt = content.get("hints"), content.get("prompt")
    if not isinstance(hints, list) or not 0 < len(hints) <= MAX_ACTIONS:
        raise UnusableRequestError(f"hints must be a list of 1 to {MAX_ACTIONS} actions")
    if isinstance(prompt, list) and not all(type(token) is int for token in prompt):
        raise UnusableRequestError("prompt must be one text, or one list of tokens")


def _inner_scope(scope: Message, name: str, num_bytes: int) -> Message:
    path = f"{scope['path'].removesuffix(chr(10)).removesuffix(PATH)}/v1/{name}"
    changed = asgi.with_length(scope, num_bytes, b"accept-encoding")
    return {**changed, "path": path, "raw_path": path.encode()}


def _receiving(body: bytes, is_over: asyncio.Event) -> Receive:
    """Return a function that returns the body, and then that the client has left, once the event is set."""

    async def receive() -> Message:
        await is_over.wait()
        return {"type": "http.disconnect"}

    return asgi.again(body, receive)


async def _await_departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_answer(socket_path: str, answer_id: str, hints: Hints) -> Sequence[HintDecision]:
    """Wait for the sidecar's answer, within ``ANSWER_SECONDS``."""
    time = asyncio.get_running_loop().time
    pause, deadline = _FIRST_PAUSE, time() + ANSWER_SECONDS
    try:
        with AnswerReader(socket_path) as reader:
            while time() < deadline:
                if (answer := await asyncio.to_thread(reader.read, answer_id)) is not None:
                    return answer
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
    except RpcRefusedError:
        return decisions(hints, HintOutcome.REFUSED, OLDER_SIDECAR)
    except SidecarError as error:
        return decisions(hints, HintOutcome.DEFERRED, f"the sidecar does not answer: {error}")
    reason = f"the engine has not sent the hints to the sidecar within {ANSWER_SECONDS:g} s"
    return decisions(hints, HintOutcome.DEFERRED, reason)


async def _answer(send: Send, answer: Sequence[HintDecision]) -> None:
    body = {"hints": [decision.as_json() for decision in answer]}
    await asgi.answer(send, 200, json.dumps(body).encode())


def _socket_of(scope: Message) -> str:
    """Return the socket of this engine's sidecar, which may be a setting of a child of a MultiConnector."""
    config = scope["app"].state.vllm_config.kv_transfer_config
    extra = (config.kv_connector_extra_config if config is not None else None) or {}
    children = [child.get("kv_connector_extra_config") or {} for child in extra.get("connectors") or ()]
    sockets = [each["lmcache.socket"] for each in (extra, *children) if "lmcache.socket" in each]
    return os.environ.get("LMCACHE_SOCKET") or (sockets or [DEFAULT_SOCKET])[0]
