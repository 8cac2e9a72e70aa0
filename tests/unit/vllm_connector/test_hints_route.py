"""The middleware that serves ``POST /v1/lmcache/hints``, over doubles of vLLM's server and of the sidecar."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from lmcache_client.rpc.errors import RpcRefusedError, SidecarUnavailableError
from lmcache_client.rpc.service import DEFAULT_SOCKET
from lmcache_client.vllm import asgi, hints_route
from lmcache_client.vllm.hints import ANSWER_FIELD, FIELD
from lmcache_client.vllm.hints_route import PATH, HintsRoute
from lmcache_client.vllm.tenant_header import TenantHeader
from lmcache_store.hints import MAX_ACTIONS, HintDecision, HintOutcome
from tests.harness.client.asgi import receiving

RETAIN = {"action_id": "a", "action_type": "retain"}
UNKNOWN = {"action_id": "b", "action_type": "pin"}
BODY = {"prompt": "Once", "hints": [RETAIN, UNKNOWN]}
JSON = (b"content-type", b"application/json")
ACCEPTED = HintDecision("a", HintOutcome.ACCEPTED, "", 512, 60.0)
ANSWER = {"action_id": "a", "outcome": "accepted", "tokens": 512, "ttlSeconds": 60.0}


class Reader:
    """A sidecar that answers the second question; or the same at once, or with an error."""

    def __init__(self) -> None:
        self.answers: list[Any] = [None, [ACCEPTED]]
        self.asked: list[str] = []
        self.sockets: list[str] = []
        self.is_closed = False

    def open(self, socket_path: str) -> "Reader":
        self.sockets.append(socket_path)
        return self

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.is_closed = True

    def read(self, answer_id: str) -> Any:
        self.asked.append(answer_id)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class App:
    """vLLM's server: holds a request until its client leaves, or answers it with a status and a body."""

    def __init__(self) -> None:
        self.response: tuple[int, bytes] | None = None
        self.error: Exception | None = None
        self.scopes: list[Any] = []
        self.bodies: list[Any] = []
        self.num_aborted = 0
        extra = {"lmcache.socket": "/sidecar.sock"}
        self.config: Any = SimpleNamespace(kv_connector_extra_config=extra)

    @property
    def state(self) -> Any:
        return SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=self.config))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        body = (await receive())["body"]
        assert dict(scope["headers"])[b"content-length"] == str(len(body)).encode()
        self.bodies.append(json.loads(body))
        if self.error is not None:
            raise self.error
        if self.response is None:
            assert (await receive())["type"] == "http.disconnect"
            self.num_aborted += 1
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"null"})
        else:
            status, content = self.response
            await send({"type": "http.response.start", "status": status, "headers": [JSON]})
            await send({"type": "http.response.body", "body": content[:1], "more_body": True})
            await send({"type": "http.response.body", "body": content[1:]})

    @property
    def body(self) -> Any:
        (body,) = self.bodies
        return body


@pytest.fixture
def reader(monkeypatch) -> Reader:
    reader = Reader()
    monkeypatch.setattr(hints_route, "AnswerReader", reader.open)
    monkeypatch.delenv("LMCACHE_SOCKET", raising=False)
    return reader


@pytest.fixture
def app() -> App:
    return App()


def post(app: App, body: Any, middleware: Any = HintsRoute, *, leaves: bool = False, **fields: Any) -> Any:
    """Send a body through the middlewares. Returns status and JSON of the answer; None: there is none."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent: list[Any] = []
    scope = {
        "type": "http", "method": "POST", "path": PATH, "root_path": "", "app": app,
        "headers": [JSON, (b"content-length", str(len(content)).encode()), (b"accept-encoding", b"gzip")],
        **fields,
    }  # fmt: skip

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        stay = asyncio.Event()

        async def wait() -> Any:
            await stay.wait()

        await middleware(app)(scope, asgi.again(content, receiving() if leaves else wait), send)

    asyncio.run(run())
    if not sent:
        return None
    start, *parts = sent
    return start["status"], json.loads(b"".join(part["body"] for part in parts))


def test_prompt_is_sent_to_the_engine_which_does_not_compute_it(reader, app):
    body = {**BODY, "model": "m", "cache_salt": "s", "message_id": "session 7", "max_tokens": 99, "n": 3}
    body |= {
        "stream": True,
        "echo": True,
        "prompt_logprobs": 1,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    assert post(app, body) == (200, {"hints": [ANSWER]})
    (answer_id,) = set(reader.asked)
    assert len(answer_id) == 32
    assert app.body == {
        "prompt": "Once", "model": "m", "cache_salt": "s", "max_tokens": 1, "n": 1, "stream": False,
        "kv_transfer_params": {
            FIELD: {"message_id": "session 7", "actions": BODY["hints"]}, ANSWER_FIELD: answer_id
        },
    }  # fmt: skip
    (scope,) = app.scopes
    assert (scope["path"], scope["raw_path"], scope["method"]) == (
        "/v1/completions",
        b"/v1/completions",
        "POST",
    )
    assert b"accept-encoding" not in dict(scope["headers"])
    assert app.num_aborted == 1
    assert (reader.sockets, reader.is_closed) == (["/sidecar.sock"], True)


def test_messages_are_sent_as_a_chat_below_the_root_of_the_server(reader, app):
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [{}], "hints": [RETAIN]}
    assert post(app, body, path=f"/root{PATH}\n", root_path="/root")[0] == 200
    assert app.scopes[0]["path"] == "/root/v1/chat/completions"
    assert (app.body["messages"], app.body["tools"]) == (body["messages"], [{}])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "JSON object"),
        *(({"prompt": "a", **hints}, "hints must be a list of 1 to 32 actions") for hints in (
            {}, {"hints": None}, {"hints": {}}, {"hints": []}, {"hints": [{}] * (MAX_ACTIONS + 1)}
        )),
        *(({"prompt": prompt, "hints": [{}]}, "prompt must be one text") for prompt in (
            ["a"], ["a", "b"], [[1, 2]], [1, "a"], [True]
        )),
    ],
)  # fmt: skip
def test_malformed_body_is_refused(reader, app, body, reason):
    status, content = post(app, body)
    assert (status, reason in content["error"]["message"]) == (400, True)
    assert app.bodies == []


def test_long_body_is_refused_and_a_client_that_leaves_gets_nothing(reader, app, monkeypatch):
    monkeypatch.setattr(asgi, "MAX_BODY_BYTES", 10)
    assert post(app, BODY)[0] == 400
    sent: list[Any] = []
    scope = {"type": "http", "method": "POST", "path": PATH}
    asyncio.run(HintsRoute(app)(scope, receiving(), sent.append))
    assert (sent, app.bodies) == ([], [])


def test_million_tokens_are_one_prompt(reader, app):
    assert post(app, {"prompt": [7] * 1_000_000, "hints": [RETAIN]})[0] == 200
    assert len(app.body["prompt"]) == 1_000_000


@pytest.mark.parametrize(
    "fields", [{"path": "/v1/completions"}, {"method": "GET"}, {"type": "lifespan"}, {"path": f"{PATH}/x"}]
)
def test_other_requests_pass_unchanged(reader, app, fields):
    app.response = 200, b'{"id": 1}'
    assert post(app, BODY, **fields) == (200, {"id": 1})
    assert app.body == BODY
    assert reader.asked == []


@pytest.mark.parametrize("status", [400, 401, 404, 500])
def test_error_of_the_engine_is_passed_on(reader, app, status):
    reader.answers = [None]
    app.response = status, b'{"error": "no"}'
    assert post(app, BODY) == (status, {"error": "no"})


def test_computed_request_answers_with_the_connector_s_decisions(reader, app):
    """The side of the scheduler is offline, so it holds nothing."""
    reader.answers = [None]
    app.response = 200, json.dumps({"kv_transfer_params": {"lmcache": {"hints": [ANSWER]}}}).encode()
    assert post(app, BODY) == (200, {"hints": [ANSWER]})


@pytest.mark.parametrize("content", [b"{}", b'{"kv_transfer_params": null}', b"[]", b"no JSON", b"null"])
def test_computed_request_without_decisions_is_deferred(reader, app, content):
    reader.answers = [None]
    app.response = 200, content
    status, answer = post(app, BODY)
    assert (status, [each["outcome"] for each in answer["hints"]]) == (200, ["deferred", "refused"])
    assert "the engine is not cached now" in answer["hints"][0]["reason"]


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (SidecarUnavailableError("no socket"), "deferred", "the sidecar does not answer: no socket"),
        (RpcRefusedError(grpc.StatusCode.UNIMPLEMENTED, ""), "refused", "the sidecar is older"),
    ],
)
def test_sidecar_that_does_not_answer(reader, app, error, outcome, reason):
    reader.answers = [error]
    status, answer = post(app, BODY)
    first, second = answer["hints"]
    assert (status, first["outcome"], second["outcome"]) == (200, outcome, "refused")
    assert first["reason"].startswith(reason)
    assert app.num_aborted <= 1


def test_engine_that_sends_no_hints_is_deferred(reader, app, monkeypatch):
    monkeypatch.setattr(hints_route, "ANSWER_SECONDS", 0.05)
    reader.answers = [None]
    status, answer = post(app, BODY)
    assert (status, answer["hints"][0]["outcome"], app.num_aborted) == (200, "deferred", 1)
    assert "within 0.05 s" in answer["hints"][0]["reason"]


def test_client_that_leaves_aborts_the_request(reader, app):
    reader.answers = [None]
    assert post(app, BODY, leaves=True) is None
    assert reader.is_closed


def test_exception_of_the_server_is_raised(reader, app):
    reader.answers = [None]
    app.error = RuntimeError("boom")
    with pytest.raises(RuntimeError, match="boom"):
        post(app, BODY)


@pytest.mark.parametrize("is_outside", [True, False])
def test_tenant_is_set_in_both_orders_of_the_middlewares(reader, app, is_outside):
    def both(app: Any) -> Any:
        return TenantHeader(HintsRoute(app)) if is_outside else HintsRoute(TenantHeader(app))

    headers = [JSON, (b"X-LMCache-Tenant", b"s3cret")]
    body = {**BODY, "cache_salt": "of the client"}
    assert post(app, body, both, headers=headers) == (200, {"hints": [ANSWER]})
    assert app.body["cache_salt"] == "s3cret"
    assert b"X-LMCache-Tenant" not in dict(app.scopes[0]["headers"])


def test_socket_is_that_of_the_connector(reader, app, monkeypatch):
    children = [{"kv_connector": "Other"}, {"kv_connector_extra_config": {"lmcache.socket": "/child.sock"}}]
    for config, socket in (
        (None, DEFAULT_SOCKET),
        (SimpleNamespace(kv_connector_extra_config=None), DEFAULT_SOCKET),
        (SimpleNamespace(kv_connector_extra_config={"connectors": children}), "/child.sock"),
    ):
        app.config = config
        post(app, BODY)
        assert reader.sockets[-1] == socket
    monkeypatch.setenv("LMCACHE_SOCKET", "/environment.sock")
    post(app, BODY)
    assert reader.sockets[-1] == "/environment.sock"
