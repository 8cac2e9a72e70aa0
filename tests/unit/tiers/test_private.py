"""An arena in this process's own memory."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from lmcache.tiers.base import Geometry
from lmcache.tiers.private import PrivateArena

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_slots_lie_apart_and_one_after_the_other():
    arena = PrivateArena(Geometry(8192, 2), 20)
    for row in range(20):
        for column in range(2):
            arena.view(row, column)[:] = bytes([row, column]) * 4096
    assert bytes(arena.buffer) == b"".join(
        bytes([row, column]) * 4096 for column in range(2) for row in range(20)
    )
    assert bytes(arena.view(3, 1, 8192 + 2)) == bytes([3, 1]) * 4096 + bytes([4, 1])
    assert arena.table.num_columns == 2


def test_slots_are_fit_for_direct_io_and_the_buffer_is_writable():
    arena = PrivateArena(Geometry(4096, 1), 16)
    array = np.frombuffer(arena.buffer, np.uint8)
    assert array.ctypes.data % 4096 == 0
    array[4096] = 9
    assert arena.view(1, 0)[0] == 9


def test_memory_is_taken_when_it_is_touched_or_in_the_background():
    before = resident_bytes()
    arena = PrivateArena(Geometry(MIB, 1), 64)
    assert resident_bytes() - before < 16 * MIB
    arena.start()
    deadline = time.monotonic() + 20
    while resident_bytes() - before < 64 * MIB:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    arena.close()


def test_closing_waits_for_no_view():
    arena = PrivateArena(Geometry(4096, 1), 4)
    view = arena.view(2, 0)
    arena.close()
    view[:4] = b"mine"
    assert bytes(view[:4]) == b"mine"
