"""How much memory of the host the CUDA driver has pinned. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class PinStatus(NamedTuple):
    """How much of the memory is pinned."""

    pinned_bytes: int = 0
    num_failures: int = 0
    """Extents that the driver refused to pin; their copies are slow."""
    problem: str = ""
    """The driver's first error; empty: there was none."""

    @classmethod
    def total(cls, statuses: Iterable[PinStatus]) -> PinStatus:
        """Sum up several stretches of memory; the first error stands for all of them."""
        pinned_bytes, num_failures, problem = 0, 0, ""
        for status in statuses:
            pinned_bytes += status.pinned_bytes
            num_failures += status.num_failures
            problem = problem or status.problem
        return cls(pinned_bytes, num_failures, problem)
