"""Forwards a local port to a port of a pod, as ``kubectl port-forward`` does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

import aiohttp

from lmcache_operator.errors import RefusedError, UnavailableError
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.kube.pod_http import CREATE_FORWARD, PROTOCOL, channel_data

_SECONDS = 10.0
"""Limit for opening one connection."""
_PART_BYTES = 64 << 10
_DATA = b"\x00"


@asynccontextmanager
async def forwarded(api: KubeApi, namespace: str, pod: str, port: int) -> AsyncIterator[int]:
    """Listen on a local port while the context is open, and return the port.

    Raises:
        RefusedError: the user may not create port-forwards.
        UnavailableError: the API server does not reach the pod's node.
    """
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/portforward?ports={port}"
    await _check(api, path)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with api.web_socket(path, PROTOCOL, seconds=_SECONDS) as socket:
                sending = asyncio.create_task(_send(reader, socket))
                try:
                    async for data in channel_data(socket):
                        writer.write(data)
                        await writer.drain()
                finally:
                    sending.cancel()
        except (aiohttp.ClientError, OSError):
            pass  # the client sees a closed connection
        finally:
            writer.close()

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()


async def _check(api: KubeApi, path: str) -> None:
    """Open one connection, so that a missing right is known before the first request."""
    try:
        async with api.web_socket(path, PROTOCOL, seconds=_SECONDS):
            pass
    except aiohttp.WSServerHandshakeError as error:
        if error.status == HTTPStatus.FORBIDDEN:
            raise RefusedError("port-forward", f'your user needs the right "{CREATE_FORWARD}"') from error
        raise UnavailableError("port-forward", f"HTTP {error.status}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise UnavailableError("port-forward", str(error) or type(error).__name__) from error


async def _send(reader: asyncio.StreamReader, socket: aiohttp.ClientWebSocketResponse) -> None:
    """Send what the local client sends. If the client closes the connection, close the web socket, too."""
    with contextlib.suppress(aiohttp.ClientError, OSError):
        while data := await reader.read(_PART_BYTES):
            await socket.send_bytes(_DATA + data)
    await socket.close()
