"""Description of the machine that a report was measured on."""

from __future__ import annotations

import os
import platform


def machine() -> str:
    """Return the number of cores, the system and Python's version."""
    system = f"{platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores, {system}"
