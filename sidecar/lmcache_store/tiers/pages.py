"""Size of the pages of slots and files, and fresh pages of private memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import struct
from typing import Literal

from lmcache_store.common.units import round_up

PAGE_BYTES = 4096
"""Slots of an arena, and objects on disk, are whole pages of this length."""

_HUGE_PAGE_BYTES = 2 << 20


def blank_pages(number: int) -> memoryview:
    """Return ``number`` zeroed pages, aligned. The kernel takes only pages that are touched."""
    return memoryview(mmap.mmap(-1, number * PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def transfer_buffer(num_bytes: int) -> memoryview:
    """Return aligned private memory for transfers of up to ``num_bytes``, in huge pages as far as possible.

    O_DIRECT splits a transfer into requests of a limited number of contiguous pieces of memory. A transfer of
    4 MiB from pages of 4 KiB takes two to five times as long as one from huge pages (measured, virtual SSD).
    Only whole huge pages are asked for, so that the buffer takes no more memory than it has.
    """
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    start = round_up(address, _HUGE_PAGE_BYTES) - address
    if whole := num_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return memoryview(memory)[start : start + num_bytes]


def zeros(count: int, code: Literal["B", "I", "Q"]) -> memoryview[int]:
    """Return ``count`` zeros of a ``struct`` code. The kernel takes only pages that are touched."""
    memory = mmap.mmap(-1, max(1, count) * struct.calcsize(code), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memoryview(memory).cast(code)
