"""Model-based test of the slot reuse rule with random actions of clients, sidecar and clock."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc.service import pack_slots, unpack_slots
from lmcache_sidecar.clients.liveness import GRACE_SECONDS
from lmcache_sidecar.clients.registry import Client
from lmcache_sidecar.clients.validation import CallRefusedError
from tests.harness.scope import examples
from tests.harness.sidecar.world import FakeLock, World, new_uuid


@dataclass
class Actor:
    """An engine's process: the slots that it holds, and the rows to which it may still write."""

    uuid: bytes
    client: Client | None = None
    held: dict[int, int] = field(default_factory=dict)  # row -> generation, of the current epoch
    may_write: set[int] = field(default_factory=set)  # rows of older epochs whose copies may be in progress
    died_at: float | None = None

    @property
    def reach(self) -> set[int]:
        return set(self.held) | self.may_write


class SlotReuse(RuleBasedStateMachine):
    """The sidecar never reserves a row while a previous owner may still write to it."""

    actors = Bundle("actors")

    def __init__(self) -> None:
        super().__init__()
        FakeLock.held = set()
        self.world = World(Path("/nowhere"))
        self.all_actors: list[Actor] = []

    @rule(target=actors)
    def start(self):
        actor = Actor(new_uuid())
        self.all_actors.append(actor)
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
    def send_drained(self, actor):
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
        for actor in self.all_actors:
            if actor.died_at is not None and self.world.now - actor.died_at >= GRACE_SECONDS:
                actor.may_write.clear()

    @rule(actor=actors, numbers=st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
    def reserve(self, actor, numbers):
        if not actor.client.is_attached:
            with pytest.raises(CallRefusedError, match="attach again"):
                self.world.reserve(actor.client, *numbers)
            return
        writable_rows = set().union(*(other_actor.reach for other_actor in self.all_actors))
        reply = self.world.reserve(actor.client, *numbers)
        slots = unpack_slots(reply.slots)
        assert len(slots) == list(reply.results).count(pb.SLOT)
        for row, generation in slots:
            assert row not in writable_rows
            writable_rows.add(row)
            actor.held[row] = generation

    @rule(actor=actors, is_commit=st.booleans())
    def finish(self, actor, is_commit):
        if actor.client.is_attached:
            call = self.world.commit if is_commit else self.world.abort
            call(actor.client, pack_slots(actor.held.items()))
            actor.held.clear()

    @rule(actor=actors, victim=actors)
    def finish_foreign_slots(self, actor, victim):
        if actor is not victim and actor.client.is_attached and victim.held:
            with pytest.raises(CallRefusedError, match="nothing was"):
                self.world.commit(actor.client, pack_slots(victim.held.items()))

    @precondition(lambda self: self.world.sessions.store is not None)
    @invariant()
    def check_quarantine_covers_writable_rows(self):
        num_writable = sum(len(actor.may_write) for actor in self.all_actors)
        assert self.world.sessions.store.memory.num_quarantined >= num_writable

    @precondition(lambda self: self.world.sessions.store is not None)
    @invariant()
    def check_quarantine_empties(self):
        """The quarantine is empty when all actors have drained, or died long ago."""
        if not any(actor.reach for actor in self.all_actors if actor.died_at is None) and all(
            actor.client.is_attached for actor in self.all_actors if actor.died_at is None
        ):
            self.world.pass_time(0.0)
            # A short margin, because the clock is a sum of many rounded steps.
            self.world.pass_time(GRACE_SECONDS + 1e-6)
            for actor in self.all_actors:
                if actor.died_at is not None:
                    actor.may_write.clear()
            assert self.world.sessions.store.memory.num_quarantined == 0


SlotReuse.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestSlotReuse = SlotReuse.TestCase
