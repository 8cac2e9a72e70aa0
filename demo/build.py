"""The build of the Kubernetes programs in the background: it stops while something is measured."""

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
"""Ends the group when the demo ends without a word, by a SIGKILL for example."""
_GRACE_SECONDS = 5


class Build:
    """A command in a process group of its own, with the lowest priority. A context manager that ends it.

    A watcher outside the group ends the group when the demo dies. Neither a running build nor a stopped one
    stays behind. `handle` survives an exec of the demo: the process that follows adopts the build.
    """

    def __init__(self, pid: int, watcher: int, pipe: int, log: Path) -> None:
        self.pid, self._watcher, self._pipe = pid, watcher, pipe
        self._log = log
        self.status: int | None = None
        """The exit status, once the build is over."""

    @classmethod
    def start(cls, argv: Sequence[str], log: Path) -> Build:
        """Run ``argv``; its output goes to ``log``."""
        mode = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        files = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), mode, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        # A group in our session: Linux compares priorities within a session only.
        # Where the demo runs in the background, its children would ignore an interrupt.
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
        """What `adopt` needs. The pipe is open in the process that follows by exec, and in our children."""
        os.set_inheritable(self._pipe, True)
        return f"{self.pid}:{self._watcher}:{self._pipe}"

    @classmethod
    def adopt(cls, handle: str, log: Path) -> Build:
        """The build that this process started before it was another program."""
        pid, watcher, pipe = map(int, handle.split(":"))
        os.set_inheritable(pipe, False)
        return cls(pid, watcher, pipe, log)

    def __enter__(self) -> Build:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def log(self) -> str:
        """What the build wrote."""
        return self._log.read_text(errors="replace")

    def progress(self) -> str:
        """One line; empty when the build is over."""
        if self.is_over():
            return ""
        lines = self.log.strip().splitlines()
        return f"building Kubernetes for part 2: {lines[-1].removeprefix('[kube]').strip() if lines else ''}"

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop all processes of the build; they continue at the end of the block, also after an exception."""
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
        """Whether the build ends within ``timeout`` seconds; `status` is set then."""
        if self.status is None and self._ends_within(timeout):
            self._reap()
        return self.status is not None

    def close(self) -> None:
        """End the build if it is not over: by an interrupt, after which it tidies up, then by force."""
        if self.is_over():
            return
        self._signal(signal.SIGINT)
        self._signal(signal.SIGCONT)
        if not self.is_over(_GRACE_SECONDS):
            self._signal(signal.SIGKILL)
            self.is_over(_GRACE_SECONDS)

    def _ends_within(self, timeout: float) -> bool:
        descriptor = os.pidfd_open(self.pid)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(descriptor, selectors.EVENT_READ)
                return bool(selector.select(timeout))
        finally:
            os.close(descriptor)

    def _reap(self) -> None:
        # Until the last line the group's number can't be another group's: its leader is a zombie.
        self._signal(signal.SIGKILL)  # children that outlived the leader
        os.write(self._pipe, b"\n")
        os.close(self._pipe)
        os.waitpid(self._watcher, 0)
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def members(group: int) -> dict[int, str]:
    """The processes of a group, each with the letter of its state."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # ended meanwhile
            continue
        if int(pgrp) == group:
            found[int(path.parent.name)] = state
    return found


def kubernetes(log: Path, programs: Sequence[str]) -> Build:
    """The build of what is missing of ``programs``; where nothing is missing it ends at once."""
    return Build.start([sys.executable, "-m", "tools.kube.machine", *programs], log)
