"""Real servers in child processes for tests, demo and benchmarks, to be killed, frozen and restarted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import redis

from testing import deadlines
from testing.child_process import REPOSITORY, SOURCES, ChildProcess, free_port, wait_until
from testing.engine import fork_server

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

BINARY = os.environ.get("LMCACHE_TEST_SERVER", "redis-server")
_SIDECAR = ("-m", "lmcache_sidecar")
STARTED = re.compile(r"(?:LMCache sidecar|can't run).* http port (\d+)")
"""Lines of a sidecar's log that end its start."""
_fork_server = fork_server.ForkServer(
    "testing.imported",
    lambda: {"PYTHONPATH": SOURCES, "OPENBLAS_NUM_THREADS": "1"},
    shares_memory=False,
)


class Server(ChildProcess, ABC):
    """One process at a time, with a folder that persists across ``kill`` and ``restart``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(type(self).__name__, folder / "log")
        self.folder = folder

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    @abstractmethod
    def start(self, *, timeout: float = 60.0) -> None:
        """Start the server, and wait until it answers."""

    def restart(self) -> None:
        """Kill the server if it runs, and start it again on the same data."""
        self.kill()
        self.start()

    def close(self) -> None:
        """Kill the server if it runs, and remove the folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class CertificateFiles(Protocol):
    """PEM files of an authority, and of a certificate that it signed."""

    @property
    def ca(self) -> Path: ...

    @property
    def cert(self) -> Path: ...

    @property
    def key(self) -> Path: ...


class RedisProcess(Server):
    """``with RedisProcess() as server:`` starts a redis-server without persistence. Options are those of
    redis.conf.

    It listens on a free port, with ``tls`` by TLS, and on a UNIX socket. Both persist across ``kill`` and
    ``restart``, and the data does not. LMCACHE_TEST_SERVER may name a valkey-server instead.
    """

    def __init__(
        self, *, password: str = "", tls: CertificateFiles | None = None, **options: str | int
    ) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="lmc-redis-")))
        self.password = password
        self.tls = tls
        self.options = options
        self.socket_path = self.folder / "redis.sock"
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis{'s' if self.tls else ''}://{self._userinfo}127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        return f"unix://{self._userinfo}{self.socket_path}"

    @property
    def client(self) -> redis.Redis:
        """A new redis-py client, to inspect the server."""
        return redis.Redis(unix_socket_path=str(self.socket_path), password=self.password or None)

    def start(self, *, timeout: float = 60.0) -> None:
        # Another process may take the free port before redis binds it. In that case try another port.
        for _ in range(5):
            self._spawn()
            if self._wait_ready(timeout):
                return
            self.kill()
            self.port = 0
        raise RuntimeError(f"redis-server did not start: {self.log}")

    @property
    def _userinfo(self) -> str:
        return f":{self.password}@" if self.password else ""

    def _spawn(self) -> None:
        self.port = self.port or free_port()
        options = {
            **(self._tls_options(self.tls) if self.tls else {"port": self.port}),
            "bind": "127.0.0.1",
            "unixsocket": self.socket_path,
            "dir": self.folder,
            "save": "",
            "appendonly": "no",
            **({"requirepass": self.password} if self.password else {}),
            **{name.replace("_", "-"): value for name, value in self.options.items()},
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        self.socket_path.unlink(missing_ok=True)
        self.spawn([BINARY, *arguments])

    def _tls_options(self, tls: CertificateFiles) -> dict[str, str | int | Path]:
        files = {"tls-cert-file": tls.cert, "tls-key-file": tls.key, "tls-ca-cert-file": tls.ca}
        return {"port": 0, "tls-port": self.port, "tls-auth-clients": "no", **files}

    def _wait_ready(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self.is_running:
            with contextlib.suppress(redis.ConnectionError), self.client as client:
                return bool(client.ping())
            time.sleep(0.01)
        return False


class SidecarProcess(Server):
    """``with SidecarProcess(memory_size="64Mi") as sidecar:`` starts a sidecar. Options are those of the
    command line.

    Where ``fork_server.allowed`` allows it, a sidecar starts as a copy of a fork server, unless it has a
    prefix, another program, a limit of descriptors, or variables that an interpreter reads at its start.
    Socket and arena persist across ``kill`` and ``restart``. ``log_path`` holds the output of all processes.
    """

    usual: ClassVar[dict[str, Any]] = {"memory_size": "64Mi", "http_host": "127.0.0.1", "http_port": 0}
    """Options that all sidecars have, unless they are given."""

    def __init__(self, **options: Any) -> None:
        shm = Path("/dev/shm")  # in memory, as in a pod: an arena on a disk would be written back to the disk
        super().__init__(Path(tempfile.mkdtemp(prefix="lmc-sidecar-", dir=shm if shm.is_dir() else None)))
        self.socket_path = str(self.folder / "kvcache.sock")
        self.arena_path = self.folder / "arena"
        self.options = self.usual | options
        self.max_descriptors = 0  # 0: the limit of this process
        self.environment: dict[str, str] = {}  # in addition to the environment of this process
        self.prefix: list[str] = []  # a command that starts the sidecar
        self.program: Sequence[str] = _SIDECAR
        self.http_port = 0
        self._log_start = 0

    def __exit__(self, *error: object) -> None:
        try:
            if not any(error):
                self.check_causes()
        finally:
            self.close()

    def check_causes(self) -> None:
        """The causes of all prompt tokens add up, if the sidecar still answers. Raises AssertionError."""
        try:
            with urllib.request.urlopen(self.url + "/stats", timeout=1) as response:
                causes = json.load(response).get("causes", {})
        except urllib.error.HTTPError as error:  # its statistics raised
            raise AssertionError(f"{error}; log {self.log}") from error
        except (OSError, ValueError):  # killed, frozen, or an old version
            return
        by_cause = causes.get("cause_tokens", {}).values()
        assert all(number > 0 for number in by_cause), f"a cause without tokens: {causes}"
        total = sum(by_cause)
        assert total == causes.get("prompt_tokens", 0), f"causes of {total} tokens: {causes}"

    @property
    def url(self) -> str:
        return f"http://{self.options['http_host']}:{self.http_port}"

    @property
    def log(self) -> str:
        """Output of the current process."""
        return self.log_path.read_bytes()[self._log_start :].decode() if self.log_path.exists() else ""

    def start(self, *, timeout: float = 60.0) -> None:
        options = {"socket": self.socket_path, "arena": self.arena_path} | self.options
        flags = [
            part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))
        ]
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("LMCACHE_") or name == deadlines.VARIABLE
        }
        environ |= {"PYTHONPATH": SOURCES} | self.environment
        is_plain = not self.prefix and not self.max_descriptors and self.program == _SIDECAR
        is_plain &= not any(name.startswith("PYTHON") for name in self.environment)
        arguments, cwd = ["serve", *flags], str(REPOSITORY)
        if is_plain and fork_server.is_allowed():
            module = self.program[-1]
            self.adopt(_fork_server.start(module, arguments, self.log_path, cwd=cwd, env=environ))
        else:
            limit = f'ulimit -n {self.max_descriptors}; exec "$@"'
            limited = ["sh", "-c", limit, "sh"] if self.max_descriptors else []
            command = [*self.prefix, *limited, sys.executable, *self.program, *arguments]
            self.spawn(command, cwd=cwd, env=environ)
        wait_until(self._listens, timeout=timeout, what="the sidecar listens")

    def _listens(self) -> bool:
        """Whether the start has ended: the sidecar serves, or stays up although it cannot.

        A sidecar whose files open slowly serves its pages earlier, with few figures.
        """
        self.check()
        if match := STARTED.search(self.log):
            self.http_port = int(match[1])
        return bool(match)

    def get(self, path: str) -> str:
        """The body of an HTTP page."""
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            body: bytes = response.read()
        return body.decode()

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = json.loads(self.get("/stats"))
        return stats

    def wait_until(self, predicate: Callable[[dict[str, Any]], Any], *, timeout: float = 60.0) -> Any:
        """Poll /stats until ``predicate(stats)`` is true, and return its value."""
        try:
            return wait_until(lambda: predicate(self.stats()), timeout=timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}; stats {self.stats()}; log {self.log}") from error

    def settled(self) -> dict[str, Any]:
        """Wait until no work is left in the background, and return the statistics of that moment."""
        settled: dict[str, Any] = self.wait_until(
            lambda stats: stats if not any(stats["pending_work"].values()) else None
        )
        return settled

    def wait_usable(self) -> None:
        """Wait until a client is attached, and all of the arena's memory can be used.

        The sidecar populates the arena in the background. Until then it refuses stores beyond the part that
        is populated, and shares of tenants are those of this part.
        """

        def is_usable(stats: dict[str, Any]) -> bool:
            memory = stats["memory"]
            return bool(0 < memory["capacity_rows"] == memory.get("usable_rows"))  # None: not attached yet

        self.wait_until(is_usable)

    def wait_attached(self, run_short_requests: Callable[[], object], num_clients: int = 2) -> None:
        """Wait until ``num_clients`` clients are attached, and all memory can be used.

        One vLLM has two clients: scheduler side and worker side.

        On a busy machine an engine starts before its worker has identified the model. The scheduler side then
        attaches after a step of the engine, so the engines run short requests meanwhile.
        """

        def are_attached(stats: dict[str, Any]) -> bool:
            if stats["num_clients"]["attached"] == num_clients:
                return True
            run_short_requests()
            return False

        self.wait_until(are_attached)
        self.wait_usable()
