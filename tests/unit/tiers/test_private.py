"""An arena in the private memory of a process."""

import os
from pathlib import Path

import numpy as np
import pytest

from lmcache_store.tiers.errors import ArenaError
from lmcache_store.tiers.memory.contracts import Geometry
from lmcache_store.tiers.memory.private import PrivateArena

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_slots_are_aligned_for_direct_io_and_writable():
    arena = PrivateArena(Geometry(4096, 1), 16)
    array = np.frombuffer(arena.buffer, np.uint8)
    assert array.ctypes.data % 4096 == 0
    array[4096] = 9
    assert arena.view(1, 0)[0] == 9


def test_memory_is_allocated_at_first_touch():
    before = resident_bytes()
    arena = PrivateArena(Geometry(MIB, 1), 64)
    assert resident_bytes() - before < 16 * MIB
    for row in range(64):
        arena.view(row, 0)[:] = bytes(MIB)
    assert resident_bytes() - before >= 60 * MIB


def test_views_stay_valid_after_close():
    arena = PrivateArena(Geometry(4096, 1), 4)
    view = arena.view(2, 0)
    arena.close()
    view[:4] = b"view"
    assert bytes(view[:4]) == b"view"


def test_error_reports_failed_allocation():
    with pytest.raises(ArenaError, match=r"can't allocate \d+ bytes"):
        PrivateArena(Geometry(1 << 40, 1), 1 << 10)
