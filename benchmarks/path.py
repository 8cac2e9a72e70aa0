"""Compare the sidecar's whole path to Redis and disk with bare loops on the same Redis and volume.

Store: from the commit of rows in memory until they are sealed and written through. Load: from the first
lookup of rows in the lower tier to the lookup that finds all of them in memory. The benchmark ``remote``
measures the tier alone. The same rows also go through tiers with encryption, in the same rounds.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import redis

from benchmarks.remote import connect, url_of
from benchmarks.report import Figure, Report, at_least, of, paired
from lmcache_store.kv_groups import KVGroup
from lmcache_store.tiers.base import LowerTier, RowKey
from lmcache_store.tiers.disk.tier import DiskTier
from lmcache_store.tiers.encryption.aes import AesGcm
from lmcache_store.tiers.encryption.keys import EncryptionKeys
from lmcache_store.tiers.header import PART_BYTES
from lmcache_store.tiers.memory.contracts import Chains, Geometry, Reserved, Slot
from lmcache_store.tiers.memory.private import PrivateArena
from lmcache_store.tiers.remote.address import Address
from lmcache_store.tiers.remote.tier import RemoteTier
from lmcache_store.tiers.tiered.store import TieredStore
from testing.processes import RedisProcess

NUM_ROWS, ROUNDS, WARM_UP = 32, 21, 2
ARENA_ROWS = 8 * NUM_ROWS  # a lookup promotes at most a quarter of them
NAMESPACE, OWNER, ENGINE = b"n" * 32, b"o" * 16, b"e" * 16
POLL_SECONDS = 2e-3  # an engine polls every 10 ms
DISK_CAPACITY = 8 << 30
LIMIT_SECONDS = 30

Way = Callable[[], None]


@contextmanager
def scratch() -> Iterator[Path]:
    """Create a directory on the volume of TMPDIR."""
    path = Path(tempfile.mkdtemp(prefix="lmcache-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


class Sidecar:
    """Store of one sidecar with one lower tier. Each row has one part, which begins with the row's key.

    ``has_keys``: False if the rows of the tier do not begin so.
    """

    def __init__(self, tier: LowerTier, num_rows: int = ARENA_ROWS, *, has_keys: bool = True) -> None:
        self._has_keys = has_keys
        self.arena = PrivateArena(Geometry(PART_BYTES, 1), num_rows)
        np.frombuffer(self.arena.buffer, np.uint8)[:] = 1  # populates the pages
        self.store = TieredStore(self.arena, {"tier": tier})
        self.store.register(NAMESPACE)

    def fill(self, keys: list[RowKey]) -> list[Slot]:
        """Reserve rows, and write different content to each. The rows are ready for the commit."""
        slots = []
        for key, answer in zip(keys, self.store.reserve(keys, 0, OWNER, length=PART_BYTES), strict=True):
            assert answer.result is Reserved.SLOT, answer
            assert answer.slot is not None, answer
            self.arena.view(answer.slot.row, 0)[:64] = key
            slots.append(answer.slot)
        return slots

    async def store_all(self, keys: list[RowKey]) -> float:
        slots = self.fill(keys)
        start = time.perf_counter()
        self.store.commit(slots, 0, OWNER)
        assert await self.store.drain(LIMIT_SECONDS)
        took = time.perf_counter() - start
        assert self.store.lower["tier"].num_queued == 0
        return took

    async def load_all(self, keys: list[RowKey]) -> float:
        request, start = os.urandom(8).hex(), time.perf_counter()
        while True:
            result = self.store.lookup((ENGINE, request), Chains(256, (KVGroup(0, 16, PART_BYTES),), (keys,)))
            if result.num_resident == len(keys):
                break
            if time.perf_counter() - start > LIMIT_SECONDS:
                raise RuntimeError(f"{result.num_resident} of {len(keys)} rows were promoted in time")
            await asyncio.sleep(POLL_SECONDS)
        took = time.perf_counter() - start
        for key, row in zip(keys, self.store.memory._rows.prefix(keys), strict=True):
            assert not self._has_keys or bytes(self.arena.view(row, 0)[:64]) == key
        self.store.memory.release((ENGINE, request))
        return took


async def rounds(
    tiers: Mapping[str, LowerTier], bare_store: Way, bare_load: Way, clear: Way
) -> dict[str, list[float]]:
    """Return the seconds of each operation: "store" and "load", after the name of a tier or "bare"."""
    writers = {name: Sidecar(tier) for name, tier in tiers.items()}
    readers = {name: Sidecar(tier) for name, tier in tiers.items()}
    for sidecar in (*writers.values(), *readers.values()):
        await sidecar.store.adopt()
    loops = {"store": bare_store, "load": bare_load}
    seconds = {f"{name} {operation}": list[float]() for operation in loops for name in (*tiers, "bare")}
    for turn in range(ROUNDS + WARM_UP):
        keys = [NAMESPACE + os.urandom(32) for _ in range(NUM_ROWS)]
        clear()
        for operation, way in loops.items():
            for name in random.sample([*tiers, "bare"], len(tiers) + 1):
                if name == "bare":
                    start = time.perf_counter()
                    way()
                    took = time.perf_counter() - start
                elif operation == "store":
                    took = await writers[name].store_all(keys)
                else:
                    took = await readers[name].load_all(keys)
                if turn >= WARM_UP:
                    seconds[f"{name} {operation}"].append(took)
    for sidecar in (*writers.values(), *readers.values()):
        await sidecar.store.close()
        sidecar.arena.close()
    return seconds


def cipher(domain: str) -> AesGcm:
    return AesGcm(domain, EncryptionKeys({1: os.urandom(32)}, 1))


@contextmanager
def bare_files(folder: Path) -> Iterator[tuple[Way, Way, Way]]:
    """Yield bare store, load and clean-up: one file per part with O_DIRECT, no header and no rename."""
    memory = memoryview(mmap.mmap(-1, ARENA_ROWS * PART_BYTES))
    memory[:] = os.urandom(PART_BYTES) * ARENA_ROWS
    slots = itertools.cycle(range(ARENA_ROWS))

    def each(flags: int, transfer: Callable[[int, list[memoryview], int], int]) -> None:
        for part in range(NUM_ROWS):
            fd = os.open(folder / str(part), flags | os.O_DIRECT, 0o600)
            start = next(slots) * PART_BYTES
            transfer(fd, [memory[start : start + PART_BYTES]], 0)
            os.close(fd)

    def clear() -> None:
        for part in range(NUM_ROWS):
            (folder / str(part)).unlink(missing_ok=True)

    yield lambda: each(os.O_WRONLY | os.O_CREAT, os.pwritev), lambda: each(os.O_RDONLY, os.preadv), clear


def _figures(what: str, seconds: dict[str, list[float]]) -> Iterator[Figure]:
    for name in ("load", "store"):
        plain, encrypted = seconds[f"plain {name}"], seconds[f"encrypted {name}"]
        share = paired(seconds[f"bare {name}"], plain)
        yield at_least(f"{name}, {what}, of the bare loop's rate", share, "%", 90)
        yield of("    rate", NUM_ROWS * PART_BYTES / statistics.median(plain) / 1e9, "GB/s")
        yield at_least("    encrypted, of the rate without encryption", paired(plain, encrypted), "%", 80)


def _flush(client: redis.Redis) -> None:
    client.flushall()


def run() -> Report:
    figures: list[Figure] = []
    with RedisProcess() as server:
        for kind in ("unix", "tcp"):
            bare_loop = connect(kind, server, NUM_ROWS, ARENA_ROWS // NUM_ROWS)
            ciphers = {"plain": None, "encrypted": cipher("remote")}
            remotes = {
                name: RemoteTier(Address.parse(url_of(kind, server)), timeout_seconds=10, cipher=used)
                for name, used in ciphers.items()
            }
            flush = partial(_flush, server.client)
            figures += _figures(kind, asyncio.run(rounds(remotes, bare_loop.store, bare_loop.load, flush)))
            for tier in remotes.values():
                tier.close()
    with scratch() as folder:
        (folder / "bare").mkdir()
        disks = {
            "plain": DiskTier(folder / "plain", DISK_CAPACITY),
            "encrypted": DiskTier(folder / "encrypted", DISK_CAPACITY, cipher("disk")),
        }
        with bare_files(folder / "bare") as (store, load, clear):
            figures += _figures("disk", asyncio.run(rounds(disks, store, load, clear)))
        for name, disk in disks.items():
            disk.close()
            shutil.rmtree(folder / name)
    return Report("path", _conditions(), figures)


def _conditions() -> str:
    return (
        f"{NUM_ROWS} rows of {PART_BYTES >> 20} MiB, {ROUNDS} rounds, alternating with a bare loop and"
        " with the same path encrypted.\nThe loop moves one part at a time over one connection, without"
        " hashes and headers. The disk is the volume of"
        f" {tempfile.gettempdir()}, O_DIRECT"
    )
