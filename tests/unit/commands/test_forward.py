"""Local ports that lead to pods, through a stand-in for the API server."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
from kubernetes.aio.client import ApiClient, Configuration
from lmcache_operator.errors import RefusedError, UnavailableError
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.kube.forward import forwarded

from tests.harness.forwarding_api import NAMESPACE, ForwardingApi
from tests.unit.commands.test_pod_http import connected

DATA = bytes({*range(256)} - {ord(".")}) * 4096


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send back what arrives, until "." ends it."""
    while data := await reader.read(1 << 16):
        writer.write(data)
        if data.endswith(b"."):
            break
    writer.close()


async def exchanged(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(-1), 60)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def run(action: Callable[[KubeApi], Awaitable[None]], api: ForwardingApi | None = None) -> None:
    async def main() -> None:
        async with connected((api or ForwardingApi([])).application()) as client:
            await action(client)

    asyncio.run(main())


def test_data_passes_in_both_directions_on_several_connections() -> None:
    async def action(client: KubeApi) -> None:
        pod = await asyncio.start_server(echo, "127.0.0.1", 0)
        async with pod, forwarded(client, NAMESPACE, "p", pod.sockets[0].getsockname()[1]) as port:
            sent = [bytes([number]) + DATA + b"." for number in range(8)]
            assert await asyncio.gather(*(exchanged(port, data) for data in sent)) == sent

    run(action)


def test_closed_port_of_a_pod_closes_the_connection_and_the_local_port_is_closed_afterwards() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = listener.getsockname()[1]

    async def action(client: KubeApi) -> None:
        async with forwarded(client, NAMESPACE, "p", closed) as port:
            assert await exchanged(port, b"GET / HTTP/1.0\r\n\r\n") == b""
        with pytest.raises(OSError, match="Connect"):
            await asyncio.open_connection("127.0.0.1", port)

    run(action)


def test_missing_right_is_known_at_once() -> None:
    api = ForwardingApi([])
    api.is_forbidden = True

    async def action(client: KubeApi) -> None:
        with pytest.raises(RefusedError, match="get and create pods/portforward"):
            async with forwarded(client, NAMESPACE, "p", 1):
                raise AssertionError

    run(action, api)


def test_api_server_that_does_not_listen_is_known_at_once() -> None:
    async def main() -> None:
        async with ApiClient(Configuration(host="http://127.0.0.1:1")) as client:
            with pytest.raises(UnavailableError):
                async with forwarded(KubeApi(client), NAMESPACE, "p", 1):
                    raise AssertionError

    asyncio.run(main())
