"""Processes of ours: started, frozen, killed and started again on the same data."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

REPOSITORY = Path(__file__).resolve().parents[1]
_TAIL_LINES = 30


class ProcessDied(RuntimeError):
    """A process ended by itself; the message carries the end of its log."""


class ChildProcess:
    """One process at a time, whose output goes to ``log``. A context manager that ends it."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log_path = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def log(self) -> str:
        """What it wrote."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def spawn(self, argv: Sequence[str | Path], **options: Any) -> None:
        """Start ``argv``; ``options`` are those of Popen. It is not waited for."""
        self.check()
        assert self._process is None, "already started"
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*map(str, argv)], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, **options
            )

    def check(self) -> None:
        """Raises ProcessDied when the process was started and has ended by itself."""
        if self._process is not None and (status := self._process.poll()) is not None:
            tail = self.log.splitlines()[-_TAIL_LINES:]
            raise ProcessDied("\n".join([f"{self.name} exited with {status}:", *tail]))

    def wait(self, timeout: float = 60) -> int:
        """Until it has ended by itself; its exit status."""
        status = self._popen.wait(timeout)
        self._process = None
        return status

    def terminate(self, *, timeout: float = 60.0) -> int:
        """SIGTERM, after ``timeout`` seconds SIGKILL; the exit status."""
        return self._end(signal.SIGTERM, timeout)

    def interrupt(self, *, timeout: float = 60.0) -> int:
        """SIGINT, after ``timeout`` seconds SIGKILL; the exit status."""
        return self._end(signal.SIGINT, timeout)

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        if self._process is not None:
            self._process.kill()
            self.wait()

    def freeze(self) -> None:
        """SIGSTOP: the kernel still accepts connections and bytes, nobody answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()

    @property
    def _popen(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not started"
        return self._process

    def _signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def _end(self, number: signal.Signals, timeout: float) -> int:
        self._signal(number)
        try:
            return self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL


def wait_until(predicate: Callable[[], Any], *, timeout: float = 60.0, what: str = "") -> Any:
    """Poll until ``predicate`` is true; its value. Fails loudly after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what or predicate}")
        time.sleep(0.01)
    return value


def wait_readable(descriptor: int | socket.socket, timeout: float) -> bool:
    """Wait until a read returns at once; False after ``timeout`` seconds.

    Works for any descriptor: ``select.select`` fails for those above 1,023.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(max(0.0, timeout)))


_candidates = itertools.cycle(random.Random(os.urandom(8)).sample(range(10_000, 32_000), 22_000))
"""Ports below those that the kernel gives to connections, in an order that differs between processes: two
test workers, and the connections of either, do not take a port between its choice and its use."""


def free_ports(count: int) -> list[int]:
    """Return distinct free loopback ports."""
    ports: list[int] = []
    while len(ports) < count:
        with socket.socket() as sock, contextlib.suppress(OSError):  # in use
            sock.bind(("127.0.0.1", port := next(_candidates)))
            ports.append(port)
    return ports


def free_port() -> int:
    (port,) = free_ports(1)
    return port
