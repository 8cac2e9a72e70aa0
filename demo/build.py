"""Build the Kubernetes programs in the background. Measurements pause the build."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_WATCHER = """
read -r _ && exit
kill -s INT -- "-$0" && kill -s CONT -- "-$0"
for _ in 1 2 3 4 5 6 7 8 9 10; do sleep 0.5; kill -s 0 -- "-$0" || exit; done
kill -s KILL -- "-$0"
"""
"""Shell script that ends the build if the demo ends without a clean-up, for example by SIGKILL."""
_GRACE_SECONDS, _KILL_SECONDS = 5, 60


class Build:
    """A command in its own process group, with the lowest priority. The context manager ends the command.

    A watcher outside the group ends the group when the demo dies, also while the build is paused. `handle`
    survives an exec of the demo, so that the next program adopts the build.
    """

    def __init__(self, pid: int, watcher: int, pipe: int, log: Path) -> None:
        self.pid, self._watcher, self._pipe = pid, watcher, pipe
        self._log = log
        self.status: int | None = None
        """Exit status of a finished build, or None."""

    @classmethod
    def start(cls, argv: Sequence[str], log: Path) -> Build:
        """Run ``argv`` and write its output to ``log``."""
        mode = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        files = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), mode, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        # The group stays in the demo's session, because Linux compares priorities only within a session.
        # If the demo runs in the background, its children would otherwise ignore an interrupt.
        interrupts = [signal.SIGINT]
        command = ["nice", "-n", "19", *argv]
        pid = os.posix_spawnp(
            "nice", command, os.environ, file_actions=files, setpgroup=0, setsigdef=interrupts
        )
        end, pipe = os.pipe()
        watcher = os.posix_spawn(
            "/bin/sh",
            ["sh", "-c", _WATCHER, str(pid)],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, end, 0),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
            setsid=True,
        )
        os.close(end)
        return cls(pid, watcher, pipe, log)

    @property
    def handle(self) -> str:
        """Argument of `adopt`. Makes the pipe survive an exec; child processes inherit the pipe, too."""
        os.set_inheritable(self._pipe, True)
        return f"{self.pid}:{self._watcher}:{self._pipe}"

    @classmethod
    def adopt(cls, handle: str, log: Path) -> Build:
        """Return the build that this process started before its exec."""
        pid, watcher, pipe = map(int, handle.split(":"))
        os.set_inheritable(pipe, False)
        return cls(pid, watcher, pipe, log)

    def __enter__(self) -> Build:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def log(self) -> str:
        """Output of the build, so far."""
        return self._log.read_text(errors="replace")

    def progress(self) -> str:
        """Return a line about the progress; empty: the build is over."""
        if self.is_over():
            return ""
        lines = self.log.strip().splitlines()
        return f"building Kubernetes for part 2: {lines[-1].removeprefix('[kube]').strip() if lines else ''}"

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause all processes of the build until the end of the block, also after an exception."""
        if self.is_over():
            yield
            return
        self._signal(signal.SIGSTOP)
        try:
            while any(state not in "TtZX" for state in members(self.pid).values()):
                time.sleep(0.001)
            yield
        finally:
            self._signal(signal.SIGCONT)

    def is_over(self, timeout: float = 0) -> bool:
        """Return whether the build ends within ``timeout`` seconds. Sets `status` if so."""
        if self.status is None and self._ends_within(timeout):
            self._reap()
        return self.status is not None

    def close(self) -> None:
        """End an unfinished build: first by an interrupt, so that it can clean up, then by SIGKILL."""
        if self.is_over():
            return
        self._signal(signal.SIGINT)
        self._signal(signal.SIGCONT)
        if not self.is_over(_GRACE_SECONDS):
            self._signal(signal.SIGKILL)
            self.is_over(_KILL_SECONDS)

    def _ends_within(self, timeout: float) -> bool:
        descriptor = os.pidfd_open(self.pid)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(descriptor, selectors.EVENT_READ)
                return bool(selector.select(timeout))
        finally:
            os.close(descriptor)

    def _reap(self) -> None:
        # The leader is a zombie until the last line, so no other group can get this group's number.
        self._signal(signal.SIGKILL)  # children that outlived the leader
        os.write(self._pipe, b"\n")
        os.close(self._pipe)
        os.waitpid(self._watcher, 0)
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def members(group: int) -> dict[int, str]:
    """Return the state letter of each process of a group, by process number."""
    states = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # the process has ended
            continue
        if int(pgrp) == group:
            states[int(path.parent.name)] = state
    return states


def kubernetes(log: Path, programs: Sequence[str]) -> Build:
    """Start the build of missing ``programs``. It ends at once if no program is missing."""
    return Build.start([sys.executable, "-m", "tools.kube.machine", *programs], log)
