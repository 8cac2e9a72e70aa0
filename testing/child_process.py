"""Child processes that can be started, frozen, killed, and started again on the same data."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
import selectors
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from unittest import mock

from testing import workers

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCES = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "operator", REPOSITORY / "sidecar")))
"""PYTHONPATH of processes that import this project."""
_TAIL_LINES = 30


class ProcessDied(RuntimeError):
    """A process ended by itself. The message carries the end of its log."""


class Process(Protocol):
    """The parts of ``subprocess.Popen`` that ChildProcess uses."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int, /) -> None: ...
    def kill(self) -> None: ...


class ChildProcess:
    """One process at a time, with its output in ``log``. The context manager kills it at the end."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log_path = log
        self._process: Process | None = None

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
        """Output of the process."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def spawn(self, argv: Sequence[str | Path], **options: Any) -> None:
        """Start ``argv`` without waiting. ``options`` are those of Popen."""
        self.check()
        assert self._process is None, "already started"
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*map(str, argv)], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, **options
            )

    def adopt(self, process: Process) -> None:
        """Take over a process that was not started by ``spawn``."""
        self.check()
        assert self._process is None, "already started"
        self._process = process

    def check(self) -> None:
        """Raise ProcessDied if the process was started and has ended by itself."""
        if self._process is not None and (status := self._process.poll()) is not None:
            tail = self.log.splitlines()[-_TAIL_LINES:]
            raise ProcessDied("\n".join([f"{self.name} exited with {status}:", *tail]))

    def wait(self, timeout: float = 60) -> int:
        """Wait until the process has ended by itself. Returns its exit status."""
        status = self._popen.wait(timeout)
        self._process = None
        return status

    def terminate(self, *, timeout: float = 60.0) -> int:
        """Send SIGTERM, and SIGKILL after ``timeout`` seconds. Returns the exit status."""
        return self._end(signal.SIGTERM, timeout)

    def interrupt(self, *, timeout: float = 60.0) -> int:
        """Send SIGINT, and SIGKILL after ``timeout`` seconds. Returns the exit status."""
        return self._end(signal.SIGINT, timeout)

    def kill(self) -> None:
        """Send SIGKILL if the process runs, and wait."""
        if self._process is not None:
            self._process.kill()
            self.wait()

    def freeze(self) -> None:
        """Send SIGSTOP: the kernel still accepts connections and bytes, but nothing answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()

    @property
    def _popen(self) -> Process:
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


def run_in_process(
    main: Callable[[Sequence[str]], int], *words: str | Path
) -> subprocess.CompletedProcess[str]:
    """Run the function ``main`` of a program in this process: another would mostly import modules.

    Its standard input is empty. It must not be called in several threads at once.
    """
    arguments, output, errors = [*map(str, words)], io.StringIO(), io.StringIO()
    with (
        mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO())),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        status = main(arguments)
    return subprocess.CompletedProcess(arguments, status, output.getvalue(), errors.getvalue())


def wait_until(predicate: Callable[[], Any], *, timeout: float = 60.0, what: str = "") -> Any:
    """Poll until ``predicate`` is true, and return its value. Raises AssertionError after ``timeout``.

    Pauses grow to a tenth of the wait: on a busy machine, polls take the time that the process needs.
    """
    began, waited = time.monotonic(), 0.0
    while not (value := predicate()):
        if waited > timeout:
            raise AssertionError(f"not within {timeout} s: {what or predicate}")
        time.sleep(min(max(0.01, waited / 10), 0.1))
        waited = time.monotonic() - began
    return value


def answers(url: str) -> bool:
    """Whether a URL answers with status 200 within two seconds."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:  # also URLError
        return False


def wait_readable(descriptor: int | socket.socket, timeout: float) -> bool:
    """Wait until a read returns at once. Returns False after ``timeout`` seconds.

    Works for any descriptor: ``select.select`` fails for those above 1,023.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(max(0.0, timeout)))


_candidates = itertools.cycle(random.Random(os.urandom(8)).sample(workers.ports(), len(workers.ports())))
"""Ports of this worker in a random order. No other worker, connection or engine takes a port between its
choice and its use. An SGLang server needs seconds in between, and ends if it does not get its port."""


def free_ports(count: int) -> list[int]:
    """Return distinct free ports on loopback."""
    ports: list[int] = []
    while len(ports) < count:
        with socket.socket() as sock, contextlib.suppress(OSError):  # the port is in use
            sock.bind(("127.0.0.1", port := next(_candidates)))
            ports.append(port)
    return ports


def reachable_address() -> str:
    """Return an address of this machine that is not a loopback address.

    The API server's proxy refuses to connect to loopback addresses.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unconnected:
        unconnected.connect(("192.0.2.1", 9))  # this sends nothing
        return str(unconnected.getsockname()[0])


def free_port() -> int:
    (port,) = free_ports(1)
    return port
