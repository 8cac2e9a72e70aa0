"""Workers of pytest-xdist: resources that each of them uses alone."""

from __future__ import annotations

import os


def is_worker() -> bool:
    """Whether other workers run tests next to this process."""
    return "PYTEST_XDIST_WORKER" in os.environ


def core() -> int:
    """Return the core of this worker's engines. Without workers, the first core."""
    cores = sorted(os.sched_getaffinity(0))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return cores[number % len(cores)]
