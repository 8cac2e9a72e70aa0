"""Rows of several slots in frames, against a list of slots."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache.tiers.allocator import FrameAllocator, FrameSet


def power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(num_slots=st.integers(1, 90), slots_per_frame=st.sampled_from([1, 4, 16]))
    def begin(self, num_slots, slots_per_frame):
        self.allocator = FrameAllocator(num_slots, slots_per_frame)
        self.size = slots_per_frame
        self.slots: list[int | None] = [None] * num_slots  # the row that has it
        self.rows: dict[int, int] = {}  # slots

    def free_blocks(self, num_slots: int, num_frames: int) -> list[int]:
        """Where a row of so many slots could begin."""
        size = power_of_two(num_slots)
        starts = range(0, min(num_frames * self.size, len(self.slots)) - size + 1, size)
        return [start for start in starts if set(self.slots[start : start + size]) == {None}]

    @rule(num_slots=st.integers(1, 16), usable=st.integers(0, 90))
    def take(self, num_slots, usable):
        num_slots = min(num_slots, self.size)
        free = self.free_blocks(num_slots, usable)
        row = self.allocator.take(num_slots, usable)
        if not free:
            assert row is None
            return
        first = self.allocator.first_slot(row)
        assert first in free
        assert row not in self.rows
        assert row < self.allocator.num_numbers
        assert row % self.allocator.num_frames == first // self.size
        self.rows[row] = num_slots
        self.slots[first : first + num_slots] = [row] * num_slots

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def give(self, data):
        row = data.draw(st.sampled_from(sorted(self.rows)))
        self.allocator.give(row)
        del self.rows[row]
        self.slots = [None if other == row else other for other in self.slots]

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), num_slots=st.integers(1, 16))
    def ask_who_is_in_the_way(self, data, num_slots):
        row = data.draw(st.sampled_from(sorted(self.rows)))
        num_slots = min(num_slots, self.size)
        rows = self.allocator.in_the_way(row, num_slots)
        size = power_of_two(num_slots)
        start = self.allocator.first_slot(row) // size * size
        if start + size > len(self.slots) and self.rows[row] < size:
            assert rows == []
        else:
            assert row in rows
            kept = [other if other not in rows else None for other in self.slots]
            assert kept[start : start + num_slots] == [None] * num_slots
            assert set(rows) <= {*self.slots[start : start + size], row}

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "allocator"):
            return
        assert self.allocator.num_rows == len(self.rows)
        assert self.allocator.num_slots_taken == sum(self.rows.values())
        assert {row: self.allocator.size(row) for row in self.rows} == self.rows
        frames = range(self.allocator.num_frames)
        assert sorted(row for frame in frames for row in self.allocator.rows_in(frame)) == sorted(self.rows)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_one_slot_per_row_goes_lowest_first():
    allocator = FrameAllocator(5000)
    assert [allocator.take(1, 5000) for _ in range(5000)] == list(range(5000))
    assert allocator.take(1, 5000) is None
    for row in (4999, 17, 1024, 1023):
        allocator.give(row)
    assert [allocator.take(1, 5000) for _ in range(4)] == [17, 1023, 1024, 4999]


def test_rows_beyond_the_bound_are_not_given():
    allocator = FrameAllocator(64)
    assert [allocator.take(1, 2) for _ in range(3)] == [0, 1, None]


def test_short_rows_share_frames_and_leave_whole_ones_whole():
    allocator = FrameAllocator(64, 16)
    short = [allocator.take(1, 4) for _ in range(16)]
    assert {row % 4 for row in short} == {0}
    assert [allocator.first_slot(allocator.take(16, 4)) for _ in range(3)] == [16, 32, 48]


def test_what_rounding_adds_is_given_back():
    allocator = FrameAllocator(16, 16)
    rows = [allocator.take(count, 1) for count in (9, 1, 2, 4)]
    assert [allocator.first_slot(row) for row in rows] == [0, 9, 10, 12]
    assert allocator.take(1, 1) is None


@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 5000])
def test_a_set_of_frames_knows_its_lowest(size):
    frames = FrameSet(size, is_full=True)
    for frame in range(size):
        assert frames.lowest() == frame
        frames.remove(frame)
    assert frames.lowest() is None
    frames.add(size - 1)
    assert frames.lowest() == size - 1
