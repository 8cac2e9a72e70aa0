"""A file in shared memory that a background thread fills with memory, and empties again.

**Filling.** This process takes the pages before any process touches them. Its cgroup then pays for them, and
a lack of memory is an error instead of a SIGBUS. The thread works extent by extent: ``posix_fallocate``,
then ``MADV_POPULATE_WRITE``.

**Order.** Before the first format, the thread fills the file from its start, as one column of pages. After
the format it fills ranges of rows over all columns, because a row is usable only when all its columns are.
Pages that have memory already cost almost nothing. With one column, the format can use all of them. With
several columns it can use a part of them, because the capacity determines how far apart the columns are. The
thread then alternates: it fills rows, and punches holes where no rows are wanted.

**Size.** The length of the file is its capacity. If another process changes it, the file is **lost** (see
``is_lost``), and the sidecar replaces it. ``resize`` determines how much memory the file takes. The file
grows by extents, each when there is memory for it. After ``release_surplus``, the thread shrinks it by
punching holes. A client that has a hole mapped reads zeros and never gets a SIGBUS.
"""

from __future__ import annotations

import bisect
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from lmcache_store.common import numa
from lmcache_store.tiers.errors import ArenaError
from lmcache_store.tiers.memory import kernel_pages
from lmcache_store.tiers.memory.capacity import check_available
from lmcache_store.tiers.memory.layout import ArenaLayout
from lmcache_store.tiers.memory.opening import allocate
from lmcache_store.tiers.pages import PAGE_BYTES

logger = logging.getLogger(__name__)

_MAX_EXTENT_BYTES = 1 << 30
_EXTENTS_PER_ARENA = 16
_STEP_BYTES = 64 << 20
"""The thread checks before each step how much memory is free, and whether the arena is being closed."""

_RETRY_SECONDS = 1.0
"""Pause after a failed attempt to grow or shrink."""


class GrowingFile:
    """The memory of an arena's file, in slots of the current layout. ``fd``: a file of ``capacity_bytes``."""

    def __init__(
        self, path: Path, fd: int, capacity_bytes: int, target_bytes: int, *, huge_pages: bool
    ) -> None:
        self.path = path
        self.num_rows = 0  # slots of a column when all extents are ready; 0 until formatted
        self.growth_error: str | None = None  # why the last attempt to grow or shrink failed
        self.capacity_bytes = capacity_bytes
        self.target_bytes = target_bytes
        self.numa_node: int | None = None  # preferred for all new memory; None: that of the column
        self.column_nodes: Sequence[int] = ()  # preferred NUMA node of each column; empty: the kernel chooses
        self._huge_pages = huge_pages
        self._fd = fd
        self._map = mmap.mmap(fd, capacity_bytes)
        self._data = np.frombuffer(self._map, np.uint8)
        self._changed = threading.Condition()
        # protected by _changed
        self._layout = ArenaLayout.unformatted(capacity_bytes)
        self._num_ready = 0  # populated slots of the layout
        self._num_filled = 0  # slots that may take memory
        self._num_retained = 0  # slots that keep their memory until ``release_surplus``
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def is_lost(self) -> bool:
        """Has another process changed the length of the file, so that rows lost bytes?

        An access to missing bytes ends a process with SIGBUS. If bytes are missing, this property makes the
        file longer than it ever was. No process faults any more, and no process trusts the file.
        """
        if (num_bytes := self._map.size()) < self.capacity_bytes:
            os.ftruncate(self._fd, self.capacity_bytes + PAGE_BYTES)
        return num_bytes != self.capacity_bytes

    @property
    def ready_rows(self) -> int:
        """Number of populated slots, the leading ones; whole frames."""
        return self._num_ready if self.num_rows else 0

    def start(self, on_growth: Callable[[], object]) -> None:
        """Start the background thread. It calls ``on_growth`` after each extent, in either direction, and
        after an error."""
        self._thread = threading.Thread(target=self._grow, args=(on_growth,), name="arena", daemon=True)
        self._thread.start()

    def rows_within(self, target_bytes: int) -> int:
        """Return how many slots fit into ``target_bytes`` with head, slot table and index: whole frames, at
        least one."""
        layout = self._layout
        if target_bytes >= self.capacity_bytes:
            return layout.num_rows
        frame_slots = layout.geometry.slots_per_frame
        num_frames = (target_bytes - layout.data_offset) // (layout.row_bytes * frame_slots)
        return min(layout.num_rows, max(1, num_frames) * frame_slots)

    def bytes_of(self, num_rows: int) -> int:
        """Return the bytes of ``num_rows`` slots with head, slot table and index."""
        return min(self.capacity_bytes, self._layout.data_offset + num_rows * self._layout.row_bytes)

    @property
    def target_rows(self) -> int:
        """Number of slots that should be populated."""
        return self.rows_within(self.target_bytes)

    @property
    def size_bytes(self) -> int:
        """Upper bound of the memory taken: the target, once exactly the target's slots are populated."""
        taken = self.bytes_of(self._num_filled)
        return taken if self.num_pending_rows else max(self.target_bytes, taken)

    @property
    def num_pending_rows(self) -> int:
        """Number of slots that the thread has yet to populate, or to punch out."""
        target = self.target_rows
        return target - self._num_ready + max(0, self._num_filled - target)

    @property
    def taken_bytes(self) -> int:
        """Memory that the file takes now, usable or not; below ``size_bytes`` while there are holes."""
        return kernel_pages.taken_bytes(self._fd)

    @property
    def has_surplus(self) -> bool:
        """Are there slots beyond the target that were ready and were not released?"""
        return self._num_retained > self.target_rows

    def resize(self, target_bytes: int) -> None:
        """Populate the ``rows_within`` these bytes in the background, and report no others as ready.

        Slots beyond them keep their memory and its contents until ``release_surplus``.
        """
        with self._changed:
            self._num_retained = max(self._num_retained, self._num_ready)
            self.target_bytes = target_bytes
            self._num_ready = min(self._num_ready, self.target_rows)
            self.growth_error = None
            self._changed.notify_all()

    def release_surplus(self) -> None:
        """Return the memory beyond the target to the kernel, in the background.

        The caller must have evicted all rows there (``vacate``). No client may have pages there pinned: its
        device would continue to use the old pages when the file grows again.
        """
        with self._changed:
            self._num_retained = 0
            self._changed.notify_all()

    def _stop(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _use_layout(self, layout: ArenaLayout) -> None:
        """Continue with a layout of which no slot is in use."""
        with self._changed:
            self._layout = layout
            self._num_ready = 0
            self._num_filled = self._find_filled()  # by an earlier format or process
            self._num_retained = 0
            self.num_rows = layout.num_rows  # last: until then ready_rows is that of the old layout
            self.growth_error = None
            self._changed.notify_all()

    def _grow(self, on_growth: Callable[[], object]) -> None:
        while (extent := self._next_extent()) is not None:
            layout, rows, is_wanted = extent
            error, is_done = None, False
            try:
                is_done = (self._populate if is_wanted else self._punch)(layout, rows)
            except Exception as caught:  # any error: without this thread the arena never changes its size
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
                    self._num_filled = self._find_filled()
            on_growth()

    def _note_extent(self, rows: range, *, is_wanted: bool) -> None:
        if not is_wanted:
            self._num_filled = rows.start
        # Otherwise ``resize`` reduced the target meanwhile, and the thread will punch out these rows.
        elif rows.start == self._num_ready and rows.stop <= self.target_rows:
            self._num_ready = rows.stop

    def _next_extent(self) -> tuple[ArenaLayout, range, bool] | None:
        """Wait for rows to populate (True) or to punch out (False). Returns None when the arena closes."""
        is_due = False
        with self._changed:
            while not self._closing:
                layout, extent, target = self._layout, self._extent_rows, self.target_rows
                retained = max(target, self._num_retained)
                rows = range(self._num_ready, min(target, self._num_ready + extent))
                if self.growth_error is None or is_due:
                    # Usable rows come first, while they fit into the target with the surplus still there.
                    if rows and (
                        self._num_filled <= retained or (not is_due and self._fits_with_surplus(rows))
                    ):
                        self._num_filled = max(self._num_filled, rows.stop)
                        return layout, rows, True
                    if self._num_filled > retained:
                        return (
                            layout,
                            range(max(retained, self._num_filled - extent), self._num_filled),
                            False,
                        )
                is_due = not self._changed.wait(_RETRY_SECONDS if self.growth_error else None)
        return None

    def _fits_with_surplus(self, rows: range) -> bool:
        """May these rows be populated before the surplus is given back?"""
        return self.taken_bytes + len(rows) * self._layout.row_bytes <= self.target_bytes

    def _find_filled(self) -> int:
        """Return a number of slots beyond which no slot takes memory."""
        layout, frame_slots = self._layout, self._layout.geometry.slots_per_frame

        def is_empty_from(frame: int) -> bool:
            pieces = layout.pieces(range(frame * frame_slots, layout.num_rows))
            return all(kernel_pages.first_data(self._fd, start, end) == end for start, end in pieces)

        return bisect.bisect_left(range(layout.num_frames), True, key=is_empty_from) * frame_slots

    @property
    def _extent_rows(self) -> int:
        frame_slots = self._layout.geometry.slots_per_frame
        frame_bytes = frame_slots * self._layout.row_bytes
        extent_bytes = min(_MAX_EXTENT_BYTES, self.capacity_bytes // _EXTENTS_PER_ARENA)
        return frame_slots * max(1, extent_bytes // frame_bytes)

    def _populate(self, layout: ArenaLayout, rows: range) -> bool:
        """Take memory for these rows. Returns False if the arena changed before all of them had memory."""
        for column, (start, end) in enumerate(layout.pieces(rows)):
            for offset in range(start, end, _STEP_BYTES):
                if self._closing or self._layout is not layout or rows.stop > self.target_rows:
                    return False
                if self.is_lost:  # taking memory would give the file another length
                    raise ArenaError("another process changed the length of the file")
                step = min(_STEP_BYTES, end - offset)
                if missing := kernel_pages.missing_bytes(self._fd, offset, offset + step):
                    check_available(missing)
                    with numa.on_node(self._node_of(column)):
                        allocate(self._fd, offset, step)
                        kernel_pages.populate(self._data[offset : offset + step])
                if self._huge_pages:
                    kernel_pages.collapse(self._data[offset : offset + step])
        return True

    def _node_of(self, column: int) -> int | None:
        nodes = self.column_nodes  # the sidecar's loop may replace them meanwhile
        if self.numa_node is not None or column >= len(nodes):
            return self.numa_node
        return nodes[column]

    def _punch(self, layout: ArenaLayout, rows: range) -> bool:
        # The lock keeps ``format`` out: the slot table of the next format may lie where these rows were.
        with self._changed:
            if self._layout is layout:
                # To the end of each column: a huge page may reach beyond the rows to punch out.
                for start, end in layout.pieces(range(rows.start, layout.num_rows)):
                    kernel_pages.punch_hole(self._fd, start, end - start)
        return True
