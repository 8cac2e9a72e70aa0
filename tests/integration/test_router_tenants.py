"""vLLM's router and the header of a tenant: where it passes the header on, and where it does not."""

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from testing.router import RouterProcess
from tests.harness.commands.json_server import JsonHandler, serving

pytestmark = pytest.mark.vllm

SALT = "salt-of-the-gateway"
KEY = "Bearer key-of-the-engines"
NO_KEYS = (None, "Bearer ")
COMPLETION = ("/v1/completions", {"prompt": "hi", "max_tokens": 1})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
LOSING_PATHS = ("/v1/responses", "/invocations", "/v1/messages", "/v1/chat/completions/batch", "/v1/unknown")
START_SECONDS = 300.0


class Received(NamedTuple):
    """A request as an engine received it."""

    path: str
    header: str | None
    salt: str | None
    key: str | None
    params: Any = None


class Recorder(JsonHandler):
    """The answers of an engine, which records the tenants of the requests."""

    protocol_version = "HTTP/1.1"
    received: list[Received]

    def do_GET(self) -> None:
        self.answer({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    def do_POST(self) -> None:
        body = self.body()
        tenant, key = self.headers["X-LMCache-Tenant"], self.headers["Authorization"]
        params = body.get("kv_transfer_params")
        self.received.append(Received(self.path, tenant, body.get("cache_salt"), key, params))
        choice = {"index": 0, "text": "x", "message": {"role": "assistant", "content": "x"}}
        self.answer({"id": "1", "object": "text_completion", "model": "tiny", "choices": [choice]})


class Routed(NamedTuple):
    """A router in front of two engines that record requests."""

    url: str
    received: list[Received]

    def post(self, path: str, body: dict[str, Any], arrives_as: str = "") -> list[Received]:
        """Send a request with a tenant's header and another salt, and return what the engines received."""
        self.received.clear()
        headers = {"Content-Type": "application/json", "X-LMCache-Tenant": SALT, "Authorization": KEY}
        data = json.dumps({"model": "tiny", "cache_salt": "salt-of-the-client", **body}).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
        return [request for request in self.received if request.path in (path, arrives_as)]


@contextlib.contextmanager
def routed(*arguments: str, has_prefill: bool = False) -> Iterator[Routed]:
    received: list[Received] = []
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(serving(Recorder, received=received)) for _ in range(2)]
        urls = [f"http://127.0.0.1:{engine.server_port}" for engine in engines]
        pools = ("--vllm-pd-disaggregation", "--prefill", urls[0], "--decode", urls[1])
        router = RouterProcess(() if has_prefill else urls, *(pools if has_prefill else ()), *arguments)
        stack.enter_context(contextlib.closing(router))
        router.start(timeout=START_SECONDS)
        yield Routed(router.url, received)


@pytest.fixture(scope="module")
def cache_aware() -> Iterator[Routed]:
    with routed("--policy=cache_aware") as router:
        yield router


@pytest.fixture(scope="module")
def with_prefill() -> Iterator[Routed]:
    with routed("--policy=cache_aware", has_prefill=True) as router:
        yield router


def assert_header_is_passed_on(router: Routed) -> None:
    for path, body in (COMPLETION, CHAT):
        for streams in (False, True):
            received = router.post(path, {**body, "stream": streams})
            assert [(request.header, request.key) for request in received] == [(SALT, KEY)], path


def test_router_passes_the_header_on_with_completions_and_chats(cache_aware: Routed) -> None:
    assert_header_is_passed_on(cache_aware)


@pytest.mark.parametrize("policy", ["power_of_two", "consistent_hash"])
def test_router_with_another_policy_passes_the_header_on(policy: str) -> None:
    with routed(f"--policy={policy}") as router:
        assert_header_is_passed_on(router)


def test_router_loses_the_header_at_other_paths_but_not_the_salt_in_the_body(cache_aware: Routed) -> None:
    """Engines refuse these requests. If this fails, correct `RoutedTenantHeader` and the guide on tenants."""
    for path in LOSING_PATHS:
        received = cache_aware.post(path, {"input": "hi"})
        assert received == [Received(path, None, "salt-of-the-client", None)]


def test_router_loses_the_header_at_other_spellings_of_a_path(cache_aware: Routed) -> None:
    """An engine that decodes the path can't distinguish them from a request whose header was never set."""
    encoded = "/v1/%63ompletions"
    assert cache_aware.post(encoded, COMPLETION[1]) == [Received(encoded, None, "salt-of-the-client", None)]
    (normalized,) = cache_aware.post("/x/../v1/completions", COMPLETION[1], arrives_as="/v1/completions")
    assert normalized == Received("/v1/completions", None, "salt-of-the-client", None)


def test_each_client_of_the_router_can_add_a_server_that_gets_requests() -> None:
    """The guides say that a gateway must forward completions only. If this fails, correct the guides."""
    stolen: list[Received] = []
    with routed("--policy=round_robin") as router, serving(Recorder, received=stolen) as thief:
        assert_header_is_passed_on(router)
        url = f"http://127.0.0.1:{thief.server_port}"
        added = urllib.request.Request(f"{router.url}/add_worker?url={url}", b"", method="POST")
        with urllib.request.urlopen(added, timeout=60) as answer:
            answer.read()
        for _ in range(3):
            router.post(*COMPLETION)
    assert Received("/v1/completions", SALT, "salt-of-the-client", KEY) in stolen


@pytest.mark.parametrize("request_", [COMPLETION, CHAT], ids=["completion", "chat"])
def test_router_with_prefill_pods_loses_the_header_but_not_the_salt(
    with_prefill: Routed, request_: tuple[str, Any]
) -> None:
    """The guide on tenants says so. If this fails, the router passes the header on: correct the guide."""
    received = with_prefill.post(*request_)
    assert [request[:3] for request in received] == [(request_[0], None, "salt-of-the-client")] * 2
    assert all(request.key in NO_KEYS for request in received)


@pytest.mark.parametrize("request_", [COMPLETION, CHAT], ids=["completion", "chat"])
def test_router_sends_no_marks_of_blended_prompts_to_prefill_pods(
    cache_aware: Routed, with_prefill: Routed, request_: tuple[str, Any]
) -> None:
    """Prefill pods thus compute them in full. If this fails, admit engine.blend with engine.prefill."""
    path, body = request_
    marks = {"lmcache": {"blend": {"documents": [1]}}}
    marked = body | {"kv_transfer_params": marks}
    assert [request.params for request in cache_aware.post(path, marked)] == [marks]
    computed, _ = with_prefill.post(path, marked)
    assert computed.params["do_remote_decode"] is True
    assert "lmcache" not in computed.params
