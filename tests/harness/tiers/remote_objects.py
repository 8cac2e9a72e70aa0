"""Objects in a remote tier: their content, reads and faults."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import redis

from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.encryption.pieces import stored_key
from lmcache_store.tiers.header import PART_BYTES
from lmcache_store.tiers.remote.address import DEFAULT_PREFIX, Address
from lmcache_store.tiers.remote.objects import redis_name
from lmcache_store.tiers.remote.tier import RemoteTier

KEY = b"n" * 32 + b"k" * 32


def pattern(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def row_name(key: bytes) -> str:
    return redis_name(DEFAULT_PREFIX, key)


def encrypted_name(key: bytes) -> str:
    return redis_name(f"{DEFAULT_PREFIX}:enc", stored_key(key))


def damage_row(client: redis.Redis, name: bytes, damage: str) -> None:
    """Flip a bit of a row's first piece, shorten the piece, fill it with random bytes, replace the row by a
    value of another type, or delete the row.
    """
    if damage in ("flipped", "short", "random"):
        piece = bytearray(client.hget(name, "0:0"))
        if damage == "flipped":
            piece[-1] ^= 1
        damaged = {"short": piece[: len(piece) // 2], "random": os.urandom(len(piece))}
        client.hset(name, "0:0", bytes(damaged.get(damage, piece)))
    else:
        client.delete(name)
        if damage == "foreign":
            client.set(name, b"foreign value")


def tier_of(url: str, timeout_seconds: float = 60.0, **options: Any) -> RemoteTier:
    """A tier whose timeout is long enough for a slow machine, unless a test is about the deadline."""
    return RemoteTier(Address.parse(url), timeout_seconds=timeout_seconds, **options)


def load(remote: RemoteTier, column: int = 0, room: int = 3 * PART_BYTES, key: bytes = KEY) -> bytes | None:
    into = memoryview(bytearray(room))
    loaded = remote.load(ObjectId(key, column), into)
    return None if loaded is None else bytes(into[: loaded.length])


def probe(remote: RemoteTier) -> bool:
    """Probe all servers now. Returns whether the tier is available."""
    for server in remote._topology.servers():
        server.circuit.probe()
    return not remote.health.is_open


def is_available(remote: RemoteTier) -> bool:
    """Whether the tier's own probe found it healthy."""
    return not remote.health.is_open


@contextlib.contextmanager
def answering(reply: bytes, *, is_silent_after: bool = True) -> Iterator[str]:
    """The address of a server that answers each client with these bytes, and then is silent or closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as peers:

        def run() -> None:
            with contextlib.suppress(OSError):  # the test has ended
                while True:
                    peer = peers.enter_context(listener.accept()[0])
                    peer.recv(65536)
                    peer.sendall(reply)
                    if not is_silent_after:
                        peer.close()

        threading.Thread(target=run, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
