"""Which slots of an arena are free. Pure arithmetic, all of it O(1) whatever the fill.

Slots come in **frames** of ``slots_per_frame``. A row takes 1 .. ``slots_per_frame`` consecutive slots of
one frame. So a full chunk takes a frame, and the short chunks at the ends of prompts share frames.

**Which ones.** The tightest fit: a frame whose longest free run is the shortest that will do, of those the
lowest, and in it the shortest run. Whole frames are broken last, and the top of the arena runs empty, where
it can be given back.

**Why frames.** Share of the arena that is payload when all of it is in use (``python -m benchmarks tiers``):

========================  ============  =======  ======  =========
objects                   a frame each  buddies  frames  first fit
========================  ============  =======  ======  =========
prompts of the trace            99.1 %   99.7 %  99.8 %     99.8 %
prompts of 1-1024 tokens        80.3 %   93.9 %  97.9 %     99.9 %
tails alone                     50.2 %   79.2 %  93.1 %    100.0 %
========================  ============  =======  ======  =========

First fit (any length, anywhere) wins little more than what rounding to slots loses. It pays with a search
that grows with the number of gaps, with evictions until neighbours happen to meet, and with payloads that do
not begin at pages, as direct I/O and DMA want. Buddies (runs of a power of two) are no simpler.

**Numbers of rows.** A row is numbered ``offset * num_frames + frame`` by where in its frame it begins. Rows
that begin a frame come first, so that arrays over rows cost a full frame one entry and not sixteen: memory
that nobody touches is never taken. With one slot per frame, row and slot are the same number.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from lmcache.units import ceil_div, round_up

SLOTS_PER_FRAME = 16
"""Slots of a full chunk in an arena whose rows take several."""

_LEAF_BITS = 1024
_MAX_NEIGHBOURS = 16  # victims that are looked at for one whose neighbours are no loss
_PACKED_ROWS = 16  # of each size, when sizes of slots are compared


class FrameSet:
    """A set of frames that knows its lowest: two levels of bits."""

    def __init__(self, num_frames: int, *, is_full: bool = False) -> None:
        num_leaves = ceil_div(num_frames, _LEAF_BITS)
        self._leaves = [0] * num_leaves
        self._summary = 0  # leaves that are not empty
        if is_full and num_frames:
            self._leaves = [(1 << _LEAF_BITS) - 1] * num_leaves
            self._leaves[-1] >>= num_leaves * _LEAF_BITS - num_frames
            self._summary = (1 << num_leaves) - 1

    def add(self, frame: int) -> None:
        """Put a frame in."""
        leaf = frame // _LEAF_BITS
        self._leaves[leaf] |= 1 << frame % _LEAF_BITS
        self._summary |= 1 << leaf

    def remove(self, frame: int) -> None:
        """Take out a frame that is in."""
        leaf = frame // _LEAF_BITS
        self._leaves[leaf] ^= 1 << frame % _LEAF_BITS
        if not self._leaves[leaf]:
            self._summary ^= 1 << leaf

    def lowest(self) -> int | None:
        """Return the lowest frame that is in."""
        if not self._summary:
            return None
        leaf = _lowest_bit(self._summary)
        return leaf * _LEAF_BITS + _lowest_bit(self._leaves[leaf])


class FrameAllocator:
    """Free slots of ``num_slots``; the last frame may be short. ``slots_per_frame``: at most 16."""

    def __init__(self, num_slots: int, slots_per_frame: int = 1) -> None:
        self.num_slots = num_slots
        self.slots_per_frame = slots_per_frame
        self.num_frames = ceil_div(num_slots, slots_per_frame)
        self.num_rows = 0  # taken
        self.num_used_slots = 0
        # Bits are the slots of one frame.
        self._free = array("H", [(1 << slots_per_frame) - 1]) * self.num_frames
        self._first = array("H", [0]) * self.num_frames  # a row begins here
        self._last = array("H", [0]) * self.num_frames  # a row ends here
        # By the number of slots of the longest run that is free.
        self._frames = [
            FrameSet(self.num_frames, is_full=length == slots_per_frame)
            for length in range(slots_per_frame + 1)
        ]
        missing = self.num_frames * slots_per_frame - num_slots
        if missing:
            self._set_free(self.num_frames - 1, self._free[-1] >> missing)

    @property
    def num_numbers(self) -> int:
        """Numbers of rows are below this."""
        return self.num_frames * self.slots_per_frame

    def allocate(self, num_slots: int, num_usable_frames: int) -> int | None:
        """Take a row of ``num_slots`` in a frame below the bound; None when none has a run that long."""
        for frames in self._frames[num_slots:]:
            frame = frames.lowest()
            if frame is not None and frame < num_usable_frames:
                offset = _shortest_run(self._free[frame], num_slots)
                self._occupy(frame, offset, num_slots)
                return offset * self.num_frames + frame
        return None

    def allocate_at(self, row: int, num_slots: int) -> bool:
        """Take the row that has this number. False: one of its slots is not free, or there are fewer."""
        frame, offset = row % self.num_frames, row // self.num_frames
        slots = _bits(offset, num_slots)
        is_free = slots & self._free[frame] == slots
        if is_free:
            self._occupy(frame, offset, num_slots)
        return is_free

    def free(self, row: int) -> None:
        """Give a row back."""
        frame, offset, num_slots = row % self.num_frames, row // self.num_frames, self.size(row)
        self._first[frame] ^= 1 << offset
        self._last[frame] ^= 1 << offset + num_slots - 1
        self._set_free(frame, self._free[frame] | _bits(offset, num_slots))
        self.num_rows -= 1
        self.num_used_slots -= num_slots

    def size(self, row: int) -> int:
        """Slots of a row."""
        if self.slots_per_frame == 1:
            return 1
        return _lowest_bit(self._last[row % self.num_frames] >> row // self.num_frames) + 1

    def first_slot(self, row: int) -> int:
        """Return where the row begins."""
        return first_slot(row, self.num_frames, self.slots_per_frame)

    def used_frames(self, first: int) -> list[int]:
        """Frames from this one on of which a slot is taken (and the last one, where it is short)."""
        whole = (1 << self.slots_per_frame) - 1
        return [frame for frame, free in enumerate(self._free[first:], first) if free != whole]

    def rows_in(self, frame: int) -> list[int]:
        """Rows of one frame."""
        first = self._first[frame]
        return [
            offset * self.num_frames + frame for offset in range(first.bit_length()) if first >> offset & 1
        ]

    def ways_to_free(self, row: int, num_slots: int) -> list[list[int]]:
        """Sets of rows, this one always among them, of which one has to go so that its slots become part of a
        free run of ``num_slots``; the set of the fewest slots first, none when the frame is too short."""
        size = self.size(row)
        if size >= num_slots:
            return [[row]]
        frame, offset = row % self.num_frames, row // self.num_frames
        num_present = min(self.slots_per_frame, self.num_slots - frame * self.slots_per_frame)
        pieces = [
            (other, other // self.num_frames, other // self.num_frames + self.size(other))
            for other in self.rows_in(frame)
        ]
        firsts = range(max(0, offset + size - num_slots), min(offset, num_present - num_slots) + 1)
        ways = [
            [other for other, begin, end in pieces if begin < first + num_slots and end > first]
            for first in firsts
        ]
        return sorted(ways, key=lambda way: sum(map(self.size, way)))

    def leaving(
        self, victims: Iterable[int], num_slots: int, is_used: Callable[[int], object]
    ) -> Sequence[int]:
        """Choose rows of one frame that are to go so that ``num_slots`` are free: none if nothing helps.

        ``victims``: in the order in which they can be spared. Their neighbours need not be old because they
        are: so among the next few of them those go first whose neighbours are victims, too.
        """
        older: set[int] = set()
        fallback: Sequence[int] = ()
        for victim in victims:
            older.add(victim)
            for rows in self.ways_to_free(victim, num_slots):
                if not any(map(is_used, rows)):
                    if older.issuperset(rows):
                        return rows
                    fallback = fallback or rows
            if fallback and len(older) >= _MAX_NEIGHBOURS:
                break
        return fallback

    def _occupy(self, frame: int, offset: int, num_slots: int) -> None:
        self._first[frame] |= 1 << offset
        self._last[frame] |= 1 << offset + num_slots - 1
        self._set_free(frame, self._free[frame] & ~_bits(offset, num_slots))
        self.num_rows += 1
        self.num_used_slots += num_slots

    def _set_free(self, frame: int, free: int) -> None:
        before, after = _longest_run(self._free[frame]), _longest_run(free)
        self._free[frame] = free
        if before and before != after:
            self._frames[before].remove(frame)
        if after and before != after:
            self._frames[after].add(frame)


def first_slot(row: int, num_frames: int, slots_per_frame: int) -> int:
    """Return the slot at which the row of this number begins."""
    return row % num_frames * slots_per_frame + row // num_frames


def best_slots_per_frame(row_sizes: Sequence[int], unit: int) -> tuple[int, int]:
    """Return how many slots of which size (a multiple of ``unit``) make a frame, so that rows of these sizes,
    as many of each, take the least memory; a frame holds the largest. All in bytes."""
    largest = max(row_sizes)
    best_bytes, best = 0, (1, round_up(largest, unit))
    for slots_per_frame in range(1, SLOTS_PER_FRAME + 1):
        slot_bytes = round_up(ceil_div(largest, slots_per_frame), unit)
        sizes = [ceil_div(size, slot_bytes) for size in row_sizes] * _PACKED_ROWS
        num_bytes = _num_frames(sizes, slots_per_frame) * slots_per_frame * slot_bytes
        if num_bytes < best_bytes or not best_bytes:
            best_bytes, best = num_bytes, (slots_per_frame, slot_bytes)
    return best


def _num_frames(sizes: Sequence[int], slots_per_frame: int) -> int:
    """Frames for rows of so many slots: the largest first, each where it fits tightest."""
    num_frames = 0
    rests = [0] * (slots_per_frame + 1)  # frames by the slots that are left of them
    for size in sorted(sizes, reverse=True):
        room = next((room for room in range(size, slots_per_frame + 1) if rests[room]), 0)
        if room:
            rests[room] -= 1
        else:
            num_frames, room = num_frames + 1, slots_per_frame
        rests[room - size] += 1
    return num_frames


def _bits(offset: int, count: int) -> int:
    return (1 << count) - 1 << offset


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


@lru_cache(4096)
def _longest_run(free: int) -> int:
    length = 0
    while free:
        free &= free >> 1
        length += 1
    return length


@lru_cache(4096)
def _shortest_run(free: int, num_slots: int) -> int:
    """Where the shortest run of at least ``num_slots`` free slots begins, so that longer ones stay whole."""
    best, best_length = 0, free.bit_length() + 1
    offset = 0
    while free >> offset:
        offset += _lowest_bit(free >> offset)
        length = _lowest_bit(~(free >> offset))
        if num_slots <= length < best_length:
            best, best_length = offset, length
        offset += length
    return best
