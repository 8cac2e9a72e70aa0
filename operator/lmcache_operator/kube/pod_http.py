"""HTTP to a port of a pod, through the API server.

A pod can be reached in two ways. The API server's proxy needs only the right to read, but network policies
may forbid it. A port-forward passes network policies, but needs the right to create one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

import aiohttp

from lmcache_operator.kube.refusals import error_of

if TYPE_CHECKING:  # the client takes half a second to import
    from lmcache_operator.kube.client import KubeApi

_HEAD_START_SECONDS = 1.0
"""Time in which the proxy should answer before the port-forward is tried, too."""
PROTOCOL = "v4.channel.k8s.io"
"""Protocol of port-forwards: the first byte of each message is the number of a channel."""
_DATA, _ERROR = 0, 1
_PORT_BYTES = 2
"""The first message on each channel repeats the port."""
_MAX_BYTES = 8 << 20
_REQUEST = "GET {} HTTP/1.0\r\nHost: localhost\r\nAccept: */*\r\nConnection: close\r\n\r\n"

GET_PROXY, CREATE_FORWARD = "get pods/proxy", "get and create pods/portforward"


class PodAnswer(NamedTuple):
    """The answer of a port of a pod."""

    status: int
    """HTTP status; 0: no answer, and ``body`` has the reason."""
    body: bytes
    missing_right: str = ""
    """Right that the user would need, such as "get pods/proxy"; empty: none is missing."""


class PodHttp:
    """Reads HTTP pages of pods. Each read ends in time, whatever the pod does."""

    def __init__(
        self, api: KubeApi, *, seconds: float = 5.0, head_start: float = _HEAD_START_SECONDS
    ) -> None:
        """``seconds``: limit of one read. ``head_start``: seconds of it before the port-forward begins."""
        self._api, self._seconds, self._head_start = api, seconds, head_start

    async def get(self, namespace: str, pod: str, port: int, path: str) -> PodAnswer:
        """Read a page. The first way that answers wins. ``path`` includes the query and begins with "/"."""
        pods = f"/api/v1/namespaces/{namespace}/pods/{pod}"
        proxy = asyncio.create_task(self._by_proxy(f"{pods}:{port}/proxy{path}"))
        forward: asyncio.Task[PodAnswer] | None = None
        try:
            async with asyncio.timeout(self._seconds):
                done, _ = await asyncio.wait((proxy,), timeout=self._head_start)
                if done and proxy.result().status:
                    return proxy.result()
                forward = asyncio.create_task(self._by_forward(f"{pods}/portforward?ports={port}", path))
                return await _first_answer(proxy, forward)
        except TimeoutError:
            known = [task.result() for task in (forward, proxy) if task and task.done()]
            right = next((answer.missing_right for answer in known if answer.missing_right), "")
            return PodAnswer(0, f"no answer within {self._seconds:g} s".encode(), right)
        finally:
            for task in (proxy, forward):
                if task:
                    task.cancel()

    async def _by_proxy(self, path: str) -> PodAnswer:
        status, body = await self._api.read(path, seconds=self._seconds, max_bytes=_MAX_BYTES)
        if status == HTTPStatus.FORBIDDEN and _is_of_api_server(body):
            return PodAnswer(0, _reason(path, status, body), GET_PROXY)
        if status >= HTTPStatus.BAD_REQUEST and _is_of_api_server(body):
            return PodAnswer(0, _reason(path, status, body))  # the API server did not reach the pod
        if status == HTTPStatus.UNAUTHORIZED:  # the proxy passes no token on; a sidecar trusts a port-forward
            return PodAnswer(0, b"the pod answers the API server's proxy with HTTP 401", CREATE_FORWARD)
        return PodAnswer(status, body)

    async def _by_forward(self, forward: str, path: str) -> PodAnswer:
        try:
            async with self._api.web_socket(forward, PROTOCOL, seconds=self._seconds) as socket:
                await socket.send_bytes(bytes((_DATA,)) + _REQUEST.format(path).encode())
                return _parsed(await _received(socket))
        except aiohttp.WSServerHandshakeError as error:
            right = CREATE_FORWARD if error.status == HTTPStatus.FORBIDDEN else ""
            return PodAnswer(0, f"port-forward: HTTP {error.status}".encode(), right)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return PodAnswer(0, f"port-forward: {str(error) or type(error).__name__}".encode())


async def channel_data(socket: aiohttp.ClientWebSocketResponse) -> AsyncIterator[bytes]:
    """Yield what a port-forward's port sends, to its end. Raises OSError with the kubelet's error."""
    is_first = {_DATA: True, _ERROR: True}
    async for message in socket:
        if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
            continue
        channel, data = message.data[0], message.data[1:]
        if is_first.get(channel):
            is_first[channel] = False
            data = data[_PORT_BYTES:]
        if channel == _ERROR and data:
            raise OSError(data.decode(errors="replace").strip())
        if channel == _DATA and data:
            yield data


async def _received(socket: aiohttp.ClientWebSocketResponse) -> bytes:
    """Read an answer to its end. Raises OSError."""
    received = bytearray()
    async for data in channel_data(socket):
        received += data
        if len(received) > _MAX_BYTES:
            raise OSError(f"the answer is larger than {_MAX_BYTES >> 20} MiB")
        if _is_complete(received):
            break
    return bytes(received)


def _is_complete(received: bytearray) -> bool:
    """Return True if all bytes that the header announces have arrived: some servers keep connections open."""
    header, separator, body = received.partition(b"\r\n\r\n")
    for line in header.lower().split(b"\r\n") if separator else ():
        name, _, value = line.partition(b":")
        if name == b"content-length" and value.strip().isdigit():
            return len(body) >= int(value)
    return False


def _parsed(response: bytes) -> PodAnswer:
    header, _, body = response.partition(b"\r\n\r\n")
    words = header.split(b"\r\n", 1)[0].split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        raise ValueError("no HTTP server listens on the port")
    return PodAnswer(int(words[1]), body)


async def _first_answer(*tasks: asyncio.Task[PodAnswer]) -> PodAnswer:
    """Return the first answer of a pod, or, if there is none, why not."""
    for finished in asyncio.as_completed(tasks):
        answer = await finished
        if answer.status:
            return answer
    failures = [task.result() for task in tasks]
    right = next((failure.missing_right for failure in failures if failure.missing_right), "")
    return PodAnswer(0, b"; ".join(failure.body for failure in failures), right)


def _is_of_api_server(body: bytes) -> bool:
    return body.lstrip().startswith(b'{"kind":"Status"') or b"error trying to reach service" in body


def _reason(path: str, status: int, body: bytes) -> bytes:
    return error_of(path, status, body).message.encode()


Get = Callable[[str, str, int, str], Awaitable[PodAnswer]]
"""The type of ``PodHttp.get``, for what needs no other part of it."""
