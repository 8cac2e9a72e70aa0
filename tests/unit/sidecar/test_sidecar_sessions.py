"""Sessions without sockets, processes or clocks: who may touch which slot, under any interleaving."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from lmcache_sidecar import sessions as sessions_module
from lmcache_sidecar.liveness import GRACE_SECONDS, DeathWatch
from lmcache_sidecar.sessions import Client, Sessions
from lmcache_sidecar.wire import Refused

from lmcache.rpc import kvcache_pb2 as pb
from lmcache.rpc.client import ClientHello, KVGroup, Role
from lmcache.tiers.arena import HeapArena
from lmcache.tiers.base import Geometry
from lmcache.tiers.memory import MemoryTier
from lmcache.tiers.tiered import Lookup

NUM_ROWS = 6


class FakeArena:
    """A heap arena that is formatted later, as the file is."""

    def __init__(self) -> None:
        self.geometry: Geometry | None = None
        self.ready_rows = NUM_ROWS
        self.num_rows = 0

    def format(self, geometry: Geometry) -> None:
        self._heap = HeapArena(geometry, NUM_ROWS)
        self.geometry, self.num_rows = geometry, NUM_ROWS

    def __getattr__(self, name: str) -> object:
        return getattr(self._heap, name)

    def table_offset(self, column: int) -> int:
        return column

    column_offset = table_offset


class FakeStore:
    """The memory tier alone."""

    def __init__(self, arena: FakeArena, clock) -> None:
        self.memory = MemoryTier(arena, clock=clock)
        self.is_closed = False

    async def adopt(self) -> None:
        for _ in self.memory.adopt():
            pass

    async def close(self) -> None:
        self.is_closed = True

    def register(self, namespace, *, label, private) -> None:
        pass

    def lookup(self, lease_id, groups) -> Lookup:
        num_resident, slots = self.memory.lookup(lease_id, groups[0])
        return Lookup(num_resident=num_resident, slots=[slots])

    def reserve(self, keys, column, owner, *, length, first_chunk):
        return [self.memory.reserve(key, column, owner, length=length, depth=first_chunk) for key in keys]

    def commit(self, slots, column, owner) -> None:
        self.memory.commit(slots, column, owner)

    def abort(self, slots, column, owner) -> None:
        self.memory.abort(slots, column, owner)


class FakeLock:
    """A client's record lock, by the path of its file."""

    held: ClassVar[set[str]] = set()

    def __init__(self, path) -> None:
        self.path = path.stem

    def is_held(self) -> bool:
        return self.path in self.held

    def close(self) -> None:
        pass

    def remove(self) -> None:
        pass


class World:
    """A sidecar's sessions, a clock and everybody's locks."""

    def __init__(self, tmp_path) -> None:
        self.now = 100.0
        self.arena = FakeArena()
        self.sessions = Sessions(
            self.arena, "/arena", tmp_path, lambda: FakeStore(self.arena, self.clock), self.clock
        )
        asyncio.run(self.sessions.start())

    def clock(self) -> float:
        return self.now

    def attach(
        self, client_uuid: bytes, role: Role = Role.WORKER, *, map_all: bool = True, **fields
    ) -> Client:
        FakeLock.held.add(client_uuid.hex())
        defaults = {
            "engine_uuid": b"e" * 16,
            "namespace": b"n" * 32,
            "chunk_tokens": 16,
            "groups": (KVGroup(0, 16, 4096),),
        }
        hello = ClientHello(role, **(defaults | fields)).message(client_uuid)
        client = asyncio.run(self.sessions.attach(hello))
        if map_all and role is Role.WORKER:
            self.mapped(client, NUM_ROWS)
        return client

    def mapped(self, client: Client, num_rows: int) -> None:
        self.sessions.mapped(client, pb.ExtentsMapped(epoch=client.epoch, num_rows=num_rows))

    def reserve(self, client: Client, *numbers: int) -> pb.ReserveReply:
        keys = b"".join(bytes([number]) * 32 for number in numbers)
        return self.sessions.reserve(
            pb.ReserveRequest(epoch=client.epoch, client_uuid=client.peer.uuid, keys=keys)
        )

    def lookup(self, client: Client, request_id: str, *numbers: int) -> pb.LookupReply:
        keys = b"".join(bytes([number]) * 32 for number in numbers)
        request = pb.LookupRequest(epoch=client.epoch, client_uuid=client.peer.uuid, request_id=request_id)
        request.groups.add(group=0, keys=keys)
        return self.sessions.lookup(request)

    def commit(self, client: Client, rows, generations) -> None:
        self.sessions.commit(
            pb.CommitRequest(
                epoch=client.epoch, client_uuid=client.peer.uuid, rows=rows, generations=generations
            )
        )

    def abort(self, client: Client, rows, generations) -> None:
        self.sessions.abort(
            pb.AbortRequest(
                epoch=client.epoch, client_uuid=client.peer.uuid, rows=rows, generations=generations
            )
        )

    def drain(self, client: Client) -> None:
        self.sessions.drained(client, pb.Drained(epoch=client.epoch))

    def die(self, client_uuid: bytes) -> None:
        FakeLock.held.discard(client_uuid.hex())

    def pass_time(self, seconds: float) -> None:
        self.sessions.deaths.step()
        self.now += seconds
        self.sessions.deaths.step()


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(sessions_module, "LockProbe", FakeLock)
    FakeLock.held.clear()
    return World(tmp_path)


def new_uuid() -> bytes:
    return uuid.uuid4().bytes


# ---- usable rows ----


def usable_rows(world: World) -> int:
    return world.sessions.store.memory.usable_rows


def test_rows_are_usable_when_every_rank_has_mapped_them(world):
    ranks = [world.attach(new_uuid(), map_all=False, num_columns=2, column=column) for column in range(2)]
    world.mapped(ranks[0], 4)
    assert usable_rows(world) == 0
    world.mapped(ranks[1], 3)
    assert usable_rows(world) == 3
    world.mapped(ranks[1], 6)
    assert usable_rows(world) == 4


def test_a_second_engine_takes_no_rows_away_while_it_maps(world):
    first = world.attach(new_uuid())
    second = world.attach(new_uuid(), map_all=False, engine_uuid=b"f" * 16)
    world.mapped(second, 2)
    assert usable_rows(world) == NUM_ROWS
    assert list(world.reserve(first, 1).results) == [pb.SLOT]
    assert list(world.reserve(second, 2).results) == [pb.BUSY]
    world.mapped(second, NUM_ROWS)
    assert list(world.reserve(second, 2).results) == [pb.SLOT]


def test_a_lone_engine_starts_with_what_it_has(world):
    first = world.attach(new_uuid())
    world.sessions.detach(first)
    second = world.attach(new_uuid(), map_all=False, engine_uuid=b"f" * 16)
    world.mapped(second, 2)
    assert usable_rows(world) == 2
    assert list(world.reserve(second, 1, 2, 3).results) == [pb.SLOT, pb.SLOT, pb.BUSY]


def test_rows_can_not_be_unmapped(world):
    client = world.attach(new_uuid())
    with pytest.raises(Refused, match="can't be mapped"):
        world.mapped(client, NUM_ROWS - 1)


# ---- epochs and streams ----


def test_a_second_stream_of_a_client_ends_the_first(world):
    first = world.attach(client_uuid := new_uuid())
    reserved = world.reserve(first, 1)
    second = world.attach(client_uuid)
    assert not first.is_attached
    with pytest.raises(Refused, match=f"epoch {first.epoch} is over"):
        world.commit(first, reserved.rows, reserved.generations)
    with pytest.raises(Refused, match="nothing was committed"):
        world.commit(second, reserved.rows, reserved.generations)
    world.sessions.detach(first)  # the server notices late
    assert second.is_attached


def test_drained_of_an_older_epoch_is_refused(world):
    first = world.attach(client_uuid := new_uuid())
    world.reserve(first, 1)
    second = world.attach(client_uuid)
    with pytest.raises(Refused, match="attach again"):
        world.sessions.drained(second, pb.Drained(epoch=first.epoch))
    assert world.sessions.store.memory.num_quarantined == 1


def test_leases_outlive_a_stream_and_end_with_the_last_client_of_the_engine(world):
    worker, scheduler = world.attach(new_uuid()), world.attach(new_uuid(), Role.SCHEDULER)
    reserved = world.reserve(worker, 1)
    world.commit(worker, reserved.rows, reserved.generations)
    assert world.lookup(scheduler, "r", 1).num_leased == 1
    world.sessions.detach(scheduler)
    world.die(scheduler.peer.uuid)
    world.pass_time(GRACE_SECONDS)
    memory = world.sessions.store.memory
    assert memory.num_leased == 1  # the worker may be loading
    world.sessions.detach(worker)
    world.die(worker.peer.uuid)
    world.pass_time(GRACE_SECONDS)
    assert memory.num_leased == 0


# ---- proof of death ----


def test_death_takes_the_lock_and_the_grace(tmp_path):
    FakeLock.held = {"a"}
    deaths, now = [], [0.0]
    watch = DeathWatch(deaths.append, lambda: now[0])
    watch.watch(b"a", FakeLock(tmp_path / "a.lock"))
    now[0] = 1000.0
    watch.step()
    assert deaths == []
    FakeLock.held.clear()
    watch.step()
    now[0] += GRACE_SECONDS - 0.01
    watch.step()
    assert deaths == []
    now[0] += 0.02
    watch.step()
    watch.step()
    assert deaths == [b"a"]


def test_who_comes_back_in_time_is_not_dead(tmp_path):
    FakeLock.held.clear()
    deaths, now = [], [0.0]
    watch = DeathWatch(deaths.append, lambda: now[0])
    watch.watch(b"a", FakeLock(tmp_path / "a.lock"))
    watch.step()
    watch.forget(b"a")
    now[0] = 10.0
    watch.step()
    assert deaths == []


# ---- the slot reuse rule, at the level of sessions ----


@dataclass
class Actor:
    """An engine's process: what it believes, and what it may still be writing to."""

    uuid: bytes
    client: Client | None = None
    held: dict[int, int] = field(default_factory=dict)  # row -> generation, of the present epoch
    may_write: set[int] = field(default_factory=set)  # rows of older epochs whose copies may be under way
    died_at: float | None = None

    @property
    def reach(self) -> set[int]:
        return set(self.held) | self.may_write


class SlotReuse(RuleBasedStateMachine):
    """No row is given out while a process that was given it before may still be writing to it."""

    actors = Bundle("actors")

    def __init__(self) -> None:
        super().__init__()
        self._saved = sessions_module.LockProbe
        sessions_module.LockProbe = FakeLock
        FakeLock.held = set()
        self.world = World(Path("/nowhere"))
        self.everybody: list[Actor] = []

    def teardown(self) -> None:
        sessions_module.LockProbe = self._saved

    @rule(target=actors)
    def start(self):
        actor = Actor(new_uuid())
        self.everybody.append(actor)
        actor.client = self.world.attach(actor.uuid)
        return actor

    @rule(actor=actors)
    def attach_again(self, actor):
        if actor.died_at is None:
            actor.may_write |= set(actor.held)
            actor.held.clear()
            actor.client = self.world.attach(actor.uuid)

    @rule(actor=actors)
    def lose_stream(self, actor):
        if actor.client.is_attached:
            self.world.sessions.detach(actor.client)
            actor.may_write |= set(actor.held)
            actor.held.clear()

    @rule(actor=actors)
    def say_drained(self, actor):
        if actor.client.is_attached:
            self.world.drain(actor.client)
            actor.may_write.clear()

    @rule(actor=consumes(actors))
    def die(self, actor):
        if actor.client.is_attached:
            self.world.sessions.detach(actor.client)
        self.world.die(actor.uuid)
        actor.may_write |= set(actor.held)
        actor.held.clear()
        actor.died_at = self.world.now

    @rule(seconds=st.sampled_from([0.1, 1.0, 1.9, 2.0, 5.0, 31.0]))
    def pass_time(self, seconds):
        self.world.pass_time(seconds)
        for actor in self.everybody:
            if actor.died_at is not None and self.world.now - actor.died_at >= GRACE_SECONDS:
                actor.may_write.clear()

    @rule(actor=actors, numbers=st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
    def reserve(self, actor, numbers):
        if not actor.client.is_attached:
            with pytest.raises(Refused, match="attach again"):
                self.world.reserve(actor.client, *numbers)
            return
        taken = set().union(*(other.reach for other in self.everybody))
        reply = self.world.reserve(actor.client, *numbers)
        for result, row, generation in zip(reply.results, reply.rows, reply.generations, strict=True):
            if result == pb.SLOT:
                assert row not in taken
                taken.add(row)
                actor.held[row] = generation

    @rule(actor=actors, is_commit=st.booleans())
    def finish(self, actor, is_commit):
        if actor.client.is_attached:
            call = self.world.commit if is_commit else self.world.abort
            call(actor.client, list(actor.held), list(actor.held.values()))
            actor.held.clear()

    @rule(actor=actors, other=actors)
    def finish_what_is_not_theirs(self, actor, other):
        if actor is not other and actor.client.is_attached and other.held:
            with pytest.raises(Refused, match="nothing was"):
                self.world.commit(actor.client, list(other.held), list(other.held.values()))

    @precondition(lambda self: self.world.sessions.store is not None)
    @invariant()
    def quarantine_holds_what_may_be_written(self):
        in_reach = sum(len(actor.may_write) for actor in self.everybody)
        assert self.world.sessions.store.memory.num_quarantined >= in_reach

    @precondition(lambda self: self.world.sessions.store is not None)
    @invariant()
    def nothing_is_lost(self):
        """When all are drained or dead long ago, nothing is in quarantine."""
        if not any(actor.reach for actor in self.everybody if actor.died_at is None) and all(
            actor.client.is_attached for actor in self.everybody if actor.died_at is None
        ):
            self.world.pass_time(0.0)
            self.world.pass_time(GRACE_SECONDS)
            for actor in self.everybody:
                if actor.died_at is not None:
                    actor.may_write.clear()
            assert self.world.sessions.store.memory.num_quarantined == 0


SlotReuse.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSlotReuse = SlotReuse.TestCase
