"""The amount of host memory that the CUDA driver has pinned. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class PinStatus(NamedTuple):
    """The pinned part of a range of memory, and failures to pin it."""

    pinned_bytes: int = 0
    num_failures: int = 0
    """Number of extents that the driver refused to pin; their copies are slow."""
    problem: str = ""
    """The driver's first error; empty if there was none."""

    @classmethod
    def total(cls, statuses: Iterable[PinStatus]) -> PinStatus:
        """Sum up several ranges of memory. The total has the first error of all ranges."""
        parts = list(statuses)
        problem = next((part.problem for part in parts if part.problem), "")
        return cls(sum(p.pinned_bytes for p in parts), sum(p.num_failures for p in parts), problem)
