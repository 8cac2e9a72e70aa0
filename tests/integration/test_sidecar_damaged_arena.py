"""An arena whose header or slot table was overwritten, or whose file was shortened. An engine maps the whole
arena, so it may do that. The next sidecar starts, serves, and never returns the bytes of another row.
"""

import contextlib
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lmcache_client.rpc.client import SidecarClient
from lmcache_store.tiers.memory.layout import HEAD_BYTES, ArenaLayout, Head
from lmcache_store.tiers.memory.slots import ENTRY, SlotState
from testing.child_process import REPOSITORY, wait_until
from testing.deadlines import CALLS
from testing.processes import SidecarProcess
from tests.harness.engine import assert_stored, check_promoted, load, store
from tests.harness.sidecar.wire import attached, make_hello, make_keys, usable

DEADLINES = CALLS

NUM_ROWS = 4

ENGINE = """
import sys
from lmcache_client.rpc.client import SidecarClient
from lmcache_client.rpc.errors import SidecarError
from tests.harness.engine import CHUNK_BYTES, assert_stored, load, store
from tests.harness.sidecar.wire import attached, make_hello, make_keys, slots_of

def answer(text):
    print(text, flush=True)
    sys.stdin.readline()

rows = range(4)
client = SidecarClient(sys.argv[1], make_hello(engine_uuid=b"c" * 16))
client.start()
session = attached(client)
answer("attached")
store(session, *rows)
slots = slots_of(session, make_keys(*rows))
answer(f"stored {len(slots)}")
num_valid, num_readable = sum(map(session.holds, slots)), 0
for slot in slots:
    try:
        num_readable += session.view(slot.row, CHUNK_BYTES).any()
    except SidecarError:
        pass
answer(f"found {len(slots_of(session, make_keys(*rows)))}, valid {num_valid}, readable {num_readable}")
session = attached(client, newer_than=session)
answer("attached")
store(session, *rows)
assert_stored(load(session, session, "r", *rows), *rows)
answer("served")
client.close()
"""
"""Program of an engine: attach, store, look at the rows, attach again, store, load."""


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


@pytest.fixture
def engine(sidecar):
    """A process of an engine, and a function that lets it go on and compares what it prints next."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE, sidecar.socket_path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY,
    )  # fmt: skip

    def expect(text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write("\n")
            process.stdin.flush()
        assert process.stdout.readline() == f"{text}\n"

    with process:
        assert process.stdout.readline() == "attached\n"
        sidecar.wait_usable()
        yield expect
        process.kill()


@pytest.mark.parametrize("num_bytes", [0, 4096, 32 << 20, 128 << 20])
def test_file_of_another_length_ends_no_process_and_is_replaced(sidecar, engine, num_bytes):
    engine(f"stored {NUM_ROWS}")
    sidecar.settled()
    sidecar.freeze()
    os.truncate(sidecar.arena_path, num_bytes)
    engine("found 0, valid 0, readable 0")
    sidecar.thaw()
    engine("attached")
    sidecar.wait_usable()
    engine("served")
    assert sidecar.get("/readyz") == "ready\n"
    assert sidecar.stats()["arenas_lost"] == 1
    assert sidecar.log.count("another process changed the length of the arena") == 1


def test_removed_file_is_replaced_and_rows_on_disk_remain(tmp_path):
    with SidecarProcess(disk_path=tmp_path / "disk", disk_size="64Mi") as sidecar:
        client = SidecarClient(sidecar.socket_path, make_hello())
        client.start()
        session = attached(client)
        usable(sidecar)
        store(session, 0)
        sidecar.settled()
        sidecar.arena_path.unlink()
        session = attached(client, newer_than=session)
        usable(sidecar)
        check_promoted(session, 0)
        assert sidecar.stats()["arenas_lost"] == 1
        client.close()


def test_sidecar_unmaps_lost_arenas(sidecar, connect):
    """Memory of a lost arena is missing for its successor, in a volume that has the size of one."""
    client, session = connect(), None
    for _ in range(3):
        session = attached(client, newer_than=session)
        usable(sidecar)
        store(session, *range(NUM_ROWS))
        sidecar.settled()
        sidecar.arena_path.unlink()
    attached(client, newer_than=session)
    assert "(deleted)" not in Path(f"/proc/{sidecar.pid}/maps").read_text()


def test_sidecar_tries_again_while_it_cannot_replace_a_lost_arena(sidecar, connect):
    session = attached(client := connect())
    sidecar.freeze()
    sidecar.arena_path.unlink()
    sidecar.arena_path.mkdir()
    sidecar.thaw()
    wait_until(lambda: "tries again" in sidecar.log)
    assert "Is a directory" in sidecar.stats()["not_ready_reason"]
    sidecar.arena_path.rmdir()
    attached(client, newer_than=session)
