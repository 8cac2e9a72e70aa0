"""Pages of pods, through a stand-in for the API server with the faults of real ones."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from lmcache_operator.kube.client import KubeApi, connect
from lmcache_operator.kube.pod_http import CREATE_FORWARD, GET_PROXY, PodAnswer, PodHttp
from tests.harness.web import Handler, served
from tests.unit.commands.test_connection import lead_to

PAGE = b'{"is_ready": true}'
POD = "/api/v1/namespaces/n/pods/p"


def refusal(status: int, message: str) -> web.Response:
    """Return an error of the API server itself."""
    body = {"kind": "Status", "status": "Failure", "message": message, "reason": "Because", "code": status}
    return web.Response(status=status, body=json.dumps(body, separators=(",", ":")))


async def page(_: web.Request) -> web.StreamResponse:
    return web.Response(body=PAGE)


async def forbidden(_: web.Request) -> web.StreamResponse:
    return refusal(403, 'pods "p" is forbidden: User "u" cannot get resource "pods/proxy"')


async def without_token(_: web.Request) -> web.StreamResponse:
    """A sidecar that asks for a token: the proxy removes that of the user."""
    return web.Response(status=401, body=b"401 Unauthorized: this page needs a token")


async def unreachable(_: web.Request) -> web.StreamResponse:
    return refusal(503, "error trying to reach service: dial tcp 10.0.0.1:9464: i/o timeout")


async def hanging(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


def forward(*frames: bytes) -> Handler:
    """Return a port-forward that reads the request, and then sends these frames."""

    async def handle(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        await socket.send_bytes(b"\x00\xf8\x24")  # both channels begin with the port
        await socket.send_bytes(b"\x01\xf8\x24")
        sent = (await socket.receive_bytes())[1:].decode()
        assert sent.startswith("GET /stats HTTP/1.0\r\n")
        assert sent.endswith("\r\n\r\n")
        for frame in frames:
            await socket.send_bytes(frame)
        if frames:
            await socket.close()
        else:
            await asyncio.Event().wait()
        return socket

    return handle


ANSWER = b"\x00HTTP/1.0 200 OK\r\nContent-Length: 18\r\n\r\n"


async def get(
    proxy: Handler, forwarded: Handler, *, seconds: float = 5.0, head_start: float = 0.0
) -> PodAnswer:
    application = web.Application()
    application.router.add_get(f"{POD}:9464/proxy/stats", proxy)
    application.router.add_get(f"{POD}/portforward", forwarded)
    async with connected(application) as client:
        return await PodHttp(client, seconds=seconds, head_start=head_start).get("n", "p", 9464, "/stats")


@asynccontextmanager
async def connected(application: web.Application) -> AsyncIterator[KubeApi]:
    """Serve an application, and connect to it."""
    async with (
        served(application) as port,
        ApiClient(Configuration(host=f"http://127.0.0.1:{port}")) as client,
    ):
        yield KubeApi(client)


def test_proxy_answers_without_a_port_forward() -> None:
    assert asyncio.run(get(page, forbidden, head_start=5.0)) == PodAnswer(200, PAGE)


@pytest.mark.parametrize("proxy", [forbidden, unreachable, hanging, without_token])
@pytest.mark.parametrize(
    "frames",
    [
        (ANSWER + PAGE,),
        (ANSWER, b"\x00" + PAGE[:5], b"\x00" + PAGE[5:]),
        (b"\x00HTTP/1.1 200 OK\r\n\r\n" + PAGE,),
    ],
)
def test_port_forward_answers_if_the_proxy_does_not(proxy: Handler, frames: tuple[bytes, ...]) -> None:
    assert asyncio.run(get(proxy, forward(*frames))) == PodAnswer(200, PAGE)


def test_error_of_the_page_itself_is_an_answer() -> None:
    async def busy(_: web.Request) -> web.StreamResponse:
        return web.Response(status=503, body=b"not ready")

    assert asyncio.run(get(busy, hanging, head_start=5.0)) == PodAnswer(503, b"not ready")


@pytest.mark.parametrize("frames", [(), (ANSWER,)])
def test_hanging_pod_ends_in_time(frames: tuple[bytes, ...]) -> None:
    answer = asyncio.run(get(hanging, hanging if not frames else forward(), seconds=0.3))
    assert answer == PodAnswer(0, b"no answer within 0.3 s")


def test_missing_rights_are_named() -> None:
    for proxy, forwarded, missing in (
        (forbidden, forbidden, GET_PROXY),
        (forbidden, hanging, GET_PROXY),
        (without_token, forbidden, CREATE_FORWARD),
        (unreachable, forbidden, CREATE_FORWARD),
    ):
        answer = asyncio.run(get(proxy, forwarded, seconds=2.0))
        assert (answer.status, answer.missing_right) == (0, missing)
    assert b"error trying to reach service" in answer.body


async def endless(_: web.Request) -> web.StreamResponse:
    return web.Response(body=bytes(9 << 20))


ENDLESS = (b"\x00HTTP/1.0 200 OK\r\n\r\n", *[b"\x00" + bytes(1 << 20)] * 9)


@pytest.mark.parametrize(
    ("proxy", "forwarded", "reason"),
    [
        (unreachable, forward(b"\x01an error occurred: connection refused"), b"connection refused"),
        (unreachable, forward(b"\x00SSH-2.0-OpenSSH\r\n\r\n"), b"no HTTP server"),
        (unreachable, forward(b"\x00"), b"no HTTP server"),
        (unreachable, forward(b"", b"\x05x", b"\x00\r\n\r\n"), b"no HTTP server"),
        (unreachable, forward(b"\x00HTTP/1.0 twohundred OK\r\n\r\n"), b"no HTTP server"),
        (unreachable, forward(*ENDLESS), b"larger than 8 MiB"),
        (endless, forbidden, b"larger than 8 MiB"),
    ],
)
def test_broken_or_endless_answer_is_an_error(proxy: Handler, forwarded: Handler, reason: bytes) -> None:
    answer = asyncio.run(get(proxy, forwarded))
    assert answer.status == 0
    assert reason in answer.body


def test_unreachable_api_server_is_an_error() -> None:
    async def run() -> PodAnswer:
        async with ApiClient(Configuration(host="http://127.0.0.1:1")) as client:
            return await PodHttp(KubeApi(client), head_start=0.0).get("n", "p", 9464, "/stats")

    answer = asyncio.run(run())
    assert answer.status == 0
    assert b"127.0.0.1:1" in answer.body


def test_pods_cannot_redirect_a_command() -> None:
    """A redirect would make the user's machine send requests with the user's rights."""
    followed = []

    async def redirect(_: web.Request) -> web.StreamResponse:
        raise web.HTTPFound(f"{POD}/portforward")

    async def other(request: web.Request) -> web.StreamResponse:
        followed.append(request.path)
        return web.Response(body=PAGE)

    answer = asyncio.run(get(redirect, other, head_start=5.0))
    assert (answer.status, followed) == (302, [])


def test_pods_cannot_set_cookies_for_other_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cookies = []

    async def page_with_cookie(request: web.Request) -> web.StreamResponse:
        cookies.append(dict(request.cookies))
        answer = web.Response(body=PAGE)
        answer.set_cookie("session", "of another pod", path="/")
        return answer

    async def read_twice() -> None:
        application = web.Application()
        application.router.add_get(f"{POD}:9464/proxy/stats", page_with_cookie)
        async with served(application) as port:
            lead_to(tmp_path / "config", f"http://localhost:{port}")
            async with connect() as client:
                for _ in range(2):
                    await PodHttp(client, head_start=5.0).get("n", "p", 9464, "/stats")

    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    asyncio.run(read_twice())
    assert cookies == [{}, {}]
