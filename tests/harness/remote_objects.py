"""Objects in a remote tier: made, read back, waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

from lmcache.tiers.base import ObjectId
from lmcache.tiers.header import PART_BYTES
from lmcache.tiers.remote.address import DEFAULT_PREFIX
from lmcache.tiers.remote.objects import redis_name
from lmcache.tiers.remote.tier import RemoteTier
from testing.child_process import wait_until

KEY = b"n" * 32 + b"k" * 32


def pattern(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def part_name(key: bytes, column: int, part: int) -> str:
    return redis_name(DEFAULT_PREFIX, ObjectId(key, column), part)


def load(remote: RemoteTier, column: int = 0, room: int = 3 * PART_BYTES, key: bytes = KEY) -> bytes | None:
    into = memoryview(bytearray(room))
    loaded = remote.load(ObjectId(key, column), into)
    return None if loaded is None else bytes(into[: loaded.length])


def until(condition: Callable[[], object], seconds: float = 10.0) -> float:
    """Poll; return how long it took."""
    start = time.monotonic()
    wait_until(condition, timeout=seconds)
    return time.monotonic() - start


def probe(remote: RemoteTier) -> bool:
    """Probe all servers now; does one answer?"""
    for server in remote._topology.servers():
        server.circuit.probe()
    return not remote.health.is_open


def is_available(remote: RemoteTier) -> bool:
    """Has the tier's own probe found it healthy?"""
    return not remote.health.is_open
