"""A real sidecar in a process of its own: killable, freezable, restartable with the same arena."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


def wait_until(predicate: Callable[[], Any], *, timeout: float = 20.0, what: str = "") -> Any:
    """Poll until ``predicate`` is true; its value. Fails loudly after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what or predicate}")
        time.sleep(0.01)
    return value


class SidecarProcess:
    """``with SidecarProcess(memory_size="64Mi") as sidecar:`` starts it; options are those of the command
    line.

    Socket, arena and folder stay the same over ``kill``/``restart``; ``log`` holds the output of all
    processes.
    """

    def __init__(self, **options: Any) -> None:
        shm = Path("/dev/shm")  # in memory, as in a pod: an arena on a disk would be written back to it
        self.folder = Path(tempfile.mkdtemp(prefix="lmc-sidecar-", dir=shm if shm.is_dir() else None))
        self.socket_path = str(self.folder / "kvcache.sock")
        self.arena_path = self.folder / "arena"
        self.log_path = self.folder / "log"
        self.options = {"memory_size": "64Mi", "http_host": "127.0.0.1", "http_port": 0} | options
        self.http_port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def __enter__(self) -> SidecarProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def log(self) -> str:
        """What the present process wrote."""
        return self.log_path.read_bytes()[self._log_start :].decode() if self.log_path.exists() else ""

    def start(self, *, timeout: float = 20.0) -> None:
        """Start, and wait until it listens."""
        assert self._process is None, "already started"
        options = {"socket": self.socket_path, "arena": self.arena_path} | self.options
        flags = [
            part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))
        ]
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        environ = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")}
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lmcache_sidecar", "serve", *flags],
                stdout=log,
                stderr=log,
                cwd=REPOSITORY,
                env=environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'sidecar'}"},
            )
        process = self._process

        def listens() -> bool:
            if process.poll() is not None:
                raise AssertionError(f"the sidecar ended with {process.returncode}: {self.log}")
            if found := re.search(r"http port (\d+)", self.log):
                self.http_port = int(found[1])
            return bool(found)

        wait_until(listens, timeout=timeout, what="the sidecar listens")

    def kill(self) -> None:
        """SIGKILL."""
        self._signal(signal.SIGKILL)
        self._reap()

    def terminate(self, *, timeout: float = 30.0) -> int:
        """SIGTERM; the exit status."""
        self._signal(signal.SIGTERM)
        assert self._process is not None
        status = self._process.wait(timeout)
        self._process = None
        return status

    def restart(self) -> None:
        """Kill it if it runs, and start it with the same socket, arena and options."""
        if self._process is not None:
            self.kill()
        self.start()

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def get(self, path: str) -> str:
        """The body of one page."""
        with urllib.request.urlopen(self.url + path, timeout=5) as response:
            body: bytes = response.read()
        return body.decode()

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = json.loads(self.get("/stats"))
        return stats

    def wait_until(self, predicate: Callable[[dict[str, Any]], Any], *, timeout: float = 20.0) -> Any:
        """Poll /stats until ``predicate(stats)`` is true; its value."""
        try:
            return wait_until(lambda: predicate(self.stats()), timeout=timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}; stats {self.stats()}; log {self.log}") from error

    def close(self) -> None:
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def _reap(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        self._process = None
