"""What the kernel is asked about our pages. Every call releases the GIL; all of it is Linux."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmcache.tiers.errors import ArenaError
from lmcache.units import round_up

# Not in the mmap module, or only in later versions of Python.
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1
_FALLOC_KEEP_SIZE_PUNCH_HOLE = 1 | 2
_MPOL_PREFERRED = 1
_STAT_BLOCK_BYTES = 512  # whatever the file system's are
_MBIND = {"x86_64": 237, "aarch64": 235}  # number of the system call, which libc does not wrap

_NODES = Path("/sys/devices/system/node")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.syscall.restype = ctypes.c_long


def populate(memory: NDArray[np.uint8]) -> None:
    """Fault all pages of a mapped range in, writable (mmap.madvise would hold the GIL).

    Raises ArenaError when the kernel can't: out of memory, or older than 5.14.
    """
    if _advise(memory, _MADV_POPULATE_WRITE):
        raise ArenaError(
            f"can't populate {memory.nbytes} bytes of the arena (needs Linux 5.14): {_last_error()}"
        )


def prefer_huge_pages(memory: NDArray[np.uint8]) -> None:
    """Let pages that are yet to be taken be huge ones, where the system's settings and free memory allow it:
    fewer TLB misses. Where they don't, nothing changes."""
    _advise(memory, mmap.MADV_HUGEPAGE)


def collapse(memory: NDArray[np.uint8]) -> None:
    """Make huge pages of populated ones, whatever the system's settings, as far as the kernel can."""
    _advise(memory, _MADV_COLLAPSE)


def discard(memory: NDArray[np.uint8]) -> None:
    """Give the whole pages of a range of private memory back; they read as zeros from now on."""
    start = round_up(memory.ctypes.data, mmap.PAGESIZE)
    end = (memory.ctypes.data + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        _libc.madvise(start, end - start, mmap.MADV_DONTNEED)


def punch_hole(fd: int, offset: int, num_bytes: int) -> None:
    """Give a file's memory back, keeping its size: it reads as zeros, and nobody who has it mapped gets a
    SIGBUS. Raises ArenaError when the file system can't."""
    if _libc.fallocate(fd, _FALLOC_KEEP_SIZE_PUNCH_HOLE, offset, num_bytes):
        raise ArenaError(f"can't give back {num_bytes} bytes of the arena: {_last_error()}")


def first_data(fd: int, start: int, end: int) -> int:
    """Return where, in this part of a file, the first page is that takes memory; ``end``: nowhere."""
    try:
        return min(os.lseek(fd, start, os.SEEK_DATA), end)
    except OSError:  # there is none up to the end of the file
        return end


def taken_bytes(fd: int) -> int:
    """Return how much memory a file takes."""
    return os.fstat(fd).st_blocks * _STAT_BLOCK_BYTES


def missing_bytes(fd: int, start: int, end: int) -> int:
    """Return how much of this part of a file takes no memory yet."""
    missing, at = 0, start
    while at < end:
        data = first_data(fd, at, end)
        missing += data - at
        at = min(os.lseek(fd, data, os.SEEK_HOLE), end) if data < end else end
    return missing


def check_node(node: int) -> None:
    """Raise ArenaError when there is no such NUMA node."""
    nodes = numa_nodes()
    if node not in nodes:
        raise ArenaError(f"there is no NUMA node {node}; there are {', '.join(map(str, nodes)) or 'none'}")


def place(memory: NDArray[np.uint8], node: int) -> None:
    """Take pages from this NUMA node as long as it has any (a strict choice would end in the OOM killer).

    Raises ArenaError when the process may not choose.
    """
    mask = ctypes.c_uint64 * (node // 64 + 1)
    wanted = mask(*([0] * (node // 64)), 1 << node % 64)
    start, num_bytes = _whole_pages(memory)
    memory_range = ctypes.c_void_p(start), ctypes.c_size_t(num_bytes)
    num_bits = ctypes.c_ulong(len(wanted) * 64 + 1)  # the kernel wants one more
    mbind = ctypes.c_long(_MBIND.get(platform.machine(), -1))
    if _libc.syscall(mbind, *memory_range, _MPOL_PREFERRED, wanted, num_bits, 0):
        raise ArenaError(f"can't place the arena on NUMA node {node}: {_last_error()}")


def numa_nodes() -> list[int]:
    """Numbers of the nodes that have memory."""
    try:
        listed = (_NODES / "has_memory").read_text().strip()
    except OSError:
        return []
    ranges = (part.partition("-") for part in listed.split(",") if part)
    return [node for first, _, last in ranges for node in range(int(first), int(last or first) + 1)]


def _advise(memory: NDArray[np.uint8], advice: int) -> int:
    result: int = _libc.madvise(*_whole_pages(memory), advice)
    return result


def _whole_pages(memory: NDArray[np.uint8]) -> tuple[int, int]:
    """Address and bytes from the beginning of the page in which the range begins."""
    start: int = memory.ctypes.data
    first = start - start % mmap.PAGESIZE
    return first, start + memory.nbytes - first


def _last_error() -> str:
    return os.strerror(ctypes.get_errno())
