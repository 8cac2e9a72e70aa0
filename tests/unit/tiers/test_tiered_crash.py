"""A process with a disk tier is killed while it writes: the rows that it drained are on disk."""

import asyncio
import itertools
import subprocess
import sys
from pathlib import Path

from lmcache.tiers.base import ObjectId
from lmcache.tiers.disk.tier import DiskTier
from lmcache.tiers.memory.contracts import Geometry
from lmcache.tiers.memory.private import PrivateArena
from lmcache.tiers.tiered.store import TieredStore
from testing.child_process import REPOSITORY
from tests.harness.tiered_world import NAMESPACE, NUM_COLUMNS, OWNER, chain, content

SLOT_BYTES = 1 << 20
REPEATS = SLOT_BYTES // 4096
CAPACITY_BYTES = 1 << 30
NUM_DRAINED = 20  # more rows than the arena holds; more follow until the kill


async def write_until_killed(folder: str) -> None:
    """Write one row after the other, and print a line for each drained row."""
    arena = PrivateArena(Geometry(SLOT_BYTES, NUM_COLUMNS), 16)
    store = TieredStore(arena, {"disk": DiskTier(folder, CAPACITY_BYTES)})
    await store.adopt()
    store.register(NAMESPACE)
    for number in itertools.count():
        (key,) = chain(1, start=number)
        for column in range(NUM_COLUMNS):
            (answer,) = store.reserve([key], column, OWNER, length=SLOT_BYTES)
            assert answer.slot
            arena.view(answer.slot.row, column)[:] = content(key, column) * REPEATS
            store.commit([answer.slot], column, OWNER)
        assert await store.drain(60)
        assert not store.lower["disk"].stats.writes_skipped.total()
        print(number, flush=True)


def test_drained_rows_survive_a_kill(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.tiers.test_tiered_crash", str(tmp_path)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    for _ in range(NUM_DRAINED):
        assert process.stdout.readline()
    process.kill()
    num_drained = NUM_DRAINED + len(process.stdout.read().splitlines())
    process.wait()
    disk = DiskTier(Path(tmp_path), CAPACITY_BYTES)
    into = memoryview(bytearray(SLOT_BYTES))
    assert disk.probe(chain(num_drained + 1), NUM_COLUMNS) >= num_drained
    for key in chain(num_drained):
        for column in range(NUM_COLUMNS):
            assert disk.load(ObjectId(key, column), into, SLOT_BYTES) is not None
            assert into == content(key, column) * REPEATS
    disk.close()


if __name__ == "__main__":
    asyncio.run(write_until_killed(sys.argv[1]))
