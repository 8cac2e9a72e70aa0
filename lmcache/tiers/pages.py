"""Size of the pages of slots and files, and fresh pages of private memory."""

from __future__ import annotations

import mmap
import struct
from typing import Literal

PAGE_BYTES = 4096
"""Slots of an arena, and objects on disk, are whole pages of this length."""


def blank_pages(number: int) -> memoryview:
    """Return ``number`` zeroed pages, aligned. The kernel takes only pages that are touched."""
    return memoryview(mmap.mmap(-1, number * PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def zeros(count: int, code: Literal["B", "I", "Q"]) -> memoryview[int]:
    """Return ``count`` zeros of a ``struct`` code. The kernel takes only pages that are touched."""
    memory = mmap.mmap(-1, max(1, count) * struct.calcsize(code), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memoryview(memory).cast(code)
