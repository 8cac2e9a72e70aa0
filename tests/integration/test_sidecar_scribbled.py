"""An engine maps the arena from its start, so it may write over what the sidecar keeps there: the next one
starts, serves, and gives nobody another row's bytes."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from lmcache.tiers.memory.layout import HEAD_BYTES, ArenaLayout, Head
from lmcache.tiers.memory.slots import ENTRY, State
from tests.harness.engine import assert_stored, load, store
from tests.harness.wire import attached, make_keys, usable

NUM_ROWS = 4


@pytest.fixture
def left_behind(sidecar, connect):
    """An arena with rows, of a sidecar that is dead; the new one's session, when it was started again."""
    session = attached(client := connect())
    usable(sidecar)
    store(session, *range(NUM_ROWS))
    sidecar.wait_until(lambda stats: stats["num_unwritten_rows"] == 0)
    sidecar.kill()

    def start_again():
        sidecar.start()
        session_now = attached(client, newer_than=session)
        usable(sidecar)
        return session_now

    return sidecar.arena_path, start_again


def entries_of(path) -> np.memmap:
    """The slot table of the one column."""
    head = Head.parse(path.read_bytes()[:HEAD_BYTES])
    num_rows = ArenaLayout.plan(head.capacity_bytes, head.geometry).num_rows
    return np.memmap(path, ENTRY, "r+", HEAD_BYTES, (num_rows,))


def offered(session) -> int:
    """Leading rows that are there once all that was asked for has been compared with its seal."""
    found = session.lookup("offered", [(0, make_keys(*range(NUM_ROWS)))])
    while found.num_pending:
        found = session.lookup("offered", [(0, make_keys(*range(NUM_ROWS)))])
    session.release(["offered"])
    return found.num_resident


@pytest.mark.parametrize("state", [State.FREE, State.COMMITTED])
@pytest.mark.parametrize("generation", [(1 << 64) - 1, 1 << 63])
def test_an_absurd_generation_costs_its_row_at_most(sidecar, left_behind, generation, state):
    path, start_again = left_behind
    entries = entries_of(path)
    row = int(np.flatnonzero(entries["state"] == state)[0])
    entries["generation"][row] = generation
    entries.flush()
    session = start_again()
    store(session, 100, 101)
    assert_stored(load(session, session, "r", 100, 101), 100, 101)
    assert offered(session) >= (NUM_ROWS if state == State.FREE else 0)


def test_rows_whose_keys_changed_places_are_misses(sidecar, left_behind):
    path, start_again = left_behind
    entries = entries_of(path)
    rows = np.flatnonzero(entries["state"] == State.COMMITTED)[:2]
    entries["key"][rows] = entries["key"][rows[::-1]].copy()
    entries.flush()
    session = start_again()
    assert offered(session) == 0
    # With the head gone nothing is pending any more, though the row after it is still being compared.
    sidecar.wait_until(lambda stats: stats["memory"]["removed"].get("invalid") == 2)
    store(session, 0, 1)
    assert_stored(load(session, session, "r", *range(NUM_ROWS)), *range(NUM_ROWS))


def test_a_key_that_is_written_over_while_the_sidecar_lives_never_names_another_row(sidecar, connect):
    session = attached(connect())
    usable(sidecar)
    store(session, 0)
    entries = entries_of(sidecar.arena_path)
    entries["key"][entries["state"] == State.COMMITTED] = np.void(b"x" * 64)
    for number in range(100, 100 + len(entries), NUM_ROWS):  # every row becomes another key's
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
def test_a_damaged_head_means_an_empty_arena_and_one_line(sidecar, left_behind, offset, scribble):
    path, start_again = left_behind
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(scribble)
    session = start_again()
    assert sidecar.log.count("an empty one replaces it") == 1
    assert offered(session) == 0
    store(session, *range(NUM_ROWS))
    assert_stored(load(session, session, "r", *range(NUM_ROWS)), *range(NUM_ROWS))
