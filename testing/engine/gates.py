"""Gates for the copies of engines: files that hold loads or stores while they exist."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from testing.engine.environment import LOAD_GATE, STORE_GATE


def hold_copies() -> None:
    """Let the copies of this process wait at the gates that its environment names."""
    for name, variable in (("load", LOAD_GATE), ("store", STORE_GATE)):
        if variable in os.environ:
            _hold(name, Path(os.environ[variable]))


def _hold(name: str, gate: Path) -> None:
    from lmcache_client.core.copier import CpuCopier

    copy = getattr(CpuCopier, name)

    def wait_and_copy(*args: Any) -> None:
        while gate.exists():
            with contextlib.suppress(FileNotFoundError), gate.open("r+") as file:
                file.write("waiting")
            time.sleep(0.001)
        copy(*args)

    setattr(CpuCopier, name, wait_and_copy)
