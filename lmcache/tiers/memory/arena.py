"""The arena: memory for rows, one shared-memory file that outlives the sidecar.

**Filling the file.** Pages are taken by this process first, so that its cgroup pays, and before anybody
touches them, so that a lack of memory is an error and not a SIGBUS: extent by extent, ``posix_fallocate`` and
then ``MADV_POPULATE_WRITE``, in a background thread. Before the first format the file is filled from its
start, as one column of pages; after it by ranges of rows over all columns, since a row is usable only when
all its columns are. What is filled already costs next to nothing then: all of one column; of several, which
are as far apart as the largest size makes them, a part, and the rest is given back, turn by turn.

**Size.** The file's size is its capacity and never changes. What it takes of memory is up to ``resize``: it
grows by extents that are populated, each when there is room for it, and shrinks, on ``give_back``, by extents
in which holes are punched, so that clients that have them mapped read zeros and are never hit by a SIGBUS.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lmcache.tiers.errors import ArenaError
from lmcache.tiers.memory.allocator import first_slot
from lmcache.tiers.memory.capacity import check_room
from lmcache.tiers.memory.contracts import Geometry
from lmcache.tiers.memory.kernel_pages import (
    check_node,
    collapse,
    first_data,
    missing_bytes,
    place,
    populate,
    prefer_huge_pages,
    punch_hole,
    taken_bytes,
)
from lmcache.tiers.memory.layout import HEAD_BYTES, ArenaLayout, Head
from lmcache.tiers.memory.opening import allocate, open_arena
from lmcache.tiers.memory.shared_index import BUCKET_BYTES, SharedIndex
from lmcache.tiers.memory.slots import ENTRY, SlotTable
from lmcache.tiers.pages import PAGE_BYTES

logger = logging.getLogger(__name__)

_MAX_EXTENT_BYTES = 1 << 30
_EXTENTS_PER_ARENA = 16
_STEP_BYTES = 64 << 20  # between two looks at what room there is, and whether the arena is being closed
_RETRY_SECONDS = 1.0  # after it could not grow or shrink


class ArenaFile:
    """The file at ``path``: created, or adopted when its capacity and version fit.

    ``target_bytes``: see ``resize``, at first all; ``huge_pages``: faster copies for a slower start;
    ``numa_node``: whose memory is taken first.
    A file of another capacity is unlinked, never truncated: clients may still have it mapped.
    Raises ArenaError when there is no room (saying how much is needed and where), when another process uses
    the file as its arena, or when it is something else; the file is left as it was then.
    """

    table: SlotTable
    """What is known about every slot; set by the first format."""

    shared_index: SharedIndex | None
    """Of the same format."""

    geometry: Geometry | None
    """None until the arena is formatted."""

    first_generation: int
    """Generations of earlier formats are below this."""

    epoch: int
    """Changes at every open and every ``format``; never comes back."""

    def __init__(
        self,
        path: str | Path,
        capacity_bytes: int,
        *,
        target_bytes: int | None = None,
        huge_pages: bool = False,
        numa_node: int | None = None,
    ) -> None:
        if numa_node is not None:
            check_node(numa_node)
        self.path = Path(path)
        self.num_rows = 0  # slots of a column when all extents are ready; 0 until formatted
        self.growth_error: str | None = None  # why it does not get on; None while nothing is wrong
        self.capacity_bytes = capacity_bytes - capacity_bytes % PAGE_BYTES  # of the file
        self.target_bytes = self.capacity_bytes if target_bytes is None else target_bytes
        self._huge_pages = huge_pages
        self._changed = threading.Condition()
        # protected by _changed
        self._layout = ArenaLayout.unformatted(self.capacity_bytes)
        self._grown = 0  # slots of the layout that are populated
        self._filled = 0  # slots that may take memory
        self._kept = 0  # slots that are not given back though they are not wanted any more
        self._closing = False
        self._thread: threading.Thread | None = None
        try:
            self._fd, head = open_arena(self.path, self.capacity_bytes, self.target_bytes)
            self._map = mmap.mmap(self._fd, self.capacity_bytes)
        except OSError as error:
            raise ArenaError(f"can't open the arena {self.path}: {error.strerror}") from error
        self._data = np.frombuffer(self._map, np.uint8)
        if numa_node is not None:
            place(self._data, numa_node)
        if huge_pages:
            prefer_huge_pages(self._data)
        self.epoch = head.epoch
        if head.geometry is not None:
            self._set_layout(ArenaLayout.plan(self.capacity_bytes, head.geometry))
            self._kept = self._filled  # there may be rows, and clients of before that have them pinned
        self._write_head(head.geometry, head.first_generation)

    @property
    def ready_rows(self) -> int:
        """Slots below this number are populated: whole frames."""
        return self._grown if self.num_rows else 0

    def start(self, on_growth: Callable[[], None]) -> None:
        """Populate in a background thread; ``on_growth`` is called from it after each extent, grown or given
        back, and on an error."""
        self._thread = threading.Thread(target=self._grow, args=(on_growth,), name="arena", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the descriptor of the file; whoever inherits it holds the lock that keeps other sidecars
        from it."""
        return self._fd

    def check(self, geometry: Geometry) -> None:
        """Raise ArenaError if ``format`` would, for want of room for a row."""
        ArenaLayout.plan(self.capacity_bytes, geometry)

    def format(self, geometry: Geometry) -> None:
        """Drop everything and lay the arena out anew: all slots free, another epoch, generations go on
        rising.

        Raises ArenaError, changing nothing, when not even one row fits. The caller made sure that nobody uses
        the old layout any more.
        """
        layout = ArenaLayout.plan(self.capacity_bytes, geometry)
        first_generation = self.first_generation
        if self.geometry is not None:
            first_generation = self.table.next_generation(first_generation)
        # Without a geometry the head disowns the table: a death from here on leaves an unformatted arena.
        self._write_head(None, first_generation)
        allocate(self._fd, 0, layout.data_offset)
        self._data[HEAD_BYTES : layout.data_offset] = 0
        for start, end in layout.gaps(self.capacity_bytes):
            punch_hole(self._fd, start, end - start)
        self._set_layout(layout)
        self._write_head(geometry, first_generation)

    def rows_within(self, target_bytes: int) -> int:
        """Slots of the frames that fit into ``target_bytes`` beside head, slot table and index; at least one
        frame."""
        layout = self._layout
        if target_bytes >= self.capacity_bytes:
            return layout.num_rows
        frame_slots = layout.geometry.slots_per_frame
        num_frames = (target_bytes - layout.data_offset) // (layout.row_bytes * frame_slots)
        return min(layout.num_rows, max(1, num_frames) * frame_slots)

    def bytes_of(self, num_rows: int) -> int:
        """What so many slots take, with head, slot table and index."""
        return min(self.capacity_bytes, self._layout.data_offset + num_rows * self._layout.row_bytes)

    @property
    def target_rows(self) -> int:
        """Slots that are to be populated, and no others."""
        return self.rows_within(self.target_bytes)

    @property
    def size_bytes(self) -> int:
        """At most so much memory is taken: the target if that, and nothing else, is populated."""
        is_there = self._grown == self._filled == self.target_rows
        taken = self.bytes_of(self._filled)
        return max(self.target_bytes, taken) if is_there else taken

    @property
    def taken_bytes(self) -> int:
        """What is taken now, be it of use or not: less than ``size_bytes`` while there are holes in it."""
        return taken_bytes(self._fd)

    @property
    def has_surplus(self) -> bool:
        """Have slots been ready that are not wanted any more, and were not given back?"""
        return self._kept > self.target_rows

    def resize(self, target_bytes: int) -> None:
        """Populate the ``rows_within`` these bytes in the background, and show no others as ready. Those
        beyond keep their memory, and what is in it, until ``give_back``."""
        with self._changed:
            self._kept = max(self._kept, self._grown)
            self.target_bytes = target_bytes
            self._grown = min(self._grown, self.target_rows)
            self.growth_error = None
            self._changed.notify_all()

    def give_back(self) -> None:
        """Give the memory beyond the target back, in the background.

        There must be no rows (the memory tier has to ``vacate`` them first), and nobody may have pinned pages
        there: a device would go on with the old ones when they are populated again.
        """
        with self._changed:
            self._kept = 0
            self._changed.notify_all()

    def table_offset(self, column: int) -> int:
        """Byte offset of the slot table of one column: ``num_rows`` entries of 128 bytes."""
        return self._formatted().table_offset(column)

    @property
    def index_place(self) -> tuple[int, int]:
        """Byte offset of the shared index, and its number of buckets."""
        layout = self._formatted()
        return layout.index_offset, layout.num_buckets

    def column_offset(self, column: int) -> int:
        """Byte offset of slot 0 of a column; slots follow each other without gaps."""
        return self._formatted().slot_offset(0, column)

    def view(self, row: int, column: int, length: int | None = None) -> memoryview:
        """The first ``length`` writable bytes of a row's column; not given: its first slot."""
        offset = self.row_offset(row, column)
        return self._data[
            offset : offset + (self._layout.geometry.slot_bytes if length is None else length)
        ].data

    def row_offset(self, row: int, column: int) -> int:
        """Byte offset of a row's column. Raises IndexError."""
        layout, geometry = self._formatted(), self._layout.geometry
        if not (0 <= row < layout.num_rows and 0 <= column < geometry.num_columns):
            raise IndexError(f"no slot ({row}, {column})")
        return layout.slot_offset(first_slot(row, layout.num_frames, geometry.slots_per_frame), column)

    def close(self) -> None:
        """Stop populating and let go of the file; it stays for the next process."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        os.close(self._fd)
        del self._data
        if self.geometry is not None:
            del self.table, self.shared_index
        # Views that others still hold keep the mapping until they go.
        with contextlib.suppress(BufferError):
            self._map.close()

    def _formatted(self) -> ArenaLayout:
        if self.geometry is None:
            raise ArenaError("the arena is not formatted yet")
        return self._layout

    def _set_layout(self, layout: ArenaLayout) -> None:
        columns = layout.geometry.num_columns
        table = self._data[HEAD_BYTES : layout.table_offset(columns)]
        self.table = SlotTable(table.view(ENTRY).reshape(columns, layout.num_rows))
        end = layout.index_offset + layout.num_buckets * BUCKET_BYTES
        self.shared_index = SharedIndex(self._data[layout.index_offset : end])
        with self._changed:
            self._layout = layout
            self._grown = 0
            self._filled = self._find_filled()  # by an earlier format or process
            self._kept = 0  # nobody uses them
            self.num_rows = layout.num_rows  # last: until then ready_rows is that of the old layout
            self.growth_error = None
            self._changed.notify_all()

    def _write_head(self, geometry: Geometry | None, first_generation: int) -> None:
        # The clock keeps epochs apart even when the file itself was lost in between.
        self.epoch = max(self.epoch + 1, time.time_ns())
        self.geometry, self.first_generation = geometry, first_generation
        packed = Head(self.capacity_bytes, self.epoch, first_generation, geometry).pack()
        self._data[: len(packed)] = np.frombuffer(packed, np.uint8)

    def _grow(self, on_growth: Callable[[], None]) -> None:
        while (extent := self._next_extent()) is not None:
            layout, rows, is_wanted = extent
            error, is_done = None, False
            try:
                is_done = (self._take if is_wanted else self._give_back)(layout, rows)
            except Exception as caught:  # whatever it is: nobody else would grow or shrink it
                bug = None if isinstance(caught, ArenaError) else caught
                error = f"{bug!r}" if bug else f"{caught}"
                error += f"; the arena {self.path} stays at {rows.start * layout.row_bytes} bytes"
                if self.growth_error is None:
                    logger.error("%s", error, exc_info=bug)
            with self._changed:
                if self._closing:
                    return
                if self._layout is layout:
                    self.growth_error = error
                    if is_done:
                        self._note_extent(rows, is_wanted=is_wanted)
                else:
                    self._filled = self._find_filled()
            on_growth()

    def _note_extent(self, rows: range, *, is_wanted: bool) -> None:
        if not is_wanted:
            self._filled = rows.start
        # Else the arena was made smaller meanwhile, and these rows are to be given back.
        elif rows.start == self._grown and rows.stop <= self.target_rows:
            self._grown = rows.stop

    def _next_extent(self) -> tuple[ArenaLayout, range, bool] | None:
        """Wait for rows to populate (True) or to give back; None when the arena is being closed."""
        is_due = False
        with self._changed:
            while not self._closing:
                layout, extent, target = self._layout, self._extent_rows, self.target_rows
                kept = max(target, self._kept)
                rows = range(self._grown, min(target, self._grown + extent))
                if self.growth_error is None or is_due:
                    # First what can be used at once, while there is room beside what is to be given back.
                    if rows and (self._filled <= kept or (not is_due and self._has_room(rows))):
                        self._filled = max(self._filled, rows.stop)
                        return layout, rows, True
                    if self._filled > kept:
                        return layout, range(max(kept, self._filled - extent), self._filled), False
                is_due = not self._changed.wait(_RETRY_SECONDS if self.growth_error else None)
        return None

    def _has_room(self, rows: range) -> bool:
        """May they be populated before what is not wanted any more is given back?"""
        return self.taken_bytes + len(rows) * self._layout.row_bytes <= self.target_bytes

    def _find_filled(self) -> int:
        """Slots beyond this number take no memory."""
        layout, frame_slots = self._layout, self._layout.geometry.slots_per_frame

        def is_empty_from(frame: int) -> bool:
            pieces = layout.pieces(range(frame * frame_slots, layout.num_rows))
            return all(first_data(self._fd, start, end) == end for start, end in pieces)

        return bisect.bisect_left(range(layout.num_frames), True, key=is_empty_from) * frame_slots

    @property
    def _extent_rows(self) -> int:
        frame_slots = self._layout.geometry.slots_per_frame
        frame_bytes = frame_slots * self._layout.row_bytes
        extent_bytes = min(_MAX_EXTENT_BYTES, self.capacity_bytes // _EXTENTS_PER_ARENA)
        return frame_slots * max(1, extent_bytes // frame_bytes)

    def _take(self, layout: ArenaLayout, rows: range) -> bool:
        """Return whether it came to the end."""
        for start, end in layout.pieces(rows):
            for offset in range(start, end, _STEP_BYTES):
                if self._closing or self._layout is not layout or rows.stop > self.target_rows:
                    return False
                step = min(_STEP_BYTES, end - offset)
                if missing := missing_bytes(self._fd, offset, offset + step):
                    check_room(missing)
                    allocate(self._fd, offset, step)
                    populate(self._data[offset : offset + step])
                if self._huge_pages:
                    collapse(self._data[offset : offset + step])
        return True

    def _give_back(self, layout: ArenaLayout, rows: range) -> bool:
        # The next format may have its slot table where these rows were: it has to wait.
        with self._changed:
            if self._layout is layout:
                # To the end: the last page may be a huge one, of which some lies beyond what was asked for.
                for start, end in layout.pieces(range(rows.start, layout.num_rows)):
                    punch_hole(self._fd, start, end - start)
        return True
