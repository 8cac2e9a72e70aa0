"""The arena: memory for rows, in one shared-memory file that outlives the sidecar.

``growth`` fills the file with memory and returns memory. This module lays it out: head, slot table, index
and slots.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lmcache_store.common.numa import may_be_elsewhere
from lmcache_store.tiers.errors import ArenaError
from lmcache_store.tiers.memory.allocator import first_slot
from lmcache_store.tiers.memory.contracts import Geometry
from lmcache_store.tiers.memory.growth import GrowingFile
from lmcache_store.tiers.memory.kernel_pages import check_node, prefer_huge_pages, punch_hole
from lmcache_store.tiers.memory.layout import HEAD_BYTES, ArenaLayout, Head
from lmcache_store.tiers.memory.opening import allocate, open_arena
from lmcache_store.tiers.memory.shared_index import BUCKET_BYTES, SharedIndex
from lmcache_store.tiers.memory.slots import ENTRY, SlotTable, next_generation
from lmcache_store.tiers.pages import PAGE_BYTES


class ArenaFile(GrowingFile):
    """The file at ``path``: created, or adopted if its capacity and version match.

    ``target_bytes``: see ``resize``; the default is the capacity. ``huge_pages``: faster copies for a slower
    start. ``numa_node``: the preferred node for the memory.

    A file of another capacity is unlinked, never truncated, because clients may still have it mapped.
    Raises ArenaError, and leaves the file as it is, in three cases: there is not enough memory (the message
    says how much is needed, and where), another process uses the file as its arena, or the file is not an
    arena.
    """

    table: SlotTable
    """State of every slot. The first format sets it."""

    shared_index: SharedIndex | None
    """Index for the clients. The first format sets it."""

    geometry: Geometry | None
    """Size and number of the slots; None until the arena is formatted."""

    first_generation: int
    """Lower bound of this format's generations. All earlier formats' generations are below it."""

    epoch: int
    """Number of this version of the arena. Every open and every ``format`` increases it."""

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
        path, capacity = Path(path), capacity_bytes - capacity_bytes % PAGE_BYTES
        target = capacity if target_bytes is None else target_bytes
        try:
            fd, head = open_arena(path, capacity, target)
            super().__init__(path, fd, capacity, target, huge_pages=huge_pages)
        except OSError as error:
            raise ArenaError(f"can't open the arena {path}: {error.strerror}") from error
        self.numa_node = numa_node
        if huge_pages:
            prefer_huge_pages(self._data)
        self.epoch = head.epoch
        if head.geometry is not None:
            self._set_layout(ArenaLayout.plan(self.capacity_bytes, head.geometry))
            self._num_retained = self._num_filled  # earlier clients may have rows there, and pages pinned
        self._write_head(head.geometry, head.first_generation)

    def fileno(self) -> int:
        """Return the file's descriptor. A process that inherits it also holds the lock that keeps other
        sidecars out."""
        return self._fd

    @property
    def problem(self) -> str:
        """Reason why the file must be replaced; empty if no other process changed, moved or removed it."""
        if self.is_lost:
            return f"another process changed the length of the arena {self.path}"
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.path), os.fstat(self._fd)):
                return ""
        return f"another process removed or replaced the arena {self.path}"

    def check(self, geometry: Geometry) -> None:
        """Raise ArenaError if the arena is too small for one row of this geometry."""
        ArenaLayout.plan(self.capacity_bytes, geometry)

    def format(self, geometry: Geometry, column_nodes: Sequence[int] = ()) -> None:
        """Drop all rows and lay the arena out anew. All slots are free, the epoch changes, and generations
        continue to rise.

        ``column_nodes``: NUMA node of each column's GPU. A column that may lie elsewhere gives its memory
        back, and the background thread takes it again on this node.

        Raises ArenaError, changing nothing, when not even one row fits. The caller must make sure that no
        client uses the old layout.
        """
        layout = ArenaLayout.plan(self.capacity_bytes, geometry)
        first_generation = self.first_generation
        if self.geometry is not None:
            first_generation = next_generation(self.table.snapshot(0, self.num_rows), first_generation)
        # A head without a geometry disowns the table: a crash from here on leaves an unformatted arena.
        self._write_head(None, first_generation)
        allocate(self._fd, 0, layout.data_offset)
        self._data[HEAD_BYTES : layout.data_offset] = 0
        self.column_nodes = column_nodes
        unused = layout.gaps(self.capacity_bytes)
        columns = layout.pieces(range(layout.num_rows))
        if self.numa_node is None:
            unused += [columns[number] for number, node in enumerate(column_nodes) if may_be_elsewhere(node)]
        for start, end in unused:
            punch_hole(self._fd, start, end - start)
        self._set_layout(layout)
        self._write_head(geometry, first_generation)

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
        """Return the first ``length`` bytes of a row's column, writable; by default its first slot."""
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
        """Stop the thread and unmap the file. The file stays for the next process."""
        self._stop()
        if self.is_lost:  # views and readers of GPUs share the lock, and may outlive this object
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)
        del self._data
        if self.geometry is not None:
            del self.table, self.shared_index
        # Views that other objects still hold keep the mapping alive.
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
        self._use_layout(layout)

    def _write_head(self, geometry: Geometry | None, first_generation: int) -> None:
        # The clock keeps epochs distinct even if the file was lost in between.
        self.epoch = max(self.epoch + 1, time.time_ns())
        self.geometry, self.first_generation = geometry, first_generation
        packed = Head(self.capacity_bytes, self.epoch, first_generation, geometry).pack()
        self._data[: len(packed)] = np.frombuffer(packed, np.uint8)
