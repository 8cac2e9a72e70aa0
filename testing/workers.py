"""Workers of pytest-xdist: resources that each of them uses alone."""

from __future__ import annotations

import os

_NUM_SHARES = 16


def is_worker() -> bool:
    """Whether other workers run tests next to this process."""
    return "PYTEST_XDIST_WORKER" in os.environ


def core() -> int:
    """Return the core of this worker's engines. Without workers, the first core."""
    return cores(1)[0]


def cores(num_ranks: int) -> list[int]:
    """Return a core for each rank of an engine. With fewer cores, ranks share them."""
    allowed = sorted(os.sched_getaffinity(0))
    return [allowed[(_number() + rank) % len(allowed)] for rank in range(num_ranks)]


def ports() -> range:
    """Return the ports of this worker's servers. Up to 16 workers have no port in common.

    Each is followed by another port of this worker, for events of an engine's second data-parallel rank. The
    kernel assigns ports from 32,768 on to connections. SGLang chooses ports from 22,000 on.
    """
    return range(10_000 + 2 * (_number() % _NUM_SHARES), 22_000, 2 * _NUM_SHARES)


def _number() -> int:
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
