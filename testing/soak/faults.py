"""Faults of a soak run. Each is a method that ends with everything running again.

Faults run in three lanes at the same time: processes and files, Redis, and secrets. Within a lane, one fault
follows the other in an order that depends on the seed only.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import redis

from testing.soak.world import MAX_MEMORY_MIB, MIN_MEMORY_MIB, REDIS_BYTES, START_SECONDS, Client, World

Fault = Callable[[], None]


class Overlap:
    """Counts faults, and those that happen while keys and password rotate together."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.at_once: Counter[str] = Counter()
        """Faults that began or ended during a rotation of both secrets."""
        self._is_rotating = threading.Event()
        self._lock = threading.Lock()

    def note(self, fault: Fault) -> None:
        """Make a fault and count it."""
        is_at_once = self._is_rotating.is_set()
        fault()
        with self._lock:
            self.counts[fault.__name__] += 1
            if is_at_once or self._is_rotating.is_set():
                self.at_once[fault.__name__] += 1

    @contextlib.contextmanager
    def rotating(self) -> Generator[None]:
        """Mark the time in which both secrets rotate."""
        self._is_rotating.set()
        try:
            yield
        finally:
            self._is_rotating.clear()


class Lane:
    """Makes one fault at a time. All kinds take turns, in random order."""

    pause_seconds = 1.0
    """Pause between two faults."""

    def __init__(self, world: World, seed: int, overlap: Overlap, redis_lock: threading.Lock) -> None:
        """``redis_lock``: a lane holds it while it uses Redis, or while Redis does not run."""
        self._world, self._overlap, self._redis_lock = world, overlap, redis_lock
        self._rng = random.Random(f"{seed} {type(self).__name__}")
        self._due: list[Fault] = []

    def faults(self) -> list[Fault]:
        """Return the faults of one turn."""
        raise NotImplementedError

    def make_one(self) -> None:
        """Make the next fault."""
        if not self._due:
            self._due = self.faults()
            self._rng.shuffle(self._due)
        self._overlap.note(self._due.pop())

    def run(self, ending: threading.Event) -> None:
        """Make faults until ``ending`` is set."""
        while not ending.wait(self.pause_seconds):
            self.make_one()

    def _pause(self, low: float, high: float) -> None:
        time.sleep(self._rng.uniform(low, high))


class ProcessFaults(Lane):
    """Clients, the sidecar and its files. ``may_restart``: a fault may end the sidecar."""

    may_restart = True

    def faults(self) -> list[Fault]:
        """Return the faults of one turn."""
        restarts = [self.kill_sidecar, self.restart_sidecar] if self.may_restart else []
        always = [self.kill_client, self.freeze_client, self.resize, self.change_shares, self.delete_files]
        return [*always, *restarts]

    def end_restarts(self) -> None:
        """Let the present sidecar run until the end."""
        if self.may_restart:
            self.may_restart, self._due = False, []

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

    def resize(self) -> None:
        """Give the memory tier another size. The sidecar follows while the clients use it."""
        size = self._rng.randint(MIN_MEMORY_MIB, MAX_MEMORY_MIB)
        self._world.write(self._world.size_file, f"{size}Mi")

    def change_shares(self) -> None:
        """Give the tenants other budgets. The sidecar follows while the clients use them."""
        self._world.write_tenants(self._rng)

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

    def _log_tail(self) -> str:
        path: Path = self._world.sidecar.log_path
        return "\n".join(path.read_text(errors="replace").splitlines()[-20:])


class RedisFaults(Lane):
    """Redis disappears, hangs or is full."""

    pause_seconds = 6.0  # with less, Redis is empty most of the time

    def faults(self) -> list[Fault]:
        """Return the faults of one turn."""
        return [self.kill_redis, self.freeze_redis, self.fill_redis]

    def kill_redis(self) -> None:
        """End Redis with all its data, and start it again."""
        with self._redis_lock:
            self._world.redis.kill()
            self._pause(0.0, 0.5)
            self._world.redis.start()

    def freeze_redis(self) -> None:
        """Stop Redis by SIGSTOP: it accepts bytes and does not answer."""
        with self._redis_lock:
            self._world.redis.freeze()
            self._pause(0.2, 2.0)
            self._world.redis.thaw()

    def fill_redis(self) -> None:
        """Let Redis refuse writes because it is full."""
        self._configure(1 << 20, "noeviction")
        self._pause(0.2, 1.0)
        self._configure(REDIS_BYTES, "allkeys-lru")

    def _configure(self, num_bytes: int, policy: str) -> None:
        with self._redis_lock, self._world.redis.client as client:
            client.config_set("maxmemory-policy", policy)
            client.config_set("maxmemory", str(num_bytes))


class Rotations(Lane):
    """The password of Redis and the encryption keys rotate: in half of all turns both at the same time."""

    pause_seconds = 8.0  # with less, the sidecar has no connection to Redis most of the time

    def faults(self) -> list[Fault]:
        """Return the faults of one turn."""
        return [self.rotate_password, self.rotate_keys, self.rotate_both, self.rotate_both]

    def rotate_password(self) -> None:
        """Change the password of Redis, close all connections, and write the new password a moment later."""
        self._set_password()
        self._pause(0.0, 0.3)
        self._write_password()

    def rotate_keys(self) -> None:
        """Add an encryption key, and remove the oldest one a moment later."""
        self._world.add_key()
        self._pause(0.0, 1.0)
        self._world.remove_old_keys()

    def rotate_both(self) -> None:
        """Change the password and add a key, and complete both rotations some seconds later.

        In between, the other lanes kill processes and Redis, and resize the memory tier.
        """
        with self._overlap.rotating():
            self._set_password()
            self._world.add_key()
            self._pause(1.0, 3.0)
            self._write_password()
            self._world.remove_old_keys()

    def _set_password(self) -> None:
        server, password = self._world.redis, secrets.token_hex(8)
        with self._redis_lock:
            with server.client as client:
                client.config_set("requirepass", password)
                with contextlib.suppress(redis.RedisError):
                    client.client_kill_filter(_type="normal", skipme=True)
            server.password = password

    def _write_password(self) -> None:
        self._world.write(self._world.password_file, self._world.redis.password)


class Faults:
    """All lanes. The caller runs that of the processes; the others run in threads from ``start`` on."""

    def __init__(self, world: World, seed: int) -> None:
        self.overlap, redis_lock = Overlap(), threading.Lock()
        self.processes = ProcessFaults(world, seed, self.overlap, redis_lock)
        self._lanes = [lane(world, seed, self.overlap, redis_lock) for lane in (RedisFaults, Rotations)]
        self._ending = threading.Event()
        self._threads = ThreadPoolExecutor(len(self._lanes), "faults")
        self._running: list[Future[None]] = []

    def start(self) -> None:
        """Start the lanes that run in threads."""
        self._running = [self._threads.submit(lane.run, self._ending) for lane in self._lanes]

    def check(self) -> None:
        """Raise the error that ended a lane, if one did."""
        for lane in self._running:
            if lane.done():
                lane.result()

    def stop(self) -> None:
        """Complete the present faults, and make no more."""
        self._ending.set()
        self._threads.shutdown()
