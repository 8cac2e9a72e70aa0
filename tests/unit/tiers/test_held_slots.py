"""Held slots, into which the sidecar copies for their owner, are neither committed nor reused."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache.tiers.errors import StaleSlotError
from lmcache.tiers.memory.contracts import Geometry, Reserved, Slot
from lmcache.tiers.memory.private import PrivateArena
from lmcache.tiers.memory.tier import MemoryTier
from tests.harness.scope import examples

OWNERS = [bytes([number]) * 16 for number in (1, 2)]
SLOT_BYTES = 4096


def key(number: int) -> bytes:
    return bytes(32) + number.to_bytes(32, "big")


def make_memory(num_rows: int = 8, slots_per_frame: int = 1, clock=lambda: 0.0) -> MemoryTier:
    memory = MemoryTier(PrivateArena(Geometry(SLOT_BYTES, 2, slots_per_frame), num_rows), clock=clock)
    memory.release_adopted()
    return memory


def reserve(memory: MemoryTier, number: int, owner: bytes = OWNERS[0], column: int = 0, num_slots: int = 1):
    return memory.reserve(key(number), column, owner, length=num_slots * SLOT_BYTES).slot


def test_holds_only_slots_reserved_by_the_owner():
    memory = make_memory()
    slot = reserve(memory, 1)
    for slots, column, owner in (
        ([slot], 1, OWNERS[0]),
        ([slot], 0, OWNERS[1]),
        ([slot, Slot(5, 1)], 0, OWNERS[0]),
    ):
        with pytest.raises(StaleSlotError):
            memory.hold(slots, column, owner, [SLOT_BYTES] * len(slots))
    assert memory.num_held == 0


def test_refuses_to_hold_more_bytes_than_reserved():
    memory = make_memory(num_rows=8, slots_per_frame=4)
    slots = [reserve(memory, 1), reserve(memory, 2, num_slots=2)]
    with pytest.raises(StaleSlotError, match=r"row \d+ is not reserved for 8193 bytes"):
        memory.hold(slots, 0, OWNERS[0], [SLOT_BYTES, 2 * SLOT_BYTES + 1])
    assert memory.num_held == 0
    memory.hold(slots, 0, OWNERS[0], [SLOT_BYTES, 2 * SLOT_BYTES])


class HeldSlots(RuleBasedStateMachine):
    """Model with two owners, rows of one to three slots, and copies that end at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.memory = make_memory(num_rows=8, slots_per_frame=4, clock=lambda: self.now)
        self.reserved: dict[tuple[Slot, int], tuple[bytes, range]] = {}
        self.held: dict[tuple[Slot, int], range] = {}

    def places(self, slot: Slot, num_slots: int) -> range:
        begin = (self.address(slot.row) - self.address(0)) // SLOT_BYTES
        return range(begin, begin + num_slots)

    def address(self, row: int) -> int:
        return np.frombuffer(self.memory.arena.view(row, 0), np.uint8).ctypes.data

    @rule(number=st.integers(0, 9), column=st.integers(0, 1), owner=st.sampled_from(OWNERS))
    def reserve(self, number, column, owner):
        num_slots = number % 3 + 1
        answer = self.memory.reserve(key(number), column, owner, length=num_slots * SLOT_BYTES)
        if answer.result is Reserved.SLOT:
            slots = self.places(answer.slot, num_slots)
            for (_, other_column), held_slots in self.held.items():
                assert other_column != column or not set(slots) & set(held_slots), (
                    "reserved slots overlap a held slot"
                )
            self.reserved[answer.slot, column] = owner, slots

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), action=st.sampled_from(["hold", "commit", "abort", "abort"]))
    def use(self, data, action):
        (slot, column), (owner, slots) = data.draw(st.sampled_from(list(self.reserved.items())))
        if action != "abort" and (slot, column) in self.held:
            lengths = [[len(slots) * SLOT_BYTES]] if action == "hold" else []
            with pytest.raises(StaleSlotError, match="is under way"):
                getattr(self.memory, action)([slot], column, owner, *lengths)
            return
        if action == "hold":
            self.memory.hold([slot], column, owner, [len(slots) * SLOT_BYTES])
            self.held[slot, column] = slots
        else:
            getattr(self.memory, action)([slot], column, owner)
            del self.reserved[slot, column]

    @rule(owner=st.sampled_from(OWNERS), is_proven_dead=st.booleans())
    def lose_owner(self, owner, is_proven_dead):
        self.memory.quarantine(owner)
        if is_proven_dead:
            self.memory.end_quarantine(owner)
        self.reserved = {
            place: reservation for place, reservation in self.reserved.items() if reservation[0] != owner
        }

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def copy_ends(self, data):
        slot, column = data.draw(st.sampled_from(list(self.held)))
        self.memory.end_hold([slot], column)
        del self.held[slot, column]

    @invariant()
    def number_of_held_slots_matches_the_model(self):
        assert self.memory.num_held == len(self.held)

    def teardown(self) -> None:
        """Check that the whole arena is usable after all copies and owners ended."""
        for slot, column in list(self.held):
            self.memory.end_hold([slot], column)
        for owner in OWNERS:
            self.memory.quarantine(owner)
            self.memory.end_quarantine(owner)
        self.now = 1000.0  # incomplete rows time out
        for number in range(100, 108):
            slot = reserve(self.memory, number)
            assert slot is not None
            for column in (0, 1):
                if column:
                    assert self.memory.reserve(key(number), 1, OWNERS[0], length=1).slot == slot
                self.memory.commit([slot], column, OWNERS[0])
        assert self.memory.num_used == 8


TestHeldSlots = HeldSlots.TestCase
TestHeldSlots.settings = settings(max_examples=examples(60), stateful_step_count=30)
