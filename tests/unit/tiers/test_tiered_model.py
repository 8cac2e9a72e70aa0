"""Model-based test of the tiered store over a disk and a fake remote tier, with faults between any two steps.

Each key has a fixed content, so the test can check all returned bytes. The oracle knows acknowledged rows
and leases.
"""

import asyncio
import logging
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.disk.tier import DiskTier
from lmcache_store.tiers.memory.contracts import Reserved, Slot
from lmcache_store.tiers.probing import num_leading
from lmcache_store.tiers.stats import WriteSkipped
from lmcache_store.tiers.tiered import refresh as hits
from lmcache_store.tiers.tiered import tier_worker as lower_module
from lmcache_store.tiers.tiered.store import Admit
from tests.harness.scope import examples
from tests.harness.tiers.tiered_world import (
    OWNER,
    SIZE,
    TIMEOUT_SECONDS,
    FakeTier,
    FaultyDisk,
    World,
    chain,
    content,
    until,
)

NUM_ROWS = 16
NUM_QUEUED = NUM_ROWS // 4  # capacity of a write queue
KEYS = chain(32)
COLUMNS = (0, 1)

parts = st.tuples(st.integers(0, len(KEYS) - 1), st.integers(1, 6)).map(lambda p: KEYS[p[0] : p[0] + p[1]])
tiers = st.sampled_from(["disk", "remote"])
states = st.sampled_from(["healthy", "unhealthy", "held", "full"])


class Errors(logging.Handler):
    """Errors that background work logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(self.format(record))


class TieredMachine(RuleBasedStateMachine):
    """A tiered store over a real disk and a fake remote tier."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(lower_module, "_OFFER_SECONDS", 0.002)
        self.patch.setattr(lower_module, "_MAX_OFFER_SECONDS", 0.01)
        self.patch.setattr(hits, "_PAUSE_SECONDS", 0.001)
        self.errors = Errors()
        logging.getLogger("lmcache_store.tiers").addHandler(self.errors)
        self.runner = asyncio.Runner()
        self.folder = Path(tempfile.mkdtemp(prefix="lmc-tiered-"))
        self.disk = DiskTier(self.folder, 64 << 20)
        self.tiers: dict[str, FaultyDisk | FakeTier] = {"disk": FaultyDisk(self.disk), "remote": FakeTier()}
        self.leases: dict[str, dict[bytes, Slot]] = {}
        self.writes: list[tuple[list[bytes], asyncio.Task[set[WriteSkipped]]]] = []
        self.acknowledged: set[tuple[bytes, str]] = set()
        self.damaged: set[tuple[bytes, str]] = set()
        self.admit = Admit.ALL
        self.open_world(None)

    def run(self, work):
        return self.runner.run(asyncio.wait_for(work, TIMEOUT_SECONDS))

    def open_world(self, arena) -> None:
        async def make() -> World:
            world = World(NUM_ROWS, arena, self.tiers["disk"], self.admit, remote=self.tiers["remote"])
            await world.store.adopt()
            return world

        self.world = self.run(make())
        for owner in self.world.store.memory.quarantined_owners:
            self.world.store.memory.end_quarantine(owner)
        self.world.store.memory.release_adopted()

    @initialize()
    def fill_all_tiers(self):
        for first in range(0, NUM_ROWS, NUM_QUEUED):
            self.put(KEYS[first : first + NUM_QUEUED], COLUMNS)
            assert self.run(self.world.store.drain(TIMEOUT_SECONDS))

    def teardown(self) -> None:
        try:
            self.settle()
            self.check_hit_rows_are_written()
            self.check_no_row_leaked()
        finally:
            self.heal_all()
            self.run(self.world.store.close())
            self.patch.undo()
            self.runner.close()
            self.disk.close()
            shutil.rmtree(self.folder)
            logging.getLogger("lmcache_store.tiers").removeHandler(self.errors)

    # ---- actions of an engine ----

    def fill(self, keys: list[bytes], column: int) -> list[Slot]:
        slots = []
        for answer, key in zip(self.reserve(keys, column), keys, strict=True):
            if answer.result is Reserved.SLOT:
                self.world.arena.view(answer.slot.row, column)[:] = content(key, column)
                slots.append(answer.slot)
        return slots

    def reserve(self, keys, column):
        async def reserve():
            return self.world.store.reserve(keys, column, OWNER, length=SIZE)

        return self.run(reserve())

    @rule(keys=parts, columns=st.sampled_from([(0, 1), (1, 0), (0,), (1,)]))
    def put(self, keys, columns):
        for column in columns:
            slots = self.fill(keys, column)

            async def commit(slots=slots, column=column):
                self.world.store.commit(slots, column, OWNER)

            self.run(commit())

    @rule(keys=parts, name=tiers, state=states)
    def put_and_drain(self, keys, name, state):
        """Put rows and drain: if no write was skipped, the lower tiers hold the completed rows."""
        self.change(name, state)
        self.put(keys, (0,))
        reserved = self.reserve(keys, 1)
        reserved_slots = [
            (key, answer.slot) for key, answer in zip(keys, reserved, strict=True) if answer.slot
        ]
        for key, slot in reserved_slots:
            self.world.arena.view(slot.row, 1)[:] = content(key, 1)

        async def commit():
            store = self.world.store
            store.commit([slot for _, slot in reserved_slots], 1, OWNER)
            # A row that was evicted since its first column, or got no slot then, lacks that column now.
            completed = [key for key, _ in reserved_slots if store.memory.is_resident(key)]
            if self.admit is Admit.ALL:
                self.writes.append((completed, asyncio.create_task(self.drain(store))))

        self.run(commit())

    async def drain(self, store) -> bool:
        """Return whether all pending writes have completed."""

        def num_skipped() -> int:
            return sum(lower.stats.writes_skipped.total() for lower in store.lower.values())

        num_before = num_skipped()
        return await store.drain(TIMEOUT_SECONDS) and not store.is_closed and num_skipped() == num_before

    @rule(keys=parts, column=st.integers(0, 1))
    def abort(self, keys, column):
        slots = [answer.slot for answer in self.reserve(keys, column) if answer.slot]
        self.world.store.memory.abort(slots, column, OWNER)

    @rule(
        keys=parts,
        request=st.sampled_from("abc"),
        chunk_seconds=st.sampled_from([0.0, 1e-9, 1.0]),
        repeats=st.integers(1, 3),
    )
    def lookup(self, keys, request, chunk_seconds, repeats):
        async def lookup():
            answer = self.world.lookup(keys, request, chunk_seconds)
            slots = self.world.slots(keys[: answer.num_leased])
            await asyncio.sleep(0.004 if repeats > 1 else 0)  # real time: threads work meanwhile, or not
            return answer, slots

        for _ in range(repeats):
            answer, slots = self.run(lookup())
            assert answer.num_leased <= answer.num_resident <= answer.num_expected <= len(keys)
            assert len(slots) == answer.num_leased
            self.leases.setdefault(request, {}).update(zip(keys, slots, strict=False))

    @rule(request=st.sampled_from("abc"))
    def release(self, request):
        self.leases.pop(request, None)
        self.world.store.memory.release((b"e" * 16, request))

    @rule(keys=parts)
    def read_by_another_pod(self, keys):
        async def read():
            for key in keys:
                if (slot := await self.world.store.begin_read(key)) is not None:
                    for column in COLUMNS:
                        assert self.world.arena.view(slot.row, column) == content(key, column)
                    self.world.store.end_read(slot)

        self.run(read())

    # ---- faults ----

    @rule(name=tiers, state=states)
    def change(self, name, state):
        tier = self.tiers[name]
        tier.is_unhealthy = state == "unhealthy"
        tier.is_full = state == "full"
        (tier.open.clear if state == "held" else tier.open.set)()

    @rule(name=tiers, keys=parts, column=st.integers(0, 1), is_deleted=st.booleans(), is_read=st.booleans())
    def damage(self, name, keys, column, is_deleted, is_read):
        """Damage objects; a tier detects the damage when it reads the object."""
        for key in keys:
            self.damaged.add((key, name))
            if name == "disk":
                self.damage_file(key, column, is_deleted)
            elif is_deleted:
                self.tiers[name].objects.pop((key, column), None)
            elif (key, column) in self.tiers[name].objects:
                self.tiers[name].objects[key, column] = FakeTier.INVALID
        if is_read:
            self.restart("lost", self.admit, keys)

    def damage_file(self, key: bytes, column: int, is_deleted: bool) -> None:
        for path in self.folder.rglob(f"{key[32:].hex()}.{column}"):
            content_bytes = bytearray(path.read_bytes())
            content_bytes[4096 + 77] ^= 1
            path.unlink() if is_deleted else path.write_bytes(content_bytes)

    @rule(name=tiers, keys=parts, column=st.integers(0, 1), reports_restart=st.booleans())
    def lose_copies(self, name, keys, column, reports_restart):
        """Delete copies: the tier evicts them, or restarts and reports the restart."""
        for key in keys:
            self.damaged.add((key, name))
            if name == "disk":
                for path in self.folder.rglob(f"{key[32:].hex()}.{column}"):
                    path.unlink()
            else:
                self.tiers[name].objects.pop((key, column), None)
        if reports_restart:
            self.tiers[name].health.restarted()

    @rule(name=tiers, keys=parts, is_partial=st.booleans())
    def refuse(self, name, keys, is_partial):
        """Let a tier refuse only ``keys``, or no keys."""
        self.tiers[name].refused = frozenset(keys if is_partial else ())

    @rule(seconds=st.sampled_from([0.5, 1.5, 11.0, 700.0]))
    def pass_time(self, seconds):
        self.world.now += seconds

    @rule(milliseconds=st.sampled_from([1, 3, 8]))
    def wait_for_background_work(self, milliseconds):
        self.run(asyncio.sleep(milliseconds / 1000))  # real time: threads work meanwhile, or not

    @rule(rows=st.sampled_from(["intact", "torn", "lost"]), admit=st.sampled_from(Admit), keys=parts)
    def restart(self, rows, admit, keys):
        """Restart the store and the engine, which looks up its chunks again; its old leases are released."""
        self.heal_all()
        self.run(self.world.store.close())
        self.note_acknowledged()
        for _, draining in self.writes:
            draining.cancel()
        if rows == "torn":
            for row in range(0, NUM_ROWS, 2):
                self.world.arena.view(row, 0)[100] ^= 1
        self.leases.clear()
        self.admit = admit
        self.open_world(None if rows == "lost" else self.world.arena)
        self.lookup(keys, "a", 0.0, 4)

    def heal_all(self) -> None:
        for name, tier in self.tiers.items():
            self.change(name, "healthy")
            tier.refused = frozenset()

    # ---- invariants ----

    def note_acknowledged(self) -> None:
        for keys, draining in [write for write in self.writes if write[1].done()]:
            self.writes.remove((keys, draining))
            if not draining.cancelled() and draining.result():
                self.acknowledged.update((key, name) for key in keys for name in self.tiers)

    @invariant()
    def leased_rows_are_right(self):
        for slots in self.leases.values():
            for key, slot in slots.items():
                for column in COLUMNS:
                    assert self.world.arena.view(slot.row, column) == content(key, column)

    @invariant()
    def background_work_has_no_errors(self):
        assert self.errors.records == []

    @invariant()
    def acknowledged_rows_are_in_lower_tiers(self):
        self.note_acknowledged()
        into = memoryview(bytearray(SIZE))
        for key, name in self.acknowledged - self.damaged:
            for column in COLUMNS:
                if name == "disk":
                    assert self.disk.load(ObjectId(key, column), into).length == SIZE
                    assert into == content(key, column)
                else:
                    assert self.tiers[name].objects[key, column] == content(key, column)

    def settle(self) -> None:
        """Check that all work ends after the faults end."""
        self.heal_all()

        async def end() -> None:
            await until(lambda: self.world.is_idle)
            await asyncio.gather(*(draining for _, draining in self.writes), return_exceptions=True)

        self.run(end())
        self.leased_rows_are_right()
        self.acknowledged_rows_are_in_lower_tiers()
        for request in "abc":
            self.release(request)

    @invariant()
    def remembered_rows_are_bounded(self):
        for lower in self.world.store.lower.values():
            assert len(lower._refused) <= NUM_QUEUED
            assert lower.num_queued <= NUM_QUEUED
            assert len(lower._unwritten) <= NUM_QUEUED + 2  # writers
            assert not lower._refused or lower._is_offering
        assert len(self.world.store._promotions._pending) <= NUM_ROWS

    def check_hit_rows_are_written(self) -> None:
        """Check that a hit after an outage writes each resident row to the lower tiers, although it was hit
        in the outage, too, and that no more writes follow."""
        store = self.world.store
        self.admit = Admit.ALL

        async def end() -> None:
            for name, tier in self.tiers.items():
                self.change(name, "unhealthy")
                tier.health.failure("an outage")
            for key in [key for key in KEYS if store.memory.is_resident(key)]:
                self.hit_and_check_written(key)
            await until(lambda: not store.pending_work["refresh"])
            self.heal_all()
            await until(lambda: all(lower.is_healthy for lower in store.lower.values()))
            for key in [key for key in KEYS if store.memory.is_resident(key)]:
                await until(lambda key=key: self.hit_and_check_written(key))
            await until(lambda: self.world.is_idle)
            counts = []
            for _ in range(3):  # the first round detects deleted files
                self.world.now += 1000
                for key in [key for key in KEYS if store.memory.is_resident(key)]:
                    self.hit_and_check_written(key)
                    await until(lambda: self.world.is_idle)
                counts.append([tier.calls["store"] for tier in self.tiers.values()])
            assert counts[1] == counts[2]

        self.run(end())

    def hit_and_check_written(self, key: bytes) -> bool:
        self.world.now += 0.001  # the period of refreshes is longer than the test
        self.world.lookup([key], "a")
        self.release("a")
        is_in_memory = self.world.store.memory.is_resident(key)
        is_written = all((key, column) in self.tiers["remote"].objects for column in COLUMNS)
        return not is_in_memory or (is_written and num_leading(self.disk, [key], len(COLUMNS)) == 1)

    def check_no_row_leaked(self) -> None:
        """Check that no row leaked: a new chain can use all rows."""
        memory = self.world.store.memory
        assert (memory.num_leased, memory.num_quarantined) == (0, 0)
        self.world.now += 1000  # incomplete rows have timed out
        for column in COLUMNS:
            assert len(self.fill(chain(NUM_ROWS, start=500), column)) == NUM_ROWS


TieredMachine.TestCase.settings = settings(max_examples=examples(15), stateful_step_count=30)
TestTiered = TieredMachine.TestCase
