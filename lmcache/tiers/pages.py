"""Whole pages: what slots and files are made of, and fresh ones of this process's own memory."""

from __future__ import annotations

import mmap
import struct
from typing import Literal

PAGE_BYTES = 4096
"""Slots of an arena and objects on disk are whole pages."""


def blank_pages(number: int) -> memoryview:
    """Return aligned memory that reads as zeros; only what is touched is taken."""
    return memoryview(mmap.mmap(-1, number * PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def zeros(count: int, code: Literal["B", "I", "Q"]) -> memoryview[int]:
    """Return ``count`` numbers of a ``struct`` code, all 0; only what is touched takes memory."""
    memory = mmap.mmap(-1, max(1, count) * struct.calcsize(code), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memoryview(memory).cast(code)
