"""Workers of pytest-xdist: what each of the processes that share a test run takes for itself."""

from __future__ import annotations

import os


def is_worker() -> bool:
    """Whether other workers run tests beside this process."""
    return "PYTEST_XDIST_WORKER" in os.environ


def core() -> int:
    """Return the core that this worker's engines compute on; the first one without workers."""
    cores = sorted(os.sched_getaffinity(0))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return cores[number % len(cores)]
