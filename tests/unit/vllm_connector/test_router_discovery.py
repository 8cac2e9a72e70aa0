"""The answers that vLLM's router needs from an engine before it follows the engine's KV events."""

import asyncio
import json
import socket
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from vllm.entrypoints.scale_out.render.api_router import router as render_router
from vllm.entrypoints.scale_out.token_in_token_out.api_router import router as token_router

from lmcache_client.vllm.router_discovery import RouterDiscovery
from tests.harness.client.asgi import receiving

CONFIG = SimpleNamespace(
    enable_kv_cache_events=True,
    publisher="zmq",
    endpoint="tcp://*:5557",
    replay_endpoint=None,
    topic="",
    hwm=100_000,
)


def server_state(
    client: Any, kv_events: Any = CONFIG, connector: Any = None, first_rank: int = 0, num_ranks: int = 1
) -> Any:
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=32),
        model_config=SimpleNamespace(model="/models/tiny"),
        instance_id="17",
        kv_transfer_config=connector,
        kv_events_config=kv_events,
        parallel_config=SimpleNamespace(data_parallel_rank=first_rank, data_parallel_size_local=num_ranks),
    )
    return SimpleNamespace(vllm_config=config, engine_client=client)


def request(path: str, state: Any, method: str = "GET", kind: str = "http") -> Any:
    """Return the JSON answer of the middleware; None: it passed the request to the server."""
    passed: list[Any] = []
    sent: list[Any] = []

    async def server(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope)

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("the middleware reads no bodies")

    scope = {"type": kind, "path": path, "method": method, "app": SimpleNamespace(state=state)}
    asyncio.run(RouterDiscovery(server)(scope, receive, send))
    if passed:
        assert not sent
        return None
    start, body = sent
    assert start["status"] == 200
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    return json.loads(body["body"])


def test_router_gets_the_publisher_of_each_rank_with_its_encoding() -> None:
    client = SimpleNamespace(get_kv_event_sources=lambda: {0: CONFIG, 1: CONFIG})
    answer = request("/kv_event_sources", server_state(client))
    assert (set(answer), answer["1"]["endpoint"]) == ({"0", "1"}, "tcp://*:5557")
    assert (answer["1"]["encoding"], answer["1"]["schema_version"]) == ("msgpack", 1)
    older = SimpleNamespace()  # vLLM 0.29 and 0.30, which have no answer
    assert request("/kv_event_sources", server_state(older)).keys() == {"0"}
    with_replay = SimpleNamespace(**(vars(CONFIG) | {"replay_endpoint": "tcp://*:6557"}))
    answer = request("/kv_event_sources", server_state(older, with_replay, first_rank=2, num_ranks=2))
    assert {rank: (source["endpoint"], source["replay_endpoint"]) for rank, source in answer.items()} == {
        "2": ("tcp://*:5559", "tcp://*:6559"),
        "3": ("tcp://*:5560", "tcp://*:6560"),
    }
    assert request("/kv_event_sources", server_state(older, kv_events=None)) == {}


def test_name_is_the_same_in_each_api_server_of_an_engine() -> None:
    """vLLM passes the connector's settings to all API servers, and each of them draws an instance_id."""
    connector = SimpleNamespace(engine_id="3f")
    for settings, name in ((connector, "3f"), (None, "17")):
        answer = request("/get_server_info", server_state(SimpleNamespace(), connector=settings))
        assert answer["instance_id"] == f"{socket.gethostname()}-{name}"


def test_other_requests_reach_the_server() -> None:
    state = server_state(client=None)
    assert request("/health", state) is None
    assert request("/get_server_info", state, method="POST") is None
    assert request("/v1/completions/render", state, method="OPTIONS") is None
    assert request("/get_server_info", state, kind="websocket") is None
    assert request("/get_server_info", SimpleNamespace()) is None, "the middleware has no answer"


def tokenized(*parts: bytes, path: str = "/v1/completions/render", root_path: str = "") -> tuple[Any, Any]:
    """Return the body that the server gets, and the answer of the middleware."""
    bodies, sent = list[bytes](), list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)

    async def server(scope: Any, receive: Any, send: Any) -> None:
        bodies.append((await receive())["body"])
        assert dict(scope["headers"]) == {b"a": b"b", b"content-length": str(len(bodies[0])).encode()}

    headers = [(b"a", b"b"), (b"Content-Length", b"1")]
    scope = {"type": "http", "method": "POST", "path": path, "root_path": root_path, "headers": headers}
    asyncio.run(RouterDiscovery(server)(scope, receiving(*parts), send))
    return (json.loads(bodies[0]) if bodies else None), sent


def test_prompts_are_tokenized_without_their_salt() -> None:
    """vLLM's answer would show the salt to each client that reaches the path."""
    salted = b'{"prompt": "a", "cache_salt": "s", "cache\\u005fsalt": "t", "n": 2}'
    for path in ("/v1/completions/render", "/v1/chat/completions/render"):
        assert tokenized(salted[:9], salted[9:], path=path) == ({"prompt": "a", "n": 2}, [])
    assert tokenized(salted, path="/r/v1/completions/render", root_path="/r")[0] == {"prompt": "a", "n": 2}
    for body in (b"", b"{", b"[1]"):
        content, (start, _) = tokenized(body)
        assert (content, start["status"]) == (None, 400)
    assert tokenized() == (None, []), "the client left"


def refuse() -> None:
    """The endpoint of paths that vLLM refuses without an option."""


def endpoints_of(router: Any) -> dict[str, Any]:
    return {route.path: route.endpoint for route in router.routes if isinstance(route, APIRoute)}


def test_engine_tokenizes_prompts_for_the_router_and_opens_nothing_else() -> None:
    opened = {"/v1/completions/render", "/v1/chat/completions/render"}
    handlers = endpoints_of(render_router)
    assert opened < set(handlers)
    app, closed = FastAPI(), {*handlers, *endpoints_of(token_router), "/mine"}
    for path in closed:
        app.add_api_route(path, refuse, methods=["POST"])
    asyncio.run(called(app))
    endpoints = endpoints_of(app.router)
    assert {path: endpoints[path] for path in opened} == {path: handlers[path] for path in opened}
    assert all(endpoints[path] is refuse for path in closed - opened)


def test_paths_that_the_server_answers_stay_as_they_are() -> None:
    app = FastAPI()
    app.include_router(render_router)
    before = [*app.router.routes]
    asyncio.run(called(app))
    assert app.router.routes == before


async def called(app: FastAPI) -> None:
    """Pass one message of the server through the middleware."""

    async def server(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "lifespan"

    await RouterDiscovery(server)({"type": "lifespan", "app": app}, None, None)
