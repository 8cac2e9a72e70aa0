"""Launchers of a group as processes in containers of their own. A small program takes the place of vLLM."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from testing.child_process import SOURCES, ChildProcess, free_port, free_ports, wait_until

ENGINE = """
import json, os, signal, sys, time

folder, mode = sys.argv[1:3]

def note(word):
    with open(f"{folder}/signals", "a") as file:
        file.write(word)

def terminate(*_):
    note("T")
    if mode == "quick":
        sys.exit(0)

signal.signal(signal.SIGTERM, terminate)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(0))
if (worker := os.fork()) == 0:  # it would end before its requests, as a worker of vLLM does
    signal.signal(signal.SIGTERM, lambda *_: note("W"))
    while True:
        signal.pause()
if os.fork() == 0:  # an orphan, which ends as a child of the first process
    os.setsid()
    os._exit(os.fork() and 0)
with open(f"{folder}/new", "w") as file:
    json.dump({"pid": os.getpid(), "worker": worker, "arguments": sys.argv[3:]}, file)
os.rename(f"{folder}/new", f"{folder}/started")
while True:
    signal.pause()
"""
PR_SET_CHILD_SUBREAPER = 36


class PartProcess(ChildProcess):
    """A launcher in a container of its own, which the test restarts."""

    def __init__(self, folder: Path, rank: int, environ: dict[str, str], mode: str) -> None:
        super().__init__(f"part-{rank}", folder / "log")
        self.folder, self.environ, self.mode = folder, environ | {"LMCACHE_GROUP_RANK": f"{rank}"}, mode

    def start(self) -> None:
        for leftover in ("started", "signals"):
            (self.folder / leftover).unlink(missing_ok=True)
        self.log_path.unlink(missing_ok=True)
        engine = [sys.executable, "-SE", self.folder.parent / "engine.py", self.folder, self.mode]
        argv = [sys.executable, "-m", "lmcache_client.group", "--", *engine]
        self.spawn(argv, env=self.environ, preexec_fn=adopt_orphans)

    @property
    def engine(self) -> dict[str, Any]:
        """The engine's pid, worker and arguments. Empty until it has started."""
        file = self.folder / "started"
        return dict(json.loads(file.read_text())) if file.exists() else {}

    @property
    def signals(self) -> str:
        file = self.folder / "signals"
        return file.read_text() if file.exists() else ""

    @property
    def children(self) -> list[int]:
        """Processes of the launcher: vLLM, and orphans that it has not reaped."""
        return [*map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split())]

    def kill(self) -> None:
        """End all processes, as a container ends with its first one."""
        children = self.children if self.is_running else []
        super().kill()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)

    @property
    def is_ready(self) -> bool:
        """Whether the readiness probe succeeds."""
        address = self.environ["VLLM_HOST_IP"], int(self.environ["LMCACHE_GROUP_READY_PORT"])
        # A port that closes resets connections that it has not accepted.
        with contextlib.suppress(ConnectionError), socket.create_connection(address) as probe:
            return probe.recv(1) == b""
        return False

    def wait_running(self) -> None:
        self._wait(lambda: self.engine)

    def wait_line(self, text: str) -> None:
        self._wait(lambda: text in self.log)

    def _wait(self, predicate: Callable[[], object]) -> None:
        def is_true() -> object:
            self.check()
            return predicate()

        wait_until(is_true, what=self.name)

    @property
    def last_line(self) -> str:
        return self.log.splitlines()[-1]


def adopt_orphans() -> None:
    """Make the launcher the parent of orphans, as the first process of a container is."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


Maker = Callable[..., list[PartProcess]]


@contextlib.contextmanager
def groups(tmp_path: Path) -> Iterator[Maker]:
    """Return a function that returns the launchers of a group, which do not run yet."""
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "secret").write_text("the secret of the group")
    with contextlib.ExitStack() as stack:

        def make(
            nodes: int = 2, mode: str = "quick", address: str = "127.0.0.1", name: str = "127.0.0.1"
        ) -> list[PartProcess]:
            environ = os.environ | {
                "PYTHONPATH": SOURCES,
                "LMCACHE_GROUP_NODES": f"{nodes}",
                "LMCACHE_GROUP_LEADER": name,
                "LMCACHE_GROUP_PORT": f"{free_port()}",
                "LMCACHE_GROUP_SECRET_FILE": f"{tmp_path / 'secret'}",
                "LMCACHE_GROUP_NOTICE_SECONDS": "0.1",
                "LMCACHE_GROUP_RANKS": "2",
                "LMCACHE_GROUP_SERVER_PORT": f"{free_port()}",
                "LMCACHE_GROUP_SHUTDOWN_SECONDS": "600",
                "VLLM_HOST_IP": address,
            }
            parts = []
            for rank, port in enumerate(free_ports(nodes)):
                (folder := tmp_path / f"{rank}").mkdir()
                ready = {"LMCACHE_GROUP_READY_PORT": f"{port}"}
                parts.append(stack.enter_context(PartProcess(folder, rank, environ | ready, mode)))
            return parts

        yield make


def start(parts: list[PartProcess]) -> None:
    for part in parts:
        part.start()
    for part in parts:
        part.wait_running()


def port_of(part: PartProcess) -> int:
    return int(part.environ["LMCACHE_GROUP_PORT"])
