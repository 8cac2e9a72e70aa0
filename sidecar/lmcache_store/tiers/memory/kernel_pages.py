"""Calls to the kernel about pages of memory. Every call releases the GIL. Linux only.

The caller is usually the arena: the file in shared memory that holds the memory tier.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmcache_store.common import numa
from lmcache_store.tiers.errors import ArenaError

# Python's mmap module lacks these constants, or has them only in later versions.
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1
_FALLOC_KEEP_SIZE_PUNCH_HOLE = 1 | 2
_STAT_BLOCK_BYTES = 512  # unit of st_blocks, on all file systems

_MEMORY_FILE_SYSTEMS = {0x01021994, 0x958458F6, 0x858458F6}  # tmpfs, hugetlbfs, ramfs

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def populate(memory: NDArray[np.uint8]) -> None:
    """Fault in all pages of a mapped range, writable. (mmap.madvise would hold the GIL.)

    Raises ArenaError when memory is exhausted or Linux is older than 5.14.
    """
    if _advise(memory, _MADV_POPULATE_WRITE):
        raise ArenaError(
            f"can't populate {memory.nbytes} bytes of the arena (needs Linux 5.14): {_last_error()}"
        )


def prefer_huge_pages(memory: NDArray[np.uint8]) -> None:
    """Ask for huge pages for memory that is not yet taken; they cause fewer TLB misses.

    Without effect where the system's settings or the free memory do not allow huge pages."""
    _advise(memory, mmap.MADV_HUGEPAGE)


def collapse(memory: NDArray[np.uint8]) -> None:
    """Turn populated pages into huge pages, regardless of the system's settings, as far as possible."""
    _advise(memory, _MADV_COLLAPSE)


def punch_hole(fd: int, offset: int, num_bytes: int) -> None:
    """Return a part of a file's memory to the kernel. The file keeps its size.

    The part then reads as zeros, and a process that has it mapped gets no SIGBUS. Raises ArenaError if the
    file system does not support holes."""
    if _libc.fallocate(fd, _FALLOC_KEEP_SIZE_PUNCH_HOLE, offset, num_bytes):
        raise ArenaError(f"can't return {num_bytes} bytes of the arena to the kernel: {_last_error()}")


def first_data(fd: int, start: int, end: int) -> int:
    """Return the offset of the first page in this part of a file that takes memory; ``end`` if none."""
    try:
        return min(os.lseek(fd, start, os.SEEK_DATA), end)
    except OSError:  # no data up to the end of the file
        return end


def taken_bytes(fd: int) -> int:
    """Return the bytes of memory that a file takes."""
    return os.fstat(fd).st_blocks * _STAT_BLOCK_BYTES


def missing_bytes(fd: int, start: int, end: int) -> int:
    """Return the bytes in this part of a file that take no memory."""
    missing, offset = 0, start
    while offset < end:
        data = first_data(fd, offset, end)
        missing += data - offset
        offset = min(os.lseek(fd, data, os.SEEK_HOLE), end) if data < end else end
    return missing


def reason_not_pinnable(path: Path) -> str:
    """Return why GPUs can't use an arena at this path, with the remedy; empty if they can."""
    status = (ctypes.c_long * 64)()  # more than a struct statfs, which begins with the type
    if not _libc.statfs(os.fsencode(path.parent), status) and status[0] in _MEMORY_FILE_SYSTEMS:
        return ""
    return (
        f"{path} is not on tmpfs, and Linux 6.5 and later refuse to pin it for a GPU: "
        "put --arena on tmpfs (in Kubernetes an emptyDir with medium: Memory)"
    )


def check_node(node: int) -> None:
    """Raise ArenaError if this process can't take memory on this NUMA node."""
    if node not in (nodes := numa.nodes()):
        raise ArenaError(f"no NUMA node {node}; the nodes are {', '.join(map(str, nodes)) or 'none'}")
    if not numa.cores_of(node) & os.sched_getaffinity(0):
        raise ArenaError(f"this process may use no core of NUMA node {node}, so its pages can't lie there")


def _advise(memory: NDArray[np.uint8], advice: int) -> int:
    result: int = _libc.madvise(*_whole_pages(memory), advice)
    return result


def _whole_pages(memory: NDArray[np.uint8]) -> tuple[int, int]:
    """Return address and length of the range, extended to the start of its first page."""
    start: int = memory.ctypes.data
    first = start - start % mmap.PAGESIZE
    return first, start + memory.nbytes - first


def _last_error() -> str:
    return os.strerror(ctypes.get_errno())
