"""The slot table after the process that writes rows was killed."""

import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np

from lmcache_store.tiers.header import checksum
from lmcache_store.tiers.memory.arena import ArenaFile
from lmcache_store.tiers.memory.slots import ENTRY, SlotState, SlotTable
from lmcache_store.tiers.memory.tier import MemoryTier
from tests.harness.scope import examples

OWNER = b"o" * 16


CRASHER = """
import random, sys
from pathlib import Path
from lmcache_store.tiers.memory.arena import ArenaFile
from lmcache_store.tiers.memory.contracts import Geometry, Reserved
from lmcache_store.tiers.header import checksum
from lmcache_store.tiers.memory.tier import MemoryTier

owner = b"o" * 16
arena = ArenaFile(sys.argv[1], 2 << 20)
if arena.geometry is None:
    arena.format(Geometry(4096, 2))
tier = MemoryTier(arena)
tier.usable_slots = 60
for _ in tier.adopt():
    pass
tier.end_quarantine(owner)
tier.release_adopted()
for number in range(20_000):  # not for ever: a killed test run ends without this process
    if number == 10:  # with some rows
        print("ready", flush=True)
    name = random.randbytes(64)
    for column in range(2):
        slot = tier.reserve(name, column, owner, length=4096).slot
        arena.view(slot.row, column)[:] = (name + bytes([column]) * 64) * 32
        tier.commit([slot], column, owner)
        if random.random() < 0.5:
            arena.table.record_checksum(slot.row, column, checksum(arena.view(slot.row, column)))
"""


def test_only_intact_rows_are_adopted_after_a_kill(path):
    """Kill a real process at random moments while it stores rows."""
    num_adopted = 0
    for _ in range(examples(12)):
        child = subprocess.Popen([sys.executable, "-c", CRASHER, str(path)], stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"ready\n"
        # The test varies the moment of death; nothing waits for this timeout.
        try:
            child.wait(timeout=random.uniform(0.01, 0.1))
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        num_adopted += check_adopted(path)
    assert num_adopted > 0


def check_adopted(path: Path) -> int:
    arena = ArenaFile(path, 2 << 20)
    tier = MemoryTier(arena)
    tier.usable_slots = 60
    list(tier.adopt())
    entries = arena.table.snapshot(0, arena.num_rows)
    num_adopted = 0
    for row in range(60):
        key = entries[0, row]["key"].tobytes()
        if tier.unverified_slot(key) is None or tier.unverified_slot(key).row != row:
            continue
        num_adopted += 1
        for column in range(2):
            content = bytes(arena.view(row, column))
            assert content == (key + bytes([column]) * 64) * 32
            assert entries[column, row]["checksum"].tobytes() == checksum(content)
    del tier, entries
    arena.close()
    return num_adopted


def test_entries_are_marked_free_while_they_change():
    """Check every store to an entry in write order."""
    entries = np.zeros((1, 1), ENTRY)
    table = SlotTable(entries)
    table.reserve(0, 0, key=b"a" * 64, owner=OWNER, length=7, generation=3, tenant=b"tenant")
    table.commit(0, 0)
    transitions = []

    class RecordingWords:
        def __setitem__(self, index: int, value: int) -> None:
            before = table.snapshot(0, 1)[0, 0]
            words[index] = value
            transitions.append(
                (int(before["state"]), before["key"].tobytes()[:1], int(entries[0, 0]["state"]))
            )

    words, table._words = table._words, cast(Any, RecordingWords())
    table.reserve(0, 0, key=b"b" * 64, owner=OWNER, length=8, generation=4, tenant=b"")
    assert transitions[0] == (SlotState.COMMITTED, b"a", SlotState.FREE)
    assert transitions[-1] == (SlotState.FREE, b"b", SlotState.RESERVED)
    assert {after for _, _, after in transitions[:-1]} == {SlotState.FREE}
    assert (entries[0, 0]["length"], entries[0, 0]["generation"], entries[0, 0]["column"]) == (8, 4, 0)
    assert entries[0, 0]["tenant"] == b"", "not that of an earlier row"
