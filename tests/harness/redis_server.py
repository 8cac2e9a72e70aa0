"""A real redis-server of our own: killable, freezable, on a port of the OS's choice and on a UNIX socket.

Set LMCACHE_TEST_SERVER to the path of a valkey-server to run the same tests on that.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import redis

from tests.harness.certificates import Certificates

BINARY = os.environ.get("LMCACHE_TEST_SERVER", "redis-server")


class RedisServer:
    """``with RedisServer() as server:`` starts it with no persistence; options as for redis.conf.

    With ``tls`` the TCP port speaks TLS, the UNIX socket does not. The port and the socket path stay the same
    over ``kill``/``restart``; the contents don't (no persistence).
    """

    def __init__(self, *, password: str = "", tls: Certificates | None = None, **options: str | int) -> None:
        self.password = password
        self.tls = tls
        self.options = options
        self.folder = Path(tempfile.mkdtemp(prefix="lmc-redis-"))
        self.socket_path = self.folder / "redis.sock"
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"redis{'s' if self.tls else ''}://{self._userinfo}127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        return f"unix://{self._userinfo}{self.socket_path}"

    @property
    def client(self) -> redis.Redis:
        """A fresh redis-py client, for looking at what the code under test did."""
        return redis.Redis(unix_socket_path=str(self.socket_path), password=self.password or None)

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self, *, timeout: float = 20.0) -> None:
        """Start, and wait until it answers."""
        assert self._process is None, "already started"
        # A free port may be taken by somebody else before redis binds it: then try the next one.
        for _ in range(5):
            self._spawn()
            if self._wait_ready(timeout):
                return
            self._reap()
            self.port = 0
        raise RuntimeError(f"redis-server did not start; see {self.folder / 'log'}")

    def kill(self) -> None:
        """SIGKILL: connections reset, contents gone."""
        self._signal(signal.SIGKILL)
        self._reap()

    def restart(self) -> None:
        """Kill when running, and start on the same port and socket, empty."""
        if self._process is not None:
            self.kill()
        self.start()

    def freeze(self) -> None:
        """SIGSTOP: the kernel still accepts connections and bytes, nobody answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _userinfo(self) -> str:
        return f":{self.password}@" if self.password else ""

    def _spawn(self) -> None:
        self.port = self.port or free_port()
        options = {
            **(self._tls_options() if self.tls else {"port": self.port}),
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
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen([BINARY, *arguments], stdout=log, stderr=log)

    def _tls_options(self) -> dict[str, str | int | Path]:
        assert self.tls is not None
        files = {
            "tls-cert-file": self.tls.cert,
            "tls-key-file": self.tls.key,
            "tls-ca-cert-file": self.tls.ca,
        }
        return {"port": 0, "tls-port": self.port, "tls-auth-clients": "no", **files}

    def _wait_ready(self, timeout: float) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(redis.ConnectionError), self.client as client:
                return bool(client.ping())
            time.sleep(0.01)
        return False

    def _signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def _reap(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
