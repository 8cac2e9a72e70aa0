"""The processes of a soak run: a sidecar with memory, disk and Redis, its Redis, and clients."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Self

from lmcache_store import keys
from testing.child_process import REPOSITORY, SOURCES, ChildProcess
from testing.processes import RedisProcess, SidecarProcess
from testing.soak.rows import SALTS

MEBIBYTE = 1 << 20
MIN_MEMORY_MIB, MEMORY_MIB, MAX_MEMORY_MIB = 6, 8, 16
# Disk is smaller than all rows, so that loads need Redis, too.
DISK_BYTES = 24 * MEBIBYTE
REDIS_BYTES = 64 * MEBIBYTE
NUM_KEYS = 6
"""Versions of the encryption key that the sidecar has after a rotation. With fewer, most rows are misses."""
START_SECONDS = 300.0
"""Longest start of a sidecar or a client. A busy machine takes longest to import Python modules."""


class Client(ChildProcess):
    """One client process at a time, with a file of counts for each."""

    def __init__(self, folder: Path, number: int, socket_path: str) -> None:
        super().__init__(f"client {number}", folder / f"client-{number}.log")
        self._folder, self._number, self._socket_path = folder, number, socket_path
        self._num_starts = 0

    @property
    def _counts(self) -> Path:
        return self._folder / f"client-{self._number}-{self._num_starts}.json"

    @property
    def has_requests(self) -> bool:
        """Has the present process had a request? Raises ProcessDied if it has ended."""
        self.check()
        return self._counts.exists() and json.loads(self._counts.read_text()).get("requests", 0) > 0

    def start(self) -> None:
        """Start another process."""
        self._num_starts += 1
        seed = 1000 * self._number + self._num_starts
        environment = os.environ | {
            "PYTHONPATH": SOURCES,
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable,
            "-m",
            "testing.soak.client",
            self._socket_path,
            str(self._counts),
            str(seed),
        ]
        self.spawn(command, cwd=REPOSITORY, env=environment)


class World:
    """Starts the processes, and ends them with the context.

    ``is_folder_retained``: leave the folder for people who look for a defect.
    """

    def __init__(self, num_clients: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="lmc-soak-"))
        self.disk = self.folder / "disk"
        self.size_file, self.password_file = self.folder / "size", self.folder / "password"
        self.keys, self.tenants_file = self.folder / "keys", self.folder / "tenants"
        self.key_version = 0
        self.is_folder_retained = False
        self.redis = RedisProcess(
            password=secrets.token_hex(8), maxmemory=REDIS_BYTES, maxmemory_policy="allkeys-lru"
        )
        self.sidecar: SidecarProcess
        self.clients: list[Client] = []
        self.hit_tokens: Counter[str] = Counter()
        """Tokens of hits by tier, of sidecars that have ended."""
        self.tenant_hits: Counter[str] = Counter()
        """Tokens of hits by tenant, of the same sidecars."""
        self._num_clients = num_clients
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as opened:
            opened.callback(self._remove_folder)
            opened.enter_context(self.redis)
            self.write(self.password_file, self.redis.password)
            self.write(self.size_file, f"{MEMORY_MIB}Mi")
            self.keys.mkdir()
            self.add_key()
            self.write_tenants(random.Random(0))
            self.sidecar = SidecarProcess(
                memory_size=f"{MEMORY_MIB}Mi",
                memory_max_size=f"{MAX_MEMORY_MIB}Mi",
                memory_size_file=self.size_file,
                tenants_file=self.tenants_file,
                disk_path=self.disk,
                disk_size=DISK_BYTES,
                disk_encryption_keys_dir=self.keys,
                remote_url=f"redis://127.0.0.1:{self.redis.port}/0",
                remote_password_file=self.password_file,
                remote_encryption_keys_dir=self.keys,
                remote_encryption_delay_seconds=2,  # keys rotate more often than in operation
                drain_grace_seconds=2,
            )
            opened.callback(self.sidecar.close)
            self.sidecar.start(timeout=START_SECONDS)
            for number in range(self._num_clients):
                self.clients.append(
                    opened.enter_context(Client(self.folder, number, self.sidecar.socket_path))
                )
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @staticmethod
    def write(path: Path, text: str) -> None:
        """Replace a file, as a kubelet does."""
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_text(text)
        os.replace(fresh, path)

    def add_key(self) -> None:
        """Add a newer encryption key for the disk tier and Redis."""
        self.key_version += 1
        self.write(self.keys / str(self.key_version), secrets.token_hex(32))

    def remove_old_keys(self) -> None:
        """Remove the oldest encryption keys. Rows that they encrypted become misses."""
        for path in self.keys.glob("[0-9]*"):
            if int(path.name) <= self.key_version - NUM_KEYS:
                path.unlink()

    def write_tenants(self, rng: random.Random) -> None:
        """Give one named tenant a random guaranteed share, and the other one random upper bounds."""
        limits = (
            f"minMemoryPercent: {rng.randint(0, 40)}, priority: {rng.randint(-1, 1)}",
            f"memoryPercent: {rng.randint(20, 90)}, lowerTierBytes: {rng.randint(4, 16)}Mi",
        )
        lines = (
            f"- {{name: {salt}, saltHash: {keys.salt_hash(salt).hex()}, {limit}}}"
            for salt, limit in zip(SALTS, limits, strict=False)  # the last salt has no budget
        )
        self.write(self.tenants_file, "\n".join(["named:", *lines, ""]))

    def counts(self) -> Counter[str]:
        """Return the sum of the counts of all client processes so far."""
        total: Counter[str] = Counter()
        for path in self.folder.glob("client-*.json"):
            total.update(json.loads(path.read_text()))
        return total

    def have_all_requests(self) -> bool:
        """Has each client had a request?"""
        return all(client.has_requests for client in self.clients)

    def save_hits(self) -> None:
        """Add the present sidecar's hits to those of the earlier ones, because it is about to end."""
        stats = self.stats()
        self.hit_tokens.update(stats["lookups"]["hit_tokens"])
        self.tenant_hits.update(stats["tenants"]["hit_tokens"])

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the present sidecar."""
        return self.sidecar.stats()

    def _remove_folder(self) -> None:
        if not self.is_folder_retained:
            shutil.rmtree(self.folder, ignore_errors=True)
