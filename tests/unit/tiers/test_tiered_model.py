"""The tiered store over a real disk and a remote tier, with faults between any two steps, against an oracle.

Every key has one content, so whatever is served is right or wrong. The oracle knows what was acknowledged,
and who holds what.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lmcache.tiers.base import ObjectId
from lmcache.tiers.disk.tier import DiskTier
from lmcache.tiers.memory.contracts import Reserved, Slot
from lmcache.tiers.stats import WriteSkipped
from lmcache.tiers.tiered import refresh as hits
from lmcache.tiers.tiered import tier_worker as lower_module
from lmcache.tiers.tiered.store import Admit
from tests.harness.tiered_world import (
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

T = TypeVar("T")

NUM_ROWS = 16
NUM_QUEUED = NUM_ROWS // 4  # that a queue of writes takes
KEYS = chain(32)
COLUMNS = (0, 1)

parts = st.tuples(st.integers(0, len(KEYS) - 1), st.integers(1, 6)).map(lambda p: KEYS[p[0] : p[0] + p[1]])
tiers = st.sampled_from(["disk", "remote"])
states = st.sampled_from(["well", "unhealthy", "held", "full"])


class Errors(logging.Handler):
    """What background work could not tell anybody."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(self.format(record))


class Tiered(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(lower_module, "_OFFER_SECONDS", 0.002)
        self.patch.setattr(lower_module, "_MAX_OFFER_SECONDS", 0.01)
        self.patch.setattr(hits, "_PAUSE_SECONDS", 0.001)
        self.errors = Errors()
        logging.getLogger("lmcache.tiers").addHandler(self.errors)
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

    @initialize()
    def fill_all_tiers(self):
        for first in range(0, NUM_ROWS, NUM_QUEUED):
            self.put(KEYS[first : first + NUM_QUEUED], COLUMNS)
            assert self.run(self.world.store.drain(TIMEOUT_SECONDS))

    def run(self, work) -> T:
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

    def teardown(self) -> None:
        try:
            self.settle()
            self.what_is_hit_is_below()
            self.everything_came_back()
        finally:
            self.heal_all()
            self.run(self.world.store.close())
            self.patch.undo()
            self.runner.close()
            self.disk.close()
            shutil.rmtree(self.folder)
            logging.getLogger("lmcache.tiers").removeHandler(self.errors)

    # ---- an engine's doings ----

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
        """When all is drained and no write was given up, what this call completed is below."""
        self.change(name, state)
        self.put(keys, (0,))
        reserved = self.reserve(keys, 1)
        mine = [(key, answer.slot) for key, answer in zip(keys, reserved, strict=True) if answer.slot]
        for key, slot in mine:
            self.world.arena.view(slot.row, 1)[:] = content(key, 1)

        async def commit():
            store = self.world.store
            store.commit([slot for _, slot in mine], 1, OWNER)
            # A row that left memory since its first column, or had no room then, lacks that one now.
            completed = [key for key, _ in mine if store.memory.is_resident(key)]
            if self.admit is Admit.ALL:
                self.writes.append((completed, asyncio.create_task(self.drain(store))))

        self.run(commit())

    async def drain(self, store) -> bool:
        """Return whether all that is to be written now has been."""

        def num_skipped() -> int:
            return sum(lower.stats.writes_skipped.total() for lower in store.lower.values())

        num_before = num_skipped()
        return await store.drain(TIMEOUT_SECONDS) and not store.is_closed and num_skipped() == num_before

    @rule(keys=parts, column=st.integers(0, 1))
    def abort(self, keys, column):
        slots = [answer.slot for answer in self.reserve(keys, column) if answer.slot]
        self.world.store.abort(slots, column, OWNER)

    @rule(
        keys=parts,
        request=st.sampled_from("abc"),
        chunk_seconds=st.sampled_from([0.0, 1e-9, 1.0]),
        repeats=st.integers(1, 3),
    )
    def lookup(self, keys, request, chunk_seconds, repeats):
        async def lookup():
            found = self.world.lookup(keys, request, chunk_seconds)
            slots = self.world.slots(keys[: found.num_leased])
            await asyncio.sleep(0.004 if repeats > 1 else 0)
            return found, slots

        for _ in range(repeats):
            found, slots = self.run(lookup())
            assert found.num_leased <= found.num_resident <= found.num_expected <= len(keys)
            assert len(slots) == found.num_leased
            self.leases.setdefault(request, {}).update(zip(keys, slots, strict=False))

    @rule(request=st.sampled_from("abc"))
    def release(self, request):
        self.leases.pop(request, None)
        self.world.store.memory.release((b"e" * 16, request))

    # ---- faults ----

    @rule(name=tiers, state=states)
    def change(self, name, state):
        tier = self.tiers[name]
        tier.is_unhealthy = state == "unhealthy"
        tier.is_full = state == "full"
        (tier.open.clear if state == "held" else tier.open.set)()

    @rule(name=tiers, keys=parts, column=st.integers(0, 1), is_gone=st.booleans(), is_read=st.booleans())
    def damage(self, name, keys, column, is_gone, is_read):
        """A tier finds out when it reads an object, not when it is to write it again."""
        for key in keys:
            self.damaged.add((key, name))
            if name == "disk":
                self.damage_file(key, column, is_gone)
            elif is_gone:
                self.tiers[name].objects.pop((key, column), None)
            elif (key, column) in self.tiers[name].objects:
                self.tiers[name].objects[key, column] = FakeTier.INVALID
        if is_read:
            self.restart("lost", self.admit, keys)

    def damage_file(self, key: bytes, column: int, is_gone: bool) -> None:
        for path in self.folder.rglob(f"{key[32:].hex()}.{column}"):
            whole = bytearray(path.read_bytes())
            whole[4096 + 77] ^= 1
            path.unlink() if is_gone else path.write_bytes(whole)

    @rule(name=tiers, keys=parts, column=st.integers(0, 1), tells=st.booleans())
    def lose(self, name, keys, column, tells):
        """A tier forgets copies: it was restarted, and ``tells`` so as a lost connection would, or evicts."""
        for key in keys:
            self.damaged.add((key, name))
            if name == "disk":
                for path in self.folder.rglob(f"{key[32:].hex()}.{column}"):
                    path.unlink()
            else:
                self.tiers[name].objects.pop((key, column), None)
        if tells:
            self.tiers[name].health.restarted()

    @rule(name=tiers, keys=parts, only=st.booleans())
    def refuse(self, name, keys, only):
        """From now on a tier takes all but these, or all of them."""
        self.tiers[name].refused = frozenset(keys if only else ())

    @rule(seconds=st.sampled_from([0.5, 1.5, 11.0, 700.0]))
    def pass_time(self, seconds):
        self.world.now += seconds

    @rule(milliseconds=st.sampled_from([1, 3, 8]))
    def let_it_work(self, milliseconds):
        self.run(asyncio.sleep(milliseconds / 1000))

    @rule(rows=st.sampled_from(["kept", "torn", "lost"]), admit=st.sampled_from(Admit), keys=parts)
    def restart(self, rows, admit, keys):
        """The engine goes, too: else its leases would be in quarantine. Then it asks for what it had."""
        self.heal_all()
        self.run(self.world.store.close())
        self.note_acknowledged()
        for _, writing in self.writes:
            writing.cancel()
        if rows == "torn":
            for row in range(0, NUM_ROWS, 2):
                self.world.arena.view(row, 0)[100] ^= 1
        self.leases.clear()
        self.admit = admit
        self.open_world(None if rows == "lost" else self.world.arena)
        self.lookup(keys, "a", 0.0, 4)

    def heal_all(self) -> None:
        for name, tier in self.tiers.items():
            self.change(name, "well")
            tier.refused = frozenset()

    # ---- what holds ----

    def note_acknowledged(self) -> None:
        for keys, writing in [write for write in self.writes if write[1].done()]:
            self.writes.remove((keys, writing))
            if not writing.cancelled() and writing.result():
                self.acknowledged.update((key, name) for key in keys for name in self.tiers)

    @invariant()
    def what_is_leased_is_right(self):
        for slots in self.leases.values():
            for key, slot in slots.items():
                for column in COLUMNS:
                    assert self.world.arena.view(slot.row, column) == content(key, column)

    @invariant()
    def background_work_has_no_errors(self):
        assert self.errors.records == []

    @invariant()
    def what_is_acknowledged_is_below(self):
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
        """When faults end, all that was begun ends."""
        self.heal_all()

        async def end() -> None:
            await until(lambda: self.world.is_idle)
            await asyncio.gather(*(writing for _, writing in self.writes), return_exceptions=True)

        self.run(end())
        self.what_is_leased_is_right()
        self.what_is_acknowledged_is_below()
        for request in "abc":
            self.release(request)

    @invariant()
    def what_is_remembered_is_bounded(self):
        for lower in self.world.store.lower.values():
            assert len(lower._refused) <= NUM_QUEUED
            assert lower.num_queued <= NUM_QUEUED
            assert len(lower._unwritten) <= NUM_QUEUED + 2  # writers
            assert not lower._refused or lower._is_offering
        assert len(self.world.store._promotions._pending) <= NUM_ROWS

    def what_is_hit_is_below(self) -> None:
        """Whatever was lost, refused or dropped before: what is in memory, and hit, gets there, and then no
        more is written."""
        store = self.world.store
        self.admit = Admit.ALL

        async def end() -> None:
            for key in [key for key in KEYS if store.memory.is_resident(key)]:
                await until(lambda key=key: self.hit_until_below(key))
            await until(lambda: self.world.is_idle)
            counts = []
            for _ in range(3):  # files that are gone are found out by the first of them
                self.world.now += 1000
                for key in [key for key in KEYS if store.memory.is_resident(key)]:
                    self.hit_until_below(key)
                    await until(lambda: self.world.is_idle)
                counts.append([tier.calls["store"] for tier in self.tiers.values()])
            assert counts[1] == counts[2]

        self.run(end())

    def hit_until_below(self, key: bytes) -> bool:
        self.world.now += 1.0
        self.world.lookup([key], "a")
        self.release("a")
        is_in_memory = self.world.store.memory.is_resident(key)
        is_below = all((key, column) in self.tiers["remote"].objects for column in COLUMNS)
        return not is_in_memory or (is_below and self.disk.probe([key], len(COLUMNS)) == 1)

    def everything_came_back(self) -> None:
        """No row is leaked: a new chain may take all of them."""
        memory = self.world.store.memory
        assert (memory.num_leased, memory.num_quarantined) == (0, 0)
        self.world.now += 1000  # rows that were never completed are free now
        for column in COLUMNS:
            assert len(self.fill(chain(NUM_ROWS, start=500), column)) == NUM_ROWS


Tiered.TestCase.settings = settings(max_examples=15, stateful_step_count=30)
TestTiered = Tiered.TestCase
