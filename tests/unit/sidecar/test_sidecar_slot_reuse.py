"""The slot reuse rule under any interleaving of what clients, the sidecar and time may do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from lmcache_sidecar.clients.liveness import GRACE_SECONDS
from lmcache_sidecar.clients.registry import Client
from lmcache_sidecar.clients.validation import RefusedError

from lmcache.rpc import kvcache_pb2 as pb
from lmcache.rpc.service import pack_slots, unpack_slots
from tests.harness.world import FakeLock, World, new_uuid


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
        FakeLock.held = set()
        self.world = World(Path("/nowhere"))
        self.everybody: list[Actor] = []

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
            self.world.sessions.clients.detach(actor.client)
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
            self.world.sessions.clients.detach(actor.client)
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
            with pytest.raises(RefusedError, match="attach again"):
                self.world.reserve(actor.client, *numbers)
            return
        taken = set().union(*(other.reach for other in self.everybody))
        reply = self.world.reserve(actor.client, *numbers)
        slots = unpack_slots(reply.slots)
        assert len(slots) == list(reply.results).count(pb.SLOT)
        for row, generation in slots:
            assert row not in taken
            taken.add(row)
            actor.held[row] = generation

    @rule(actor=actors, is_commit=st.booleans())
    def finish(self, actor, is_commit):
        if actor.client.is_attached:
            call = self.world.commit if is_commit else self.world.abort
            call(actor.client, pack_slots(actor.held.items()))
            actor.held.clear()

    @rule(actor=actors, other=actors)
    def finish_what_is_not_theirs(self, actor, other):
        if actor is not other and actor.client.is_attached and other.held:
            with pytest.raises(RefusedError, match="nothing was"):
                self.world.commit(actor.client, pack_slots(other.held.items()))

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


SlotReuse.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestSlotReuse = SlotReuse.TestCase
