"""A server process of the control plane: it dies with us, and its own end is told with its log's tail."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

TAIL_LINES = 30


class ComponentDied(RuntimeError):
    """A component ended by itself; the message carries the end of its log."""


@dataclass
class Component:
    """One server process. ``argv`` may be started again on the same data after `kill` or `stop`."""

    name: str
    argv: Sequence[str | Path]
    log: Path
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        # The kernel ends the process when our thread ends, however that comes. setpriv and not preexec_fn:
        # no Python runs between fork and exec.
        argv = ["setpriv", "--pdeathsig", "KILL", "--", *self.argv]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def check(self) -> None:
        """Raises `ComponentDied` when the process was started and has ended."""
        if self.process is not None and self.process.poll() is not None:
            lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
            raise ComponentDied("\n".join([f"{self.name} exited with {self.process.returncode}:", *lines]))

    def kill(self) -> None:
        self._end(signal.SIGKILL, 10)

    def stop(self, grace_seconds: float = 15) -> None:
        self._end(signal.SIGTERM, grace_seconds)

    def _end(self, number: signal.Signals, grace_seconds: float) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_ports(count: int) -> list[int]:
    """Distinct free loopback ports, from the operating system; all are held until all are known."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
