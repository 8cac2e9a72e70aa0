"""Which slots of an arena are free. Pure arithmetic, all of it O(1) whatever the fill.

Slots come in **frames** of ``slots_per_frame``. A row takes 1 .. ``slots_per_frame`` consecutive slots of
one frame, beginning at a multiple of their number rounded up to a power of two (a buddy); what the rounding
adds is given back. So a full chunk takes a frame, and the short chunks at the ends of prompts share frames.

**Which one.** The fullest frame that has room, and of those the lowest: large blocks last, and the top of the
arena runs empty, where it can be given back.

**Numbers of rows.** A row is numbered ``offset * num_frames + frame`` by where in its frame it begins. Rows
that begin a frame come first, so that arrays over rows cost a full frame one entry and not sixteen: memory
that nobody touches is never taken. With one slot per frame, row and slot are the same number.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from functools import lru_cache
from typing import Literal

SLOTS_PER_FRAME = 16
"""Slots of a full chunk in an arena whose rows take several."""

_LEAF_BITS = 1024
_PAIRS = ((1, 0x5555), (2, 0x1111), (4, 0x0101), (8, 0x0001))  # per order: size, where pairs may begin


def zeros(count: int, code: Literal["B", "I"]) -> memoryview[int]:
    """Return ``count`` numbers of a ``struct`` code, all 0; only what is touched takes memory."""
    memory = mmap.mmap(-1, max(1, count) * struct.calcsize(code), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memoryview(memory).cast(code)


class FrameSet:
    """A set of frames that knows its lowest: two levels of bits."""

    def __init__(self, num_frames: int, *, is_full: bool = False) -> None:
        num_leaves = -(-num_frames // _LEAF_BITS)
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
    """Free slots of ``num_slots``; the last frame may be short. ``slots_per_frame``: a power of two <= 16."""

    def __init__(self, num_slots: int, slots_per_frame: int = 1) -> None:
        self.num_slots = num_slots
        self.slots_per_frame = slots_per_frame
        self.num_frames = -(-num_slots // slots_per_frame)
        self.num_rows = 0  # taken
        self.num_slots_taken = 0
        # Bits are the slots of one frame.
        self._free = array("H", [(1 << slots_per_frame) - 1]) * self.num_frames
        self._first = array("H", [0]) * self.num_frames  # a row begins here
        self._last = array("H", [0]) * self.num_frames  # a row ends here
        num_orders = slots_per_frame.bit_length()
        # By the size of the largest block that is free.
        self._frames = [
            FrameSet(self.num_frames, is_full=order == num_orders - 1) for order in range(num_orders)
        ]
        missing = self.num_frames * slots_per_frame - num_slots
        if missing:
            self._set_free(self.num_frames - 1, self._free[-1] >> missing)

    @property
    def num_numbers(self) -> int:
        """Numbers of rows are below this."""
        return self.num_frames * self.slots_per_frame

    def take(self, num_slots: int, num_usable_frames: int) -> int | None:
        """Take a row of so many slots in a frame below the bound; None when no block is free there."""
        order = (num_slots - 1).bit_length()
        for frames in self._frames[order:]:
            frame = frames.lowest()
            if frame is not None and frame < num_usable_frames:
                offset = _smallest_block(self._free[frame], order)
                self._occupy(frame, offset, num_slots)
                return offset * self.num_frames + frame
        return None

    def take_at(self, row: int) -> None:
        """Take the row of one slot that has this number and is free."""
        self._occupy(row % self.num_frames, row // self.num_frames, 1)

    def give(self, row: int) -> None:
        """Give a row back."""
        frame, offset, num_slots = row % self.num_frames, row // self.num_frames, self.size(row)
        self._first[frame] ^= 1 << offset
        self._last[frame] ^= 1 << offset + num_slots - 1
        self._set_free(frame, self._free[frame] | _bits(offset, num_slots))
        self.num_rows -= 1
        self.num_slots_taken -= num_slots

    def size(self, row: int) -> int:
        """Slots of a row."""
        return _lowest_bit(self._last[row % self.num_frames] >> row // self.num_frames) + 1

    def first_slot(self, row: int) -> int:
        """Return where the row begins."""
        return row % self.num_frames * self.slots_per_frame + row // self.num_frames

    def rows_in(self, frame: int) -> list[int]:
        """Rows of one frame."""
        first = self._first[frame]
        return [
            offset * self.num_frames + frame for offset in range(first.bit_length()) if first >> offset & 1
        ]

    def in_the_way(self, row: int, num_slots: int) -> list[int]:
        """Rows that must go, this one among them, so that its slots become part of a block for ``num_slots``;
        none when the frame is too short."""
        size = 1 << (num_slots - 1).bit_length()
        if self.size(row) >= size:
            return [row]
        frame, offset = row % self.num_frames, row // self.num_frames
        start = offset - offset % size
        if frame * self.slots_per_frame + start + size > self.num_slots:
            return []
        return [
            other
            for other in self.rows_in(frame)
            if other // self.num_frames < start + size and other // self.num_frames + self.size(other) > start
        ]

    def _occupy(self, frame: int, offset: int, num_slots: int) -> None:
        self._first[frame] |= 1 << offset
        self._last[frame] |= 1 << offset + num_slots - 1
        self._set_free(frame, self._free[frame] & ~_bits(offset, num_slots))
        self.num_rows += 1
        self.num_slots_taken += num_slots

    def _set_free(self, frame: int, free: int) -> None:
        before, after = _largest_order(self._free[frame]), _largest_order(free)
        self._free[frame] = free
        if before != after:
            if before >= 0:
                self._frames[before].remove(frame)
            if after >= 0:
                self._frames[after].add(frame)


def _bits(offset: int, count: int) -> int:
    return (1 << count) - 1 << offset


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


@lru_cache(4096)
def _largest_order(free: int) -> int:
    """Order of the largest free block; -1: nothing is free."""
    order = -1
    for size, begins in _PAIRS:
        if not free:
            return order
        order += 1
        free &= free >> size & begins
    return order + bool(free)


@lru_cache(4096)
def _smallest_block(free: int, order: int) -> int:
    """Where the smallest free block of at least this order begins, so that larger ones stay whole."""
    for size, begins in _PAIRS[:order]:
        free &= free >> size & begins
    for size, begins in _PAIRS[order:]:
        pairs = free & free >> size & begins
        alone = free & ~(pairs | pairs << size)
        if alone:
            return _lowest_bit(alone)
        free = pairs
    return _lowest_bit(free)
