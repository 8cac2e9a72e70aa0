"""The middleware that sets the cache salt of a request from the header of a gateway."""

import asyncio
import json
from typing import Any, NamedTuple

import pytest
from PIL import Image
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing.inputs import ProcessorInputs

from lmcache_client.vllm import asgi, tenant_header
from lmcache_client.vllm.tenant_header import RoutedTenantHeader, TenantHeader
from tests.harness.client.asgi import receiving

JSON = (b"Content-Type", b"application/json; charset=utf-8")
TENANT = (b"X-LMCache-Tenant", b"s3cret")


class Result(NamedTuple):
    """The request as the server got it, and the answer."""

    body: bytes | None
    """Body that reached the server; None: the request did not reach it."""
    headers: dict[bytes, bytes]
    sent: list[Any]

    @property
    def refusal(self) -> str:
        assert self.body is None
        start, body = self.sent
        assert start["status"] == 400
        assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
        return str(json.loads(body["body"])["error"]["message"])


def request(
    *parts: bytes,
    headers: tuple[tuple[bytes, bytes], ...] = (JSON, TENANT),
    path: str = "/v1/completions",
    middleware: type[TenantHeader] = TenantHeader,
    **scope: Any,
) -> Result:
    """Send a body in these parts through the middleware."""
    bodies, got, sent = list[bytes](), dict[bytes, bytes](), list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)

    async def server(scope: Any, receive: Any, send: Any) -> None:
        got.update(scope["headers"])
        body, message = b"", await receive()
        while message["type"] == "http.request":
            body, message = body + message["body"], await receive()
        bodies.append(body)

    whole = {"type": "http", "method": "POST", "path": path, "headers": list(headers), **scope}
    asyncio.run(middleware(server)(whole, receiving(*parts), send))
    return Result(bodies[0] if bodies else None, got, sent)


def test_salt_of_the_header_replaces_all_those_of_the_client():
    body = json.dumps({"prompt": "é\ud800", "cache_salt": "of another tenant", "n": 2}).encode()
    body = body[:-1] + b', "cache_salt": "again"}'
    result = request(body)
    assert json.loads(result.body) == {"prompt": "é\ud800", "n": 2, "cache_salt": "s3cret"}
    assert result.body.count(b"cache_salt") == 1
    assert result.headers[b"content-length"] == str(len(result.body)).encode()
    assert b"s3cret" not in result.headers.values()


IMAGE = MultiModalDataParser().parse_mm_data({"image": [Image.new("RGB", (2, 2))]})


def cached_image(path: str, field: str, name: object, tenant: bytes) -> str:
    """Return the key of a client's image in vLLM's caches of images."""
    image = {"type": "input_image", "image_url": None, "detail": "auto", "uuid": name}
    items: dict[str, Any] = {
        "messages": {"role": "user", "content": [image]},
        "input": {"role": "user", "content": [image]},
        "output": {"type": "function_call_output", "call_id": "1", "output": [image]},
    }
    key = "messages" if field == "messages" else "input"
    body = json.dumps({"model": "tiny", key: [items[field]]}).encode()
    changed = json.loads(request(body, path=path, headers=(JSON, (TENANT[0], tenant))).body)
    valid = (ChatCompletionRequest if key == "messages" else ResponsesRequest).model_validate(changed)
    (item,) = getattr(valid, key)
    (part,) = item["output" if field == "output" else "content"]
    hashes = ProcessorInputs([], IMAGE, {"image": [str(part["uuid"])]}).get_mm_hashes("tiny", "blake3")
    return str(hashes["image"][0])


@pytest.mark.parametrize("name", ["invoice", 4711, True, 1.5, ["x"], ""])
@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/chat/completions", "messages"), ("/v1/responses", "input"), ("/v1/responses", "output")],
)
def test_images_of_two_tenants_never_have_one_name(path: str, field: str, name: object):
    """vLLM looks an image up by the name that the client gave, whatever the salt of the request."""
    mine = cached_image(path, field, name, b"s3cret")
    assert mine == cached_image(path, field, name, b"s3cret"), "a tenant finds its own image"
    assert mine != cached_image(path, field, name, b"other")
    assert mine != cached_image(path, field, "invoice 2", b"s3cret")
    assert cached_image(path, field, mine, b"other") != mine, "a client may know the name"


def test_other_uuids_stay():
    call = {"function": {"name": "find", "arguments": {"uuid": "d"}}}
    messages = [{"uuid": None}, {"role": "assistant", "tool_calls": [call]}]
    body = {"tools": [{"uuid": "a"}], "metadata": {"uuid": "b"}, "messages": messages, "uuid": "c"}
    assert json.loads(request(json.dumps(body).encode()).body) == {**body, "cache_salt": "s3cret"}


def test_chunked_body_is_joined():
    whole = json.dumps({"prompt": "word " * 1000}).encode()
    parts = [whole[start : start + 7] for start in range(0, len(whole), 7)]
    result = request(*parts, b"", headers=(JSON, TENANT, (b"Transfer-Encoding", b"chunked")))
    assert json.loads(result.body) == {**json.loads(whole), "cache_salt": "s3cret"}
    assert b"Transfer-Encoding" not in result.headers


def test_request_without_the_header_or_a_body_is_unchanged():
    assert request(b"", method="GET", path="/health").body == b""
    assert request(b"", path="/v1/completions", root_path="/v1").body == b""
    assert request(type="lifespan", headers=(JSON,)).body == b""
    left = request(headers=(JSON, TENANT))
    assert (left.body, left.sent) == (None, []), "a client that leaves reaches no server"
    result = request(b"{", b"not JSON", headers=(JSON, (b"x", b"y")))
    assert (result.body, result.headers) == (b"{not JSON", {JSON[0]: JSON[1], b"x": b"y"})


@pytest.mark.parametrize("path", sorted(tenant_header.PATHS))
def test_paths_with_a_salt(path: str):
    assert json.loads(request(b"{}", path=path).body) == {"cache_salt": "s3cret"}
    assert json.loads(request(b"{}", path=f"/root{path}", root_path="/root").body) == {"cache_salt": "s3cret"}


@pytest.mark.parametrize(
    ("body", "options", "reason"),
    [
        (b"prompt=a", {"headers": ((b"content-type", b"application/x-www-form-urlencoded"), TENANT)}, "JSON"),
        (b"--x", {"headers": ((b"content-type", b"multipart/form-data; boundary=x"), TENANT)}, "JSON"),
        (b"{}", {"headers": (TENANT,)}, "Content-Type"),
        (b"{}", {"headers": (JSON, TENANT, (b"content-encoding", b"gzip"))}, "compressed"),
        *((body, {}, "not valid JSON") for body in (b"{", b"\xff", b"[" * 100_000)),
        (b"[1]", {}, "JSON object"),
        *(
            (b"{}", {"path": f"/v1/{kind}completions/render"}, "can't have a tenant")
            for kind in ("", "chat/")
        ),
        (b"{}", {"path": "/v1/audio/speech"}, "'/v1/audio/speech' can't have a tenant"),
        (b"{}", {"path": "/v1/completions/"}, "can't have a tenant"),
        (b"{}", {"path": "/v1/chat/completions/batch"}, "can't have a tenant"),
        (b"\0\0\0\0\2{}", {"headers": ((b"content-type", b"application/grpc"), TENANT)}, "JSON"),
        (b"{}", {"headers": (JSON, TENANT, TENANT)}, "more than once"),
        (b"{}", {"headers": (JSON, TENANT, (b"x-lmcache-tenant", b"other"))}, "more than once"),
        (b"{}", {"headers": (JSON, (b"x-lmcache-tenant", b" "))}, "1 to 256 bytes"),
        (b"{}", {"headers": (JSON, (b"x-lmcache-tenant", b"a" * 257))}, "1 to 256 bytes"),
        (b"{}", {"headers": (JSON, (b"x-lmcache-tenant", b"\xff"))}, "not UTF-8"),
    ],
)
def test_request_whose_salt_cannot_be_set_is_refused(body: bytes, options: dict[str, Any], reason: str):
    refusal = request(body, **options).refusal
    assert refusal.startswith("X-LMCache-Tenant: ")
    assert reason in refusal
    assert "s3cret" not in refusal


def test_long_body_is_refused_before_it_is_complete(monkeypatch):
    monkeypatch.setattr(asgi, "MAX_BODY_BYTES", 10)
    assert "longer than 10 bytes" in request(b"12345", b"67890", b"1", b"never read").refusal
    assert request(b"{        }").body is not None


@pytest.mark.parametrize("headers", [(JSON, TENANT), (JSON,)])
@pytest.mark.parametrize("middleware", [TenantHeader, RoutedTenantHeader])
def test_websockets_are_refused(middleware: type[TenantHeader], headers: tuple[tuple[bytes, bytes], ...]):
    options = {"type": "websocket", "headers": headers, "middleware": middleware}
    (close,) = request(**options).sent
    assert (close["type"], close["code"]) == ("websocket.close", 1008)
    start, body = request(**options, extensions={"websocket.http.response": {}}).sent
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 400)
    assert b"WebSocket" in body["body"]


LOST = (
    *("/v1/responses", "/root/v1/responses", "/invocations"),
    *("/v1/completions", "/v1/chat/completions", "/v1/completions/render"),
)


@pytest.mark.parametrize("path", LOST)
@pytest.mark.parametrize("parts", [(b'{"cache_salt": "of another tenant"}',), (b"", b"{}")])
def test_request_whose_header_the_router_dropped_is_refused(path: str, parts: tuple[bytes, ...]):
    options = {"headers": (JSON,), "path": path, "root_path": "/root" if "root" in path else ""}
    refusal = request(*parts, middleware=RoutedTenantHeader, **options).refusal
    assert "the header is missing. The gateway must set it" in refusal
    assert request(*parts, **options).body == b"".join(parts), "engines without a router accept it"


def test_engine_behind_a_router_accepts_other_requests():
    options = {"middleware": RoutedTenantHeader}
    assert json.loads(request(b"{}", path="/v1/responses", **options).body) == {"cache_salt": "s3cret"}
    assert json.loads(request(b"{}", **options).body) == {"cache_salt": "s3cret"}
    for path in ("/health", "/reset_prefix_cache"):
        assert request(b"", headers=(JSON,), path=path, **options).body == b""
    assert request(headers=(JSON,), path="/invocations", **options).body is None, "the client left"
    assert request(type="lifespan", headers=(JSON,), **options).body == b""


def answered(salt: str, status: int, *parts: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Any:
    """Return status, headers and body that a client gets when the server answers so."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def server(scope: Any, receive: Any, send: Any) -> None:
        length = (b"Content-Length", str(sum(map(len, parts))).encode())
        await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
        for number, part in enumerate(parts):
            await send({"type": "http.response.body", "body": part, "more_body": number < len(parts) - 1})

    tenant = (tenant_header.HEADER, salt.encode())
    scope = {"type": "http", "path": "/v1/completions", "headers": [JSON, tenant]}
    asyncio.run(TenantHeader(server)(scope, receive, send))
    body = b"".join(message["body"] for message in sent[1:])
    got = {name.lower(): value for name, value in sent[0]["headers"]}
    assert got[b"content-length"] == str(len(body)).encode()
    return sent[0]["status"], got, body


SALT = "s3\"cr\\et-\u00e9-'0123456789"


@pytest.mark.parametrize(
    "detail",
    [
        SALT,
        {"input": {"cache_salt": SALT, "n": 1}},
        repr({"cache_salt": SALT}),
        json.dumps({"cache_salt": SALT}),
        str(json.dumps({"cache_salt": SALT}).encode()),
        "input_value={'prompt': 1, 'cach..." + SALT[-12:] + "'}",
        "input_value={'cache_salt': '" + SALT[:7] + "...ix'}",
    ],
)
@pytest.mark.parametrize("is_ascii", [True, False])
def test_errors_do_not_return_the_salt(detail: Any, is_ascii: bool):
    body = json.dumps({"detail": detail, "code": 7}, ensure_ascii=is_ascii).encode()
    status, _, got = answered(SALT, 400, *(body[start : start + 5] for start in range(0, len(body), 5)))
    assert (status, json.loads(got)["code"], b"***" in got) == (400, 7, True)
    for piece in ("cr", "et-", "0123456789", "-\u00e9"):
        assert piece not in got.decode()


def test_successful_answers_pass_unchanged():
    body = f"data: {SALT}".encode()
    assert answered(SALT, 200, body[:4], body[4:])[2] == body


def test_error_that_cannot_be_read_is_withheld(monkeypatch):
    for options in ({"headers": ((b"Content-Encoding", b"gzip"),)}, {}):
        status, headers, body = answered(SALT, 422, b"x" * 11, **options)
        assert status == 422
        assert b"content-encoding" not in headers
        assert (b"withheld" in body) is bool(options)
    monkeypatch.setattr(tenant_header, "MAX_ERROR_BYTES", 10)
    assert b"withheld" in answered(SALT, 422, b"x" * 6, b"x" * 5)[2]
    assert answered(SALT, 422, b"x" * 6, b"x" * 4)[2] == b"x" * 10
