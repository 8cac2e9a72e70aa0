"""Requests to the API server, and handling of its responses."""

import asyncio
import gc
import json
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from hypothesis import example, given
from hypothesis import strategies as st
from kubernetes.aio.client import ApiClient, Configuration
from multidict import CIMultiDict

from lmcache_operator.errors import ApiError, NoAnswerError, RefusedError, UnavailableError
from lmcache_operator.kube import client as kube_client
from lmcache_operator.kube.client import KubeApi, connect
from lmcache_operator.kube.fence import WriteFence
from lmcache_operator.kube.patches import apply_patch
from lmcache_operator.kube.refusals import error_of
from lmcache_operator.specs.kinds import POD
from tests.harness.operator.model import cluster
from tests.harness.web import answering

# -- errors and requests


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (0, NoAnswerError),
        *((status, UnavailableError) for status in (408, 409, 410, 429, 500, 503)),
        *((status, RefusedError) for status in (400, 401, 403, 404, 422)),
    ],
)
def test_error_of_maps_status_codes_to_errors(status: int, kind: type[Exception]) -> None:
    error = error_of("PATCH /x", status, b'{"message": "why", "reason": "Something"}')
    assert type(error) is kind
    assert (error.message, str(error)) == ("why", "PATCH /x: why")


def test_schema_violation_raises_refused_error() -> None:
    """The body is a real response of server-side apply."""
    message = "failed to create typed patch object: .spec.nodeSelectr: field not declared in schema"
    body = {"kind": "Status", "metadata": {}, "status": "Failure", "message": message, "code": 500}
    assert type(error_of("PATCH /x", 500, json.dumps(body).encode())) is RefusedError


@pytest.mark.parametrize(("body", "message"), [(b"", "HTTP 502"), (b"<html>", "<html>"), (b"[]", "[]")])
def test_error_without_status_object_has_a_message(body: bytes, message: str) -> None:
    assert error_of("GET /x", 502, body).message == message


class Server:
    """An HTTP server that records each request and returns the configured answer."""

    def __init__(self) -> None:
        self.answer: tuple[int, Any] = (200, {})
        self.warnings: list[str] = []
        self.requests: list[tuple[str, str, str, Any]] = []
        self.is_open, self.has_request, self.num_answered = asyncio.Event(), asyncio.Event(), 0
        self.is_open.set()

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.text()
        self.requests.append((request.method, request.path_qs, request.content_type, body))
        self.has_request.set()
        await self.is_open.wait()
        self.num_answered += 1
        status, answer = self.answer
        headers = CIMultiDict(("Warning", warning) for warning in self.warnings)
        return web.json_response(answer, status=status, headers=headers)


def call(server: Server, method: str, *arguments: Any, is_down: bool = False, **options: Any) -> Any:
    """Answer of a call. ``is_down``: nothing listens. ``fence``: that of the client."""

    async def run() -> Any:
        async with AsyncExitStack() as stack:
            url = await stack.enter_async_context(answering(server.handle))
            if is_down:
                await stack.aclose()
            client = await stack.enter_async_context(ApiClient(Configuration(host=url)))
            api = KubeApi(client, *([options.pop("fence")] if "fence" in options else []))
            return await getattr(api, method)(*arguments, **options)

    return asyncio.run(run())


@pytest.fixture
def server() -> Server:
    return Server()


CORE = "/api/v1/namespaces/n"
FORCE = "?fieldManager=lmcache-operator&force=true"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
SERVICE: dict[str, Any] = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a", "namespace": "n"}}


@pytest.mark.parametrize(
    ("method", "arguments", "answer", "expected", "request_line"),
    [
        ("get", (POD, "n", "p"), (404, {}), None, f"GET {CORE}/pods/p"),
        ("get", (POD, "n", "p"), (404, "page not found"), None, f"GET {CORE}/pods/p"),
        ("serves", (POD,), (200, {"resources": [{"name": "pods"}]}), True, "GET /api/v1"),
        ("serves", (POD,), (200, {"resources": [{"name": "pods/log"}]}), False, "GET /api/v1"),
        ("serves", (POD,), (404, "page not found"), False, "GET /api/v1"),
        ("is_ending", ("n",), (200, {"metadata": {"deletionTimestamp": "t"}}), True, f"GET {CORE}"),
        ("is_ending", ("n",), (403, {}), False, "GET /api/v1/namespaces/n"),
        ("apply_status", (SERVICE,), (404, {}), None, f"PATCH {CORE}/services/a/status{FORCE}"),
        ("delete", (POD, "n", "p", "u"), (404, {}), False, f"DELETE {CORE}/pods/p"),
        ("delete", (POD, "n", "p", "u"), (409, {}), False, f"DELETE {CORE}/pods/p"),
        ("evict", ("n", "p", "u"), (429, {}), False, f"POST {CORE}/pods/p/eviction"),
        ("evict", ("n", "p", "u"), (404, {}), False, f"POST {CORE}/pods/p/eviction"),
        ("evict", ("n", "p", "u"), (409, {}), False, f"POST {CORE}/pods/p/eviction"),
    ],
)  # fmt: skip
def test_call_reads_unusual_answers(server, method, arguments, answer, expected, request_line):
    """Tests with a control plane get the usual answers, but none ends a namespace."""
    server.answer = answer
    assert call(server, method, *arguments) == expected
    ((verb, path, content_type, _),) = server.requests
    assert f"{verb} {path}" == request_line
    assert content_type == ("application/apply-patch+yaml" if verb == "PATCH" else "application/json")


def test_apply_changes_only_the_observed_object(server: Server) -> None:
    for uid, condition in (("u", {"uid": "u"}), (None, {"resourceVersion": "1"})):
        server.requests.clear()
        call(server, "apply", SERVICE, uid)
        ((_, _, _, body),) = server.requests
        assert json.loads(body)["metadata"] == SERVICE["metadata"] | condition


def test_repeated_event_increments_its_count(server: Server) -> None:
    events, paths = [], set()
    for day, before in enumerate(({}, {"count": 2, "firstTimestamp": "2025-12-31T00:00:00Z"})):
        server.answer = (200, before)
        call(server, "post_event", cluster(), "Normal", "Ready", "yes", NOW + timedelta(day))
        (_, path, *_), (*_, body) = server.requests[-2:]
        event = json.loads(body)
        events.append((event["count"], event["firstTimestamp"], event["lastTimestamp"]))
        paths.add(path)
    assert events == [
        (1, "2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z"),
        (3, "2025-12-31T00:00:00Z", "2026-01-02T00:00:00Z"),
    ]
    assert paths == {f"/api/v1/namespaces/team/events/{event['metadata']['name']}"}


@pytest.mark.parametrize("sizes", [[], [10] * 250, [10] * 90 + [3000] * 30, [30_000, 10, 30_000, 10]])
def test_list_has_all_objects_and_no_large_page(sizes, monkeypatch):
    """The API server returns the next objects from the number in ``continue``. Texts stand for objects."""
    monkeypatch.setattr(kube_client, "_PAGE_BYTES", 10_000)
    objects = ["x" * size for size in sizes]
    parts: list[int] = []

    def part(listed: Any) -> Any:
        parts.append(len(listed))
        return {"size": len(listed)}

    async def handle(request: web.Request) -> web.Response:
        place, limit = int(request.query.get("continue", 0)), int(request.query["limit"])
        assert request.query["labelSelector"] == "a=b"
        following = place + limit
        more = {"continue": str(following)} if following < len(objects) else {}
        return web.json_response({"metadata": more, "items": objects[place:following]})

    async def find() -> list[Any]:
        async with answering(handle) as url, ApiClient(Configuration(host=url)) as client:
            return await KubeApi(client).find(POD, "n", part, labelSelector="a=b")

    assert asyncio.run(find()) == [{"size": size} for size in sizes]
    assert parts == sizes, "each object is reduced once"


@pytest.mark.parametrize("part", [dict, None])
@pytest.mark.parametrize(("bound", "value"), [("_LIST_SECONDS", 0.0), ("_PART_BYTES", 1000)])
def test_list_ends_at_a_bound_of_time_and_of_memory(bound, value, part, monkeypatch):
    """A run that never ends fails the liveness probe of the operator, which serves other namespaces."""
    monkeypatch.setattr(kube_client, bound, value)
    num_pages = 0

    async def handle(request: web.Request) -> web.Response:
        nonlocal num_pages
        num_pages += 1
        more = {"continue": "more"} if num_pages < 20 else {}
        return web.json_response({"metadata": more, "items": [{"spec": "x" * 300}]})

    async def find() -> None:
        async with answering(handle) as url, ApiClient(Configuration(host=url)) as client:
            await KubeApi(client).find(POD, "n", part, labelSelector="a=b")

    with pytest.raises(UnavailableError, match="list pods of namespace n: its objects are too many"):
        asyncio.run(find())
    assert num_pages < 5


def test_delete_removes_only_the_observed_object(server: Server) -> None:
    call(server, "delete", POD, "n", "p", "u")
    call(server, "delete", POD, "n", "p", "u", grace_seconds=0)
    (_, _, _, body), (_, _, _, forced) = server.requests
    assert json.loads(body)["preconditions"] == json.loads(forced)["preconditions"] == {"uid": "u"}
    assert "gracePeriodSeconds" not in json.loads(body)
    assert json.loads(forced)["gracePeriodSeconds"] == 0


def test_question_returns_status_body_and_warnings(server: Server) -> None:
    server.answer, server.warnings = (403, {"message": "no"}), ['299 - "level \\"baseline\\""', "odd"]
    status, body, warnings = call(server, "ask", f"{CORE}/pods?dryRun=All", {"kind": "Pod"}, seconds=60.0)
    assert (status, json.loads(body), warnings) == (403, {"message": "no"}, ['level "baseline"', ""])
    assert [request[:3] for request in server.requests] == [
        ("POST", f"{CORE}/pods?dryRun=All", "application/json")
    ]
    status, body, warnings = call(server, "ask", CORE, {}, seconds=60.0, is_down=True)
    assert (status, warnings) == (0, [])
    assert body.startswith(b"no answer")


def test_question_that_waits_for_a_connection_ends_with_the_client(server: Server) -> None:
    """A request that outlives its client prints a traceback."""

    async def run() -> list[str]:
        problems: list[str] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: problems.append(context["message"]))
        server.is_open.clear()
        async with answering(server.handle) as url:
            async with ApiClient(Configuration(host=url)) as client:
                api = KubeApi(client)
                answers = await asyncio.gather(*(api.ask(CORE, {}, seconds=0.5) for _ in range(70)))
            server.is_open.set()
        assert {status for status, *_ in answers} == {0}
        gc.collect()
        return problems

    assert asyncio.run(run()) == []


def test_date_is_that_of_the_server_or_empty(server: Server) -> None:
    date = parsedate_to_datetime(call(server, "date", seconds=60.0))
    assert abs((datetime.now(UTC) - date).total_seconds()) < 600
    assert call(server, "date", seconds=60.0, is_down=True) == ""


# -- the fence

RUNNING: Any = {"metadata": {"name": "p", "namespace": "n", "uid": "u"}}
WRITES: list[tuple[str, tuple[Any, ...]]] = [
    ("apply", (SERVICE, "u")),
    ("apply_status", (cluster(),)),
    ("create", (POD, SERVICE)),
    ("replace", (POD, SERVICE)),
    ("delete", (POD, "n", "p", "u")),
    ("evict", ("n", "p", "u")),
    ("annotate", (RUNNING, {"a": "b"})),
    ("resize", (RUNNING, "sidecar", {"limits": {"memory": "1Gi"}})),
    ("post_event", (cluster(), "Normal", "Ready", "yes", NOW)),
]


class Fence(WriteFence):
    """A fence with the same seconds left for each URL."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.renewed = seconds, ""

    async def renew(self, url: str) -> None:
        self.renewed = url

    def seconds_left(self, url: str) -> float:
        return self.seconds if url == self.renewed else 0.0


@pytest.mark.parametrize(("method", "arguments"), WRITES)
def test_write_is_refused_without_enough_time_for_the_answer(server, method, arguments):
    with pytest.raises(NoAnswerError, match="does not lead"):
        call(server, method, *arguments, fence=Fence(4.9))
    assert [verb for verb, *_ in server.requests if verb != "GET"] == []
    call(server, method, *arguments, fence=Fence(5.1))
    number = 2 if method == "resize" else 1  # the first is a dry run
    bodies = [body for verb, *_, body in server.requests if verb != "GET"]
    assert len(bodies) == number
    assert all(bodies), "the fence is checked again when the body is written"


def test_every_writing_call_is_fenced() -> None:
    reads = {"server", "get", "find", "is_ending", "read", "serves", "settle", "web_socket", "date", "ask"}
    calls = {name for name in vars(KubeApi) if not name.startswith("_")}
    assert calls == reads | {name for name, _ in WRITES}


def test_read_needs_no_leadership(server: Server) -> None:
    assert call(server, "get", POD, "n", "p", fence=Fence(0.0)) == {}


def test_fence_is_checked_again_when_the_request_is_written(server, monkeypatch):
    """The process freezes once it is connected. Its right to write has expired when it thaws."""
    fence, send = Fence(10.0), aiohttp.ClientRequest.send

    async def freeze_after_send(request: aiohttp.ClientRequest, connection: Any) -> aiohttp.ClientResponse:
        response = await send(request, connection)
        fence.seconds = 0.0
        return response

    async def write() -> None:
        async with answering(server.handle) as url:

            async def configured(context: str | None) -> Configuration:
                return Configuration(host=url)

            monkeypatch.setattr(kube_client, "configuration", configured)
            async with connect(fence) as api:
                await api.apply(SERVICE, "u")

    monkeypatch.setattr(aiohttp.ClientRequest, "send", freeze_after_send)
    with pytest.raises(NoAnswerError, match="does not lead"):
        asyncio.run(write())
    assert server.requests == []


def test_refusal_after_the_caller_was_cancelled_is_no_error_of_asyncio(server, caplog):
    """Python would log that no task retrieved the exception of the write."""
    is_asked, may_answer = asyncio.Event(), asyncio.Event()

    class Refusing(WriteFence):
        async def renew(self, url: str) -> None:
            is_asked.set()
            await may_answer.wait()
            raise ApiError(url, "forbidden")

    async def write() -> None:
        async with ApiClient(Configuration(host="http://127.0.0.1:1")) as client:
            api = KubeApi(client, Refusing())
            caller = asyncio.create_task(api.apply(SERVICE, "u"))
            await is_asked.wait()
            caller.cancel()
            await asyncio.gather(caller, return_exceptions=True)
            may_answer.set()
            await api.settle()
        del api, caller
        gc.collect()

    asyncio.run(write())
    assert "never retrieved" not in caplog.text


def test_settle_waits_for_writes_of_cancelled_callers(server: Server) -> None:
    async def write() -> None:
        server.is_open.clear()
        async with answering(server.handle) as url, ApiClient(Configuration(host=url)) as client:
            api = KubeApi(client)
            caller = asyncio.create_task(api.apply(SERVICE, "u"))
            async with asyncio.timeout(60):
                await server.has_request.wait()
                caller.cancel()
                await asyncio.gather(caller, return_exceptions=True)
                settling = asyncio.create_task(api.settle())
                for _ in range(10):
                    await asyncio.sleep(0)
                assert not settling.done()
                server.is_open.set()
                await settling
        assert server.num_answered == 1

    asyncio.run(write())


@given(st.text())
@example("a model \U0001f999")
@example("next line\x85, line separator\u2028, delete\x7f, byte order mark\ufeff")
def test_apply_patch_preserves_text_for_a_yaml_reader(text: str) -> None:
    assert yaml.safe_load(apply_patch({"key": text})) == {"key": text}
