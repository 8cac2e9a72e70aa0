"""A server process of the control plane: it dies with us, and starts again on the same data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from testing.child_process import ChildProcess


class Component(ChildProcess):
    """One server process, and the command that starts it."""

    def __init__(self, name: str, argv: Sequence[str | Path], log: Path) -> None:
        super().__init__(name, log)
        self.argv = argv

    def start(self) -> None:
        """Returns at once."""
        # The kernel ends the process when our thread ends, however that comes. setpriv and not preexec_fn:
        # no Python runs between fork and exec.
        self.spawn(["setpriv", "--pdeathsig", "KILL", "--", *self.argv], start_new_session=True)

    def stop(self, grace_seconds: float = 15) -> None:
        """SIGTERM if it runs, and SIGKILL after the grace."""
        if self._process is not None:
            self.terminate(timeout=grace_seconds)
