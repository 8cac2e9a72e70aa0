"""Frame allocator, compared with a plain list of slots."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache_store.tiers.memory.allocator import (
    EMPTY,
    GUARANTEED,
    SHARED,
    FrameAllocator,
    FrameSet,
    best_slots_per_frame,
)
from tests.harness.scope import examples


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(num_slots=st.integers(1, 90), slots_per_frame=st.sampled_from([1, 3, 4, 7, 16]))
    def begin(self, num_slots, slots_per_frame):
        self.allocator = FrameAllocator(num_slots, slots_per_frame)
        self.size = slots_per_frame
        self.slots: list[int | None] = [None] * num_slots  # number of the row in each slot
        self.rows: dict[int, int] = {}  # number of slots of each row
        self.kinds: dict[int, int] = {}  # of each frame, since its first row

    def runs(self, num_slots: int, num_frames: int) -> list[range]:
        """Return where a row of ``num_slots`` slots fits when all slots are free."""
        firsts = range(min(num_frames * self.size, len(self.slots)) - num_slots + 1)
        return [
            range(first, first + num_slots) for first in firsts if first % self.size + num_slots <= self.size
        ]

    def owners(self, run: range) -> set[int]:
        return {row for slot in run if (row := self.slots[slot]) is not None}

    def kind(self, frame: int) -> int:
        """Kind of the first row since the frame was empty."""
        start = frame * self.size
        return (
            self.kinds[frame] if self.owners(range(start, min(start + self.size, len(self.slots)))) else EMPTY
        )

    def longest_free_run(self, frame: int) -> int:
        slots = self.slots[frame * self.size : (frame + 1) * self.size]
        return max(len(run) for run in "".join("." if row is None else " " for row in slots).split())

    @rule(
        num_slots=st.integers(1, 16),
        usable=st.integers(0, 90),
        kinds=st.sampled_from([(SHARED, EMPTY), (GUARANTEED, EMPTY), (SHARED,), (GUARANTEED,)]),
    )
    def allocate(self, num_slots, usable, kinds):
        num_slots = min(num_slots, self.size)
        free = [
            run
            for run in self.runs(num_slots, usable)
            if not self.owners(run) and self.kind(run[0] // self.size) in kinds
        ]
        row = self.allocator.allocate(num_slots, usable, kinds)
        if not free:
            assert row is None
            return
        assert row is not None
        first = self.allocator.first_slot(row)
        assert range(first, first + num_slots) in free
        frames = {run[0] // self.size for run in free}
        best = min(frames, key=lambda frame: (self.longest_free_run(frame), frame))
        assert first // self.size == best, "low frames are filled first, so that others can be given up"
        assert row not in self.rows
        assert row < self.allocator.num_numbers
        assert row % self.allocator.num_frames == first // self.size
        self.kinds[first // self.size] = self.kind(first // self.size) or kinds[0]
        self.rows[row] = num_slots
        self.slots[first : first + num_slots] = [row] * num_slots

    @rule(row=st.integers(0, 89), num_slots=st.integers(1, 16))
    def allocate_at(self, row, num_slots):
        row %= self.allocator.num_numbers
        first = self.allocator.first_slot(row)
        run = range(first, first + num_slots)
        is_free = run in self.runs(num_slots, 90) and not self.owners(run)
        assert self.allocator.allocate_at(row, num_slots) == is_free
        if is_free:
            self.kinds[first // self.size] = self.kind(first // self.size) or SHARED
            self.rows[row] = num_slots
            self.slots[first : first + num_slots] = [row] * num_slots

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def free_row(self, data):
        row = data.draw(st.sampled_from(sorted(self.rows)))
        self.allocator.free(row)
        del self.rows[row]
        self.slots = [None if owner == row else owner for owner in self.slots]

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), num_slots=st.integers(1, 16))
    def list_ways_to_free(self, data, num_slots):
        row = data.draw(st.sampled_from(sorted(self.rows)))
        num_slots = min(num_slots, self.size)
        ways = self.allocator.ways_to_free(row, num_slots)
        first, size = self.allocator.first_slot(row), self.rows[row]
        if size >= num_slots:
            assert ways == [[row]]
            return
        runs = [run for run in self.runs(num_slots, 90) if first in run and first + size - 1 in run]
        assert sorted(map(sorted, ways)) == sorted(sorted(self.owners(run)) for run in runs)
        sizes = [sum(self.rows[other] for other in way) for way in ways]
        assert sizes == sorted(sizes)

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "allocator"):
            return
        assert self.allocator.num_rows == len(self.rows)
        assert self.allocator.num_used_slots == sum(self.rows.values())
        assert {row: self.allocator.size(row) for row in self.rows} == self.rows
        frames = range(self.allocator.num_frames)
        free = [0, 0, 0]
        for slot, owner in enumerate(self.slots):
            free[self.kind(slot // self.size)] += owner is None
        assert self.allocator.num_free_slots == free
        assert sorted(row for frame in frames for row in self.allocator.rows_in(frame)) == sorted(self.rows)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=examples(50), stateful_step_count=40)


def test_short_rows_share_frames_before_using_empty_frames():
    allocator = FrameAllocator(64, 16)
    short = [allocator.allocate(1, 4) for _ in range(16)]
    assert {row % 4 for row in short} == {0}
    assert [allocator.first_slot(allocator.allocate(16, 4)) for _ in range(3)] == [16, 32, 48]


def test_used_frame_is_filled_before_the_empty_short_one():
    allocator = FrameAllocator(6, 4)
    assert allocator.allocate_at(0, 2)
    row = allocator.allocate(2, 2)
    assert row is not None
    assert row % allocator.num_frames == 0


def test_rows_in_a_frame_have_no_gaps():
    allocator = FrameAllocator(16, 16)
    rows = [allocator.allocate(count, 1) for count in (9, 1, 2, 4)]
    assert [allocator.first_slot(row) for row in rows] == [0, 9, 10, 12]
    assert allocator.allocate(1, 1) is None


def test_allocates_the_smallest_sufficient_run():
    allocator = FrameAllocator(32, 16)
    rows = [allocator.allocate(count, 2) for count in (3, 1, 2, 1, 9, 16)]
    for row in (rows[0], rows[2]):
        allocator.free(row)
    assert allocator.first_slot(allocator.allocate(2, 2)) == 4
    assert allocator.first_slot(allocator.allocate(2, 2)) == 0


@pytest.mark.parametrize(
    ("row_sizes", "slots_per_frame", "slot_bytes"),
    [
        ([100_000], 1, 102_400),
        ([100_000] * 7, 1, 102_400),
        ([2 << 20, 1 << 20], 2, 1 << 20),
        ([3 << 20, 1 << 20], 3, 1 << 20),
        ([16 << 20, 1 << 20], 16, 1 << 20),
        ([64 << 20, 1 << 20], 16, 4 << 20),
        ([10 << 20, 9 << 20], 1, 10 << 20),  # a frame holds one row with any size of slot
        ([5 << 20, 3 << 20, 2 << 20], 5, 1 << 20),
        ([1 << 40, 1], 16, 1 << 36),
    ],
)
def test_slot_size_packs_rows_best(row_sizes, slots_per_frame, slot_bytes):
    assert best_slots_per_frame(row_sizes, 4096) == (slots_per_frame, slot_bytes)


@given(st.lists(st.integers(1, 1 << 24), min_size=1, max_size=8))
def test_frame_holds_the_largest_row_with_little_waste(row_sizes):
    slots_per_frame, slot_bytes = best_slots_per_frame(row_sizes, 4096)
    assert 1 <= slots_per_frame <= 16
    assert slot_bytes % 4096 == 0
    assert max(row_sizes) <= slots_per_frame * slot_bytes < max(row_sizes) + 16 * 4096


@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 5000])
def test_frame_set_returns_its_lowest_frame(size):
    frames = FrameSet(size, is_full=True)
    for frame in range(size):
        assert frames.lowest() == frame
        frames.remove(frame)
    assert frames.lowest() is None
    frames.add(size - 1)
    assert frames.lowest() == size - 1
