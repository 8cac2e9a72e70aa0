"""Any bytes of a client of the sidecar's HTTP server get one well-formed answer, and never an internal error.

Input: the bytes that the client sends before it closes its side.
"""

import asyncio
import contextlib
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lmcache_sidecar.config import Config, ConfigReading
from lmcache_sidecar.daemon import Daemon
from lmcache_sidecar.pages.http import HttpServer
from tests.fuzz.target import Target

ANSWER = re.compile(rb"HTTP/1\.1 ([0-9]{3}) [^\r\n]+\r\n(?:[A-Za-z-]+: [^\r\n]*\r\n)+\r\n", re.DOTALL)


@contextlib.contextmanager
def opened() -> Iterator[tuple[asyncio.Runner, int]]:
    with tempfile.TemporaryDirectory(prefix="lmc-fuzz-") as folder, asyncio.Runner() as runner:
        config = Config(socket=str(Path(folder) / "s"), memory_size=4 << 20, transfer="SharedMemory")
        daemon, server, port = runner.run(start(config))
        try:
            yield runner, port
        finally:
            runner.run(server.stop())
            runner.run(daemon.stop())


async def start(config: Config) -> tuple[Daemon, HttpServer, int]:
    """Start a sidecar and a server of its pages. Returns the server's port."""
    daemon = Daemon(ConfigReading(config))
    await daemon._start_sidecar(config)
    server = HttpServer(daemon._pages)
    return daemon, server, server.start("127.0.0.1", 0)


async def exchange(port: int, request: bytes) -> bytes:
    """Send the bytes, and return the whole answer."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port))
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(client, request)
            client.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := await loop.sock_recv(client, 1 << 16):
            answer += piece
        return answer


def run(data: bytes, opened: tuple[asyncio.Runner, int]) -> None:
    runner, port = opened
    answer = runner.run(exchange(port, data))
    if not answer:  # the request was not complete
        assert b"\r\n\r\n" not in data
        return
    match = ANSWER.match(answer)
    assert match, answer[:200]
    assert match[1] != b"500", answer[:200]


TARGET = Target(run, opened=opened)
