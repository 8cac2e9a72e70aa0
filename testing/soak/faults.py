"""Faults of a soak run. Each is a method that ends with everything running again."""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import redis

from testing.soak.world import (
    MAX_MEMORY_MIB,
    MIN_MEMORY_MIB,
    REDIS_BYTES,
    START_SECONDS,
    Client,
    World,
)

Fault = Callable[[], None]


class Faults:
    """Makes one fault at a time, and counts them by name."""

    def __init__(self, world: World, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._world, self._rng = world, random.Random(seed)
        self._always: list[Fault] = [
            self.kill_client,
            self.freeze_client,
            self.kill_redis,
            self.freeze_redis,
            self.fill_redis,
            self.rotate_password,
            self.rotate_keys,
            self.resize,
            self.delete_files,
        ]
        self._restarts: list[Fault] = [self.kill_sidecar, self.restart_sidecar]
        self._due: list[Fault] = []

    def make_one(self, *, may_restart: bool) -> None:
        """Make a fault. All kinds take turns, in random order. ``may_restart``: it may end the sidecar."""
        if not self._due:
            self._due = [*self._always, *(self._restarts if may_restart else [])]
            self._rng.shuffle(self._due)
        fault = self._due.pop()
        if fault in self._restarts and not may_restart:
            return
        fault()
        self.counts[fault.__name__] += 1

    def kill_client(self) -> None:
        """End a client by SIGKILL, in the middle of any request, and start another one."""
        client = self._client()
        client.kill()
        client.start()

    def freeze_client(self) -> None:
        """Stop a client for a while by SIGSTOP. It may hold leases and reservations."""
        client = self._client()
        client.freeze()
        self._pause(0.2, 2.5)
        client.thaw()

    def kill_redis(self) -> None:
        """End Redis with all its data, and start it again."""
        self._world.redis.kill()
        self._pause(0.0, 0.5)
        self._world.redis.start()

    def freeze_redis(self) -> None:
        """Stop Redis by SIGSTOP: it accepts bytes and does not answer."""
        self._world.redis.freeze()
        self._pause(0.2, 2.0)
        self._world.redis.thaw()

    def fill_redis(self) -> None:
        """Let Redis refuse writes because it is full."""
        with self._world.redis.client as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", "1mb")
            self._pause(0.2, 1.0)
            client.config_set("maxmemory-policy", "allkeys-lru")
            client.config_set("maxmemory", str(REDIS_BYTES))

    def rotate_password(self) -> None:
        """Change the password of Redis, close all connections, and write the new password a moment later."""
        server, password = self._world.redis, secrets.token_hex(8)
        with server.client as client:
            client.config_set("requirepass", password)
            with contextlib.suppress(redis.RedisError):
                client.client_kill_filter(_type="normal", skipme=True)
        server.password = password
        self._pause(0.0, 0.3)
        self._world.write(self._world.password_file, password)

    def rotate_keys(self) -> None:
        """Add an encryption key, and remove the oldest one a moment later."""
        self._world.add_key()
        self._pause(0.0, 1.0)
        self._world.remove_old_keys()

    def resize(self) -> None:
        """Give the memory tier another size. The sidecar follows while the clients use it."""
        size = self._rng.randint(MIN_MEMORY_MIB, MAX_MEMORY_MIB)
        self._world.write(self._world.size_file, f"{size}Mi")

    def delete_files(self) -> None:
        """Delete some files of the disk tier."""
        files = [path for path in self._world.disk.rglob("*") if path.is_file()]
        for path in self._rng.sample(files, min(8, len(files))):
            path.unlink(missing_ok=True)

    def kill_sidecar(self) -> None:
        """End the sidecar by SIGKILL, and start it again on the same arena and files."""
        self._world.save_hits()
        self._world.sidecar.kill()
        self._world.sidecar.start(timeout=START_SECONDS)

    def restart_sidecar(self) -> None:
        """End the sidecar by SIGTERM, and start it again."""
        self._world.save_hits()
        status = self._world.sidecar.terminate(timeout=30)
        if status != 0:
            raise AssertionError(f"the sidecar ended with status {status} after SIGTERM: {self._log_tail()}")
        self._world.sidecar.start(timeout=START_SECONDS)

    def _client(self) -> Client:
        return self._rng.choice(self._world.clients)

    def _pause(self, low: float, high: float) -> None:
        time.sleep(self._rng.uniform(low, high))

    def _log_tail(self) -> str:
        path: Path = self._world.sidecar.log_path
        return "\n".join(path.read_text(errors="replace").splitlines()[-20:])
