"""Answers the questions that vLLM's router asks an engine, so that it can follow the engine's KV events.

``vllm-router`` (0.1.17) gets ``/get_server_info`` for the block size, and ``/kv_event_sources`` for the
address of the events. vLLM does not serve the first path, and its answer to the second has no encoding.
Without both answers the router ignores the engine's events, and routes by load alone.

For each prompt of text, the router posts to ``/v1/completions/render`` or ``/v1/chat/completions/render``. It
gets the tokens. vLLM >= 0.32 refuses these paths without ``--enable-scale-out``, which older versions do not
know. That option would also let each client of the engine abort requests of others. So the middleware
replaces only the refusal of these two paths by vLLM's own handlers. Their answers contain the salt of the
request, so the middleware removes the salt before.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Mapping
from typing import Any

from vllm.distributed.kv_events import ZmqEventPublisher

from lmcache_client.vllm import asgi
from lmcache_client.vllm.asgi import App, Message, Receive, Send, UnusableRequestError

logger = logging.getLogger(__name__)

ENCODING, SCHEMA_VERSION = "msgpack", 1
"""Format of vLLM's events, as the router names it. The router ignores sources without these two fields."""
RENDER_PATHS = frozenset({"/v1/completions/render", "/v1/chat/completions/render"})
"""Paths to which vLLM's router sends requests of its own. They compute no KV, so their salt has no effect."""

_PUBLISHER_FIELDS = ("enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", "topic", "hwm")


class RouterDiscovery:
    """ASGI middleware for ``vllm serve --middleware lmcache_client.vllm.router_discovery.RouterDiscovery``.

    It answers two paths, and passes all other requests to vLLM. vLLM then answers two paths more.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._has_opened = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if not self._has_opened and "app" in scope:
            self._has_opened = True
            _open_render(scope["app"])
        path = asgi.path_of(scope) if scope["type"] == "http" else ""
        if path in RENDER_PATHS and scope["method"] == "POST":
            await self._tokenize(scope, receive, send)
            return
        answer = _ANSWERS.get(path) if scope.get("method") == "GET" else None
        body = _encoded(answer, scope) if answer is not None else None
        if body is None:
            await self._app(scope, receive, send)
        else:
            await asgi.answer(send, 200, body)

    async def _tokenize(self, scope: Message, receive: Receive, send: Send) -> None:
        """Let vLLM tokenize a prompt without its salt, which the answer would show, or refuse the request."""
        try:
            if (body := await asgi.read_body(receive)) is None:
                return
            content = asgi.parse_body(body)
        except UnusableRequestError as error:
            await asgi.refuse(scope, receive, send, str(error))
            return
        content.pop("cache_salt", None)
        body = json.dumps(content, separators=(",", ":")).encode()
        await self._app(asgi.with_length(scope, len(body)), asgi.again(body, receive), send)


def _open_render(app: Any) -> None:
    """Let vLLM tokenize prompts for the router, if it refuses to. All other checks of requests remain."""
    try:
        from vllm.entrypoints.scale_out.render.api_router import router

        handlers = {route.path: route for route in router.routes if route.path in RENDER_PATHS}
        for number, route in enumerate(app.router.routes):
            handler = handlers.get(getattr(route, "path", ""))
            if handler is not None and route.endpoint is not handler.endpoint:
                app.router.routes[number] = handler
    except Exception as error:
        logger.warning("LMCache Cluster cannot tokenize prompts for routers, which may ignore KV: %s", error)


def server_info(state: Any) -> dict[str, Any]:
    """Return the identity of the engine, and the number of tokens in a block of its events.

    ``state``: the state of vLLM's server.
    """
    config = state.vllm_config
    block_tokens = getattr(config.cache_config, "effective_attention_block_size", None)
    connector = config.kv_transfer_config
    return {
        "model_path": config.model_config.model,
        # The router tells engines apart by this name. Each API server of an engine has an instance_id of its
        # own, but they share the engine_id of the KV connector.
        "instance_id": f"{socket.gethostname()}-{connector.engine_id if connector else config.instance_id}",
        "kv_block_size": block_tokens or config.cache_config.block_size,
    }


def kv_event_sources(state: Any) -> dict[str, dict[str, Any]]:
    """Return the publishers of events by data-parallel rank; empty if the engine publishes no events."""
    config, parallel = state.vllm_config.kv_events_config, state.vllm_config.parallel_config
    get_sources = getattr(state.engine_client, "get_kv_event_sources", None)
    if get_sources is not None:  # vLLM >= 0.31 knows the port of each rank
        return {str(rank): _source(publisher) for rank, publisher in get_sources().items()}
    first = parallel.data_parallel_rank
    ranks = range(first, first + parallel.data_parallel_size_local) if config is not None else ()
    return {str(rank): _source(config, rank) for rank in ranks}


def _source(publisher: Any, port_offset: int = 0) -> dict[str, Any]:
    offset = ZmqEventPublisher.offset_endpoint_port
    fields = {name: getattr(publisher, name) for name in _PUBLISHER_FIELDS}
    endpoints = {name: offset(fields[name], port_offset) for name in ("endpoint", "replay_endpoint")}
    return fields | endpoints | {"encoding": ENCODING, "schema_version": SCHEMA_VERSION}


def _encoded(answer: Callable[[Any], Any], scope: Message) -> bytes | None:
    """Return the answer as JSON. None if it fails: the cache works, only the router gets no events."""
    try:
        return json.dumps(answer(scope["app"].state)).encode()
    except Exception:
        logger.exception("LMCache Cluster cannot answer GET %s, so routers ignore KV events", scope["path"])
        return None


_ANSWERS: Mapping[str, Callable[[Any], Any]] = {
    "/get_server_info": server_info,
    "/kv_event_sources": kv_event_sources,
}
