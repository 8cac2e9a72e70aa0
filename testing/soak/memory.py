"""Memory of a sidecar over time, without the ring of samples, and its trend."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

MEBIBYTE = 1 << 20
RING_REQUEST_BYTES = 400
"""Memory of a request in the ring that ``/samples`` serves, measured: 388 bytes.

The ring grows until it holds the requests of eight minutes, at most 65,536 requests. This takes up to 23
minutes and up to 25 MiB. A leak of the same size would look the same.
"""


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


def without_ring(num_bytes: int, num_in_ring: int) -> int:
    """Return the memory of a sidecar without the requests in its ring of samples, in bytes."""
    return num_bytes - num_in_ring * RING_REQUEST_BYTES


def trend(samples: list[tuple[float, int]]) -> Trend:
    """Fit a line to the last half of samples of (seconds, bytes). Raises ValueError for too few samples."""
    if len(samples) < 4:
        raise ValueError(f"{len(samples)} samples of the memory are too few for a trend")
    middle = (samples[0][0] + samples[-1][0]) / 2
    times, sizes = np.array([sample for sample in samples if sample[0] >= middle]).T
    slope, start = np.polyfit(times - times[0], sizes / MEBIBYTE, 1)
    seconds = float(times[-1] - times[0])
    return Trend(float(start + slope * seconds), float(slope * seconds), seconds)
