"""A server process of the control plane, which ends with its parent and can be restarted on the same data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from testing.child_process import ChildProcess


class Component(ChildProcess):
    """One server process, with the command and additional variables that start it."""

    def __init__(self, name: str, argv: Sequence[str | Path], log: Path, **environment: str) -> None:
        super().__init__(name, log)
        self.argv, self.environment = argv, environment

    def start(self) -> None:
        """Start the process without waiting."""
        # The kernel ends the process when its parent thread ends for any reason. setpriv and not preexec_fn,
        # because no Python may run between fork and exec.
        argv = ["setpriv", "--pdeathsig", "KILL", "--", *self.argv]
        self.spawn(argv, env=os.environ | self.environment, start_new_session=True)

    def start_again(self) -> bool:
        """Start the process again if it was started and has ended by itself. Returns whether it had."""
        has_ended = self._process is not None and self._process.poll() is not None
        if has_ended:
            self.wait()
            self.start()
        return has_ended

    def stop(self, grace_seconds: float = 15) -> None:
        """Send SIGTERM if the process runs, and SIGKILL after the grace period."""
        if self._process is not None:
            self.terminate(timeout=grace_seconds)
