"""A server of lm:// in this process or in its own process, and peers that speak the protocol directly."""

import contextlib
import socket
import struct
import subprocess
import sys
import threading

from lmcache.server import LMCacheServer
from lmcache.storage_backend.connector.lm_connector import LMCServerConnector

HOST = "127.0.0.1"
PUT, GET, EXIST, LIST = 1, 2, 3, 4


def key(number):
    return f"vllm@org/model@1@0@{number:064x}"


def head(command, name="", length=0):
    return struct.pack("ii150s", command, length, name.encode().ljust(150))


@contextlib.contextmanager
def serving(device="cpu", port=0, **options):
    server = LMCacheServer(HOST, port, device, **{"max_size_gb": 0.1, "timeout_seconds": 60, **options})
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(timeout=60)
        assert not thread.is_alive(), "the server did not stop"


@contextlib.contextmanager
def connected(server, timeout_seconds=60.0):
    connector = LMCServerConnector(HOST, server.port, timeout_seconds)
    try:
        yield connector
    finally:
        connector.close()


@contextlib.contextmanager
def dialled(port):
    with socket.create_connection((HOST, port), timeout=60) as peer:
        yield peer


def received(peer, num_bytes):
    """Return ``num_bytes`` bytes, or fewer if the peer closed or reset the connection."""
    raw = b""
    with contextlib.suppress(ConnectionError):
        while len(raw) < num_bytes and (part := peer.recv(num_bytes - len(raw))):
            raw += part
    return raw


@contextlib.contextmanager
def process(*arguments):
    command = [sys.executable, "-m", "lmcache.server", HOST, "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            yield child, int(child.stdout.readline().rpartition(":")[2])
        finally:
            child.kill()
