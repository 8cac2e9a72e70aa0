"""The arena: memory for rows, one shared-memory file that outlives the sidecar.

**Filling the file.** Pages are taken by this process first, so that its cgroup pays, and before anybody
touches them, so that a lack of memory is an error and not a SIGBUS: extent by extent, ``posix_fallocate`` and
then ``MADV_POPULATE_WRITE``, in a background thread. Before the first format the file is filled from its
start, as one column of pages; after it by ranges of rows over all columns, since a row is usable only when
all its columns are (what is filled already costs next to nothing then).

**Size.** The file's size is its capacity and never changes. What it takes of memory is up to ``resize``: it
grows by extents that are populated, and shrinks by extents in which holes are punched, so that clients that
have them mapped read zeros and are never hit by a SIGBUS.
"""

from __future__ import annotations

import contextlib
import fcntl
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
from lmcache.tiers.memory.capacity import check_capacity
from lmcache.tiers.memory.contracts import Geometry
from lmcache.tiers.memory.kernel_pages import (
    check_node,
    collapse,
    place,
    populate,
    prefer_huge_pages,
    punch_hole,
)
from lmcache.tiers.memory.layout import HEAD_BYTES, ArenaLayout, Head
from lmcache.tiers.memory.shared_index import BUCKET_BYTES, SharedIndex
from lmcache.tiers.memory.slots import ENTRY, SlotTable
from lmcache.tiers.pages import PAGE_BYTES

logger = logging.getLogger(__name__)

_MAX_EXTENT_BYTES = 1 << 30
_EXTENTS_PER_ARENA = 16
_STEP_BYTES = 64 << 20  # between two looks at whether the arena is being closed


class ArenaFile:
    """The file at ``path``: created, or adopted when its capacity and version fit.

    ``huge_pages``: faster copies for a slower start; ``numa_node``: whose memory is taken first.
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
        huge_pages: bool = False,
        numa_node: int | None = None,
    ) -> None:
        if numa_node is not None:
            check_node(numa_node)
        self.path = Path(path)
        self.num_rows = 0  # slots of a column when all extents are ready; 0 until formatted
        self.growth_error: str | None = (
            None  # why growing stopped below capacity; None while nothing is wrong
        )
        self.size_bytes = capacity_bytes - capacity_bytes % PAGE_BYTES  # of the file, whatever is in memory
        self._huge_pages = huge_pages
        self._changed = threading.Condition()
        # protected by _changed
        self._layout = ArenaLayout.unformatted(self.size_bytes)
        self._target_bytes = self.size_bytes
        self._grown = 0  # slots of the layout that are populated
        self._filled = 0  # slots that may take memory
        self._closing = False
        self._thread: threading.Thread | None = None
        try:
            self._fd, head = _open_arena(self.path, self.size_bytes)
            self._map = mmap.mmap(self._fd, self.size_bytes)
        except OSError as error:
            raise ArenaError(f"can't open the arena {self.path}: {error.strerror}") from error
        self._data = np.frombuffer(self._map, np.uint8)
        if numa_node is not None:
            place(self._data, numa_node)
        if huge_pages:
            prefer_huge_pages(self._data)
        self.epoch = head.epoch
        if head.geometry is not None:
            self._set_layout(ArenaLayout.plan(self.size_bytes, head.geometry))
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
        ArenaLayout.plan(self.size_bytes, geometry)

    def format(self, geometry: Geometry) -> None:
        """Drop everything and lay the arena out anew: all slots free, another epoch, generations go on
        rising.

        Raises ArenaError, changing nothing, when not even one row fits. The caller made sure that nobody uses
        the old layout any more.
        """
        layout = ArenaLayout.plan(self.size_bytes, geometry)
        first_generation = self.first_generation
        if self.geometry is not None:
            first_generation = self.table.next_generation(first_generation)
        # Without a geometry the head disowns the table: a death from here on leaves an unformatted arena.
        self._write_head(None, first_generation)
        _allocate(self._fd, 0, layout.data_offset)
        self._data[HEAD_BYTES : layout.data_offset] = 0
        self._set_layout(layout)
        self._write_head(geometry, first_generation)

    def rows_within(self, target_bytes: int) -> int:
        """Slots of the whole extents that fit into ``target_bytes`` beside head and slot table; at least one
        extent."""
        layout, extent = self._layout, self._extent_rows
        if target_bytes >= self.size_bytes:
            return layout.num_rows
        num_extents = (target_bytes - layout.data_offset) // layout.row_bytes // extent
        return min(layout.num_rows, max(1, num_extents) * extent)

    def resize(self, target_bytes: int) -> None:
        """Take or give back memory, extent by extent and in the background, until the ``rows_within`` these
        bytes are populated, and no others.

        Raises ArenaError, changing nothing, when a row beyond is in use: the memory tier has to ``vacate``
        them first. Nobody may have pinned pages that are given back: a device would go on with the old ones.
        """
        layout = self._formatted()
        num_rows = self.rows_within(target_bytes)
        num_used = self.table.num_used(num_rows // layout.geometry.slots_per_frame, layout.num_frames)
        if num_used:
            raise ArenaError(f"{num_used} rows beyond {target_bytes} bytes of the arena are in use")
        with self._changed:
            self._target_bytes = target_bytes
            self._grown = min(self._grown, num_rows)
            self.growth_error = None
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
            self._filled = layout.num_rows  # by an earlier format or process, for all that is known
            self.num_rows = layout.num_rows  # last: until then ready_rows is that of the old layout
            self.growth_error = None
            self._changed.notify_all()

    def _write_head(self, geometry: Geometry | None, first_generation: int) -> None:
        # The clock keeps epochs apart even when the file itself was lost in between.
        self.epoch = max(self.epoch + 1, time.time_ns())
        self.geometry, self.first_generation = geometry, first_generation
        packed = Head(self.size_bytes, self.epoch, first_generation, geometry).pack()
        self._data[: len(packed)] = np.frombuffer(packed, np.uint8)

    def _grow(self, on_growth: Callable[[], None]) -> None:
        while (extent := self._next_extent()) is not None:
            layout, rows, is_wanted = extent
            error = None
            try:
                (self._take if is_wanted else self._give_back)(layout, rows)
            except ArenaError as caught:
                error = f"{caught}; the arena {self.path} stays at {rows.start * layout.row_bytes} bytes"
                logger.error("%s", error)
            with self._changed:
                if self._closing:
                    return
                if self._layout is layout:
                    self._note_extent(rows, error, is_wanted=is_wanted)
            on_growth()

    def _note_extent(self, rows: range, error: str | None, *, is_wanted: bool) -> None:
        self.growth_error = error
        if not is_wanted:
            self._filled = rows.start
            return
        self._filled = max(self._filled, rows.stop)
        # Else the arena was made smaller meanwhile, and these rows are to be given back.
        if rows.start == self._grown and rows.stop <= self.rows_within(self._target_bytes):
            self._grown = rows.start if error else rows.stop

    def _next_extent(self) -> tuple[ArenaLayout, range, bool] | None:
        """Wait for rows to populate (True) or to give back; None when the arena is being closed."""
        with self._changed:
            while not self._closing:
                layout, extent = self._layout, self._extent_rows
                target = self.rows_within(self._target_bytes)
                if self._filled > target:
                    return layout, range(max(target, self._filled - extent), self._filled), False
                if self._grown < target and self.growth_error is None:
                    return layout, range(self._grown, min(target, self._grown + extent)), True
                self._changed.wait()
        return None

    @property
    def _extent_rows(self) -> int:
        frame_slots = self._layout.geometry.slots_per_frame
        frame_bytes = frame_slots * self._layout.row_bytes
        extent_bytes = min(_MAX_EXTENT_BYTES, self.size_bytes // _EXTENTS_PER_ARENA)
        return frame_slots * max(1, extent_bytes // frame_bytes)

    def _take(self, layout: ArenaLayout, rows: range) -> None:
        for start, end in layout.pieces(rows):
            for offset in range(start, end, _STEP_BYTES):
                if self._closing:
                    return
                step = min(_STEP_BYTES, end - offset)
                _allocate(self._fd, offset, step)
                populate(self._data[offset : offset + step])
                if self._huge_pages:
                    collapse(self._data[offset : offset + step])

    def _give_back(self, layout: ArenaLayout, rows: range) -> None:
        # The next format may have its slot table where these rows were: it has to wait.
        with self._changed:
            if self._layout is layout:
                for start, end in layout.pieces(rows):
                    punch_hole(self._fd, start, end - start)


def _open_arena(path: Path, capacity: int) -> tuple[int, Head]:
    """Return a locked descriptor of a file of ``capacity`` bytes, and its head (a fresh one for a new
    file)."""
    fd = _open_locked(path)
    try:
        size = os.fstat(fd).st_size
        head = _read_head(fd, size, capacity) if size else None
        # Before anything is lost; what the file takes is there for its successor, too.
        check_capacity(path, capacity, os.fstat(fd).st_blocks * 512)
        if size and (head is None or head.capacity_bytes != capacity or size != capacity):
            logger.warning(
                "the arena %s is of another size or version, or damaged: an empty one replaces it", path
            )
            path.unlink()
            fresh = _open_locked(path)
            os.close(fd)
            fd, head = fresh, None
        os.ftruncate(fd, capacity)
        _allocate(fd, 0, HEAD_BYTES)
        with contextlib.suppress(PermissionError):  # another user's arena of before
            os.fchmod(fd, 0o660)  # whatever the umask: an engine may run as another user of the group
    except BaseException:
        if os.fstat(fd).st_size == 0:  # made by us a moment ago
            path.unlink(missing_ok=True)
        os.close(fd)
        raise
    # Beyond all generations of a file that was here before: an engine may still hold slots of that one.
    return fd, head or Head(capacity, epoch=0, first_generation=time.time_ns(), geometry=None)


def _read_head(fd: int, size: int, capacity: int) -> Head | None:
    try:
        return Head.parse(os.pread(fd, HEAD_BYTES, 0).ljust(HEAD_BYTES, b"\0"))
    except ArenaError:
        if size != capacity:
            raise
        return None  # no stranger's file is just as long: an engine wrote over the head of ours


def _open_locked(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ArenaError(f"the arena {path} is in use by another sidecar: give each its own path") from None
    return fd


def _allocate(fd: int, offset: int, length: int) -> None:
    try:
        os.posix_fallocate(fd, offset, length)
    except OSError as error:
        raise ArenaError(f"can't take {length} bytes of the arena's volume: {error.strerror}") from error
