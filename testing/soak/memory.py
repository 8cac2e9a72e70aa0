"""Memory of a process over time, and its trend."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

MEBIBYTE = 1 << 20


class Trend(NamedTuple):
    """A line through samples of a process's memory."""

    mebibytes: float
    """Memory at the end of the line."""
    growth_mebibytes: float
    """Growth along the line, from its begin to its end."""
    seconds: float
    """Time between the first and the last sample."""


def private_bytes(pid: int) -> int:
    """Return the bytes that only this process has in memory: not the arena, and no code.

    Raises OSError if there is no such process.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def trend(samples: list[tuple[float, int]]) -> Trend:
    """Fit a line to the last half of samples of (seconds, bytes). Raises ValueError for too few samples."""
    if len(samples) < 4:
        raise ValueError(f"{len(samples)} samples of the memory are too few for a trend")
    middle = (samples[0][0] + samples[-1][0]) / 2
    times, sizes = np.array([sample for sample in samples if sample[0] >= middle]).T
    slope, start = np.polyfit(times - times[0], sizes / MEBIBYTE, 1)
    seconds = float(times[-1] - times[0])
    return Trend(float(start + slope * seconds), float(slope * seconds), seconds)
