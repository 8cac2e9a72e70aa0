"""Workers of pytest-xdist: resources that each of them uses alone."""

from __future__ import annotations

import os

_NUM_SHARES = 16


def is_worker() -> bool:
    """Whether other workers run tests next to this process."""
    return "PYTEST_XDIST_WORKER" in os.environ


def core() -> int:
    """Return the core of this worker's engines. Without workers, the first core."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[_number() % len(cores)]


def ports() -> range:
    """Return the ports of this worker's servers. Up to 16 workers have no port in common.

    The kernel assigns ports from 32,768 on to connections. SGLang chooses ports from 22,000 on.
    """
    return range(10_000 + _number() % _NUM_SHARES, 22_000, _NUM_SHARES)


def _number() -> int:
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
