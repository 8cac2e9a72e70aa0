"""Programs that run with SGLang's modules, as child processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testing.child_process import ChildProcess, wait_until
from testing.engine import fork_server
from testing.engine.process import EngineFailed
from testing.sglang.environment import variables

# SGLang also reads TMPDIR when it is imported. With the folder of the first program there, all copies would
# use that folder, and create it again after the program's end.
_fork_server = fork_server.ForkServer(
    "testing.sglang.imported", lambda: {**variables(), "TMPDIR": tempfile.gettempdir()}
)


class Program(ChildProcess):
    """``python -m MODULE`` with SGLang's modules, in a process group, which the context manager kills.

    A program needs 10 s of processor time to import SGLang. Where ``fork_server.allowed`` allows it, the
    program starts as a copy of a fork server, which needs none.
    """

    def __init__(
        self,
        name: str,
        log: Path,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the program without waiting for it.

        Args:
            name: the program's name in messages
            log: file for the program's output
            module: the module to run
            arguments: the module's arguments
            environment: variables in addition to those of ``testing.sglang.environment``. A copy reads those
                of OpenMP and of the interpreter when the fork server starts, and not again.
        """
        super().__init__(name, log)
        # SGLang creates UNIX sockets here. Their paths must be short, unlike those of pytest's folders.
        self._folder = Path(tempfile.mkdtemp(prefix="lmc-sglang-"))
        env = {**os.environ, **variables(), "TMPDIR": str(self._folder), **(environment or {})}
        options: dict[str, Any] = {"cwd": str(self._folder), "env": env, "start_new_session": True}
        if fork_server.is_allowed():
            self.adopt(_fork_server.start(module, arguments, log, **options))
        else:
            self.spawn([sys.executable, "-m", module, *arguments], **options)
        self._group = self.pid

    def finish(self, timeout: float = 300) -> str:
        """Wait for the program's end, and return its output. Raises EngineFailed if the program failed."""
        if status := self.wait(timeout):
            raise EngineFailed(f"{self.name} exited with {status}\n{self.log[-4000:]}")
        return self.log

    def processes(self) -> list[int]:
        """Return the ids of the running processes in the program's group."""
        processes = []
        for process in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # the process has ended
                state, _, group = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:3]
                if int(group) == self._group and state not in "ZX":
                    processes.append(int(process))
        return processes

    def kill(self) -> None:
        """Kill all processes of the group, as if the node lost power, and wait for their ends."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGKILL)
        super().kill()
        wait_until(lambda: not self.processes(), what=f"the processes of {self.name} have ended")

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
