"""An arena whose header or slot table was overwritten. An engine maps the whole arena, so it may do that. The
next sidecar starts, serves, and never returns the bytes of another row.
"""

import struct

import numpy as np
import pytest

from lmcache_store.tiers.memory.layout import HEAD_BYTES, ArenaLayout, Head
from lmcache_store.tiers.memory.slots import ENTRY, SlotState
from testing.deadlines import CALLS
from tests.harness.engine import assert_stored, load, store
from tests.harness.sidecar.wire import attached, make_keys, usable

DEADLINES = CALLS

NUM_ROWS = 4


@pytest.fixture
def abandoned_arena(sidecar, connect):
    """The arena of a killed sidecar, and a function that restarts the sidecar and returns the new session."""
    session = attached(client := connect())
    usable(sidecar)
    store(session, *range(NUM_ROWS))
    sidecar.settled()
    sidecar.kill()

    def restart():
        sidecar.start()
        new_session = attached(client, newer_than=session)
        usable(sidecar)
        return new_session

    return sidecar.arena_path, restart


def entries_of(path) -> np.memmap:
    """The slot table of the only column."""
    head = Head.parse(path.read_bytes()[:HEAD_BYTES])
    num_rows = ArenaLayout.plan(head.capacity_bytes, head.geometry).num_rows
    return np.memmap(path, ENTRY, "r+", HEAD_BYTES, (num_rows,))


def num_offered(session) -> int:
    """Number of leading rows that are resident once all pending checksums are compared."""
    result = session.lookup("num_offered", [(0, make_keys(*range(NUM_ROWS)))])
    while result.num_pending:
        result = session.lookup("num_offered", [(0, make_keys(*range(NUM_ROWS)))])
    session.release(["num_offered"])
    return result.num_resident


@pytest.mark.parametrize("state", [SlotState.FREE, SlotState.COMMITTED])
@pytest.mark.parametrize("generation", [(1 << 64) - 1, 1 << 63])
def test_absurd_generation_costs_at_most_its_row(sidecar, abandoned_arena, generation, state):
    path, restart = abandoned_arena
    entries = entries_of(path)
    row = int(np.flatnonzero(entries["state"] == state)[0])
    entries["generation"][row] = generation
    entries.flush()
    session = restart()
    store(session, 100, 101)
    assert_stored(load(session, session, "r", 100, 101), 100, 101)
    assert num_offered(session) >= (NUM_ROWS if state == SlotState.FREE else 0)


def test_rows_with_swapped_keys_are_misses(sidecar, abandoned_arena):
    path, restart = abandoned_arena
    entries = entries_of(path)
    rows = np.flatnonzero(entries["state"] == SlotState.COMMITTED)[:2]
    entries["key"][rows] = entries["key"][rows[::-1]].copy()
    entries.flush()
    session = restart()
    assert num_offered(session) == 0
    # The first row is invalid, so nothing is pending, though the second row is still being compared.
    sidecar.wait_until(lambda stats: stats["memory"]["removed"].get("invalid") == 2)
    store(session, 0, 1)
    assert num_offered(session) == NUM_ROWS  # the other two rows may still be compared
    assert_stored(load(session, session, "r", *range(NUM_ROWS)), *range(NUM_ROWS))


def test_key_overwritten_at_run_time_never_names_another_row(sidecar, attach):
    session = attach()
    store(session, 0)
    entries = entries_of(sidecar.arena_path)
    entries["key"][entries["state"] == SlotState.COMMITTED] = np.void(b"x" * 64)
    for number in range(100, 100 + len(entries), NUM_ROWS):  # every row is reused for another key
        store(session, *range(number, number + NUM_ROWS))
    assert_stored(load(session, session, "r", 0))
    store(session, 0)
    assert_stored(load(session, session, "r", 0), 0)


@pytest.mark.parametrize(
    ("offset", "scribble"),
    [
        (12, struct.pack("<I", 1 << 31)),  # columns
        (40, struct.pack("<Q", 1 << 62)),  # bytes of a slot
        (32, struct.pack("<Q", (1 << 64) - 1)),  # first generation
        (0, b"\xff" * 4096),
    ],
)
def test_damaged_head_gives_an_empty_arena_and_one_log_line(sidecar, abandoned_arena, offset, scribble):
    path, restart = abandoned_arena
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(scribble)
    session = restart()
    assert sidecar.log.count("replacing the arena") == 1
    assert num_offered(session) == 0
    store(session, *range(NUM_ROWS))
    assert_stored(load(session, session, "r", *range(NUM_ROWS)), *range(NUM_ROWS))
