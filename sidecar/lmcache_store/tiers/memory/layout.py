"""Layout of an arena file, as pure arithmetic, and the head page that records it.

::

    0            4096                                 index_offset   data_offset           (aligned)
    | head page  | table column 0, table column 1, .. | shared index | slots of column 0 | slots of col..

A column's slots follow each other without gaps, so that a rank maps and pins one range.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from lmcache_store.common.units import round_up
from lmcache_store.tiers.errors import ArenaError
from lmcache_store.tiers.memory.allocator import SLOTS_PER_FRAME
from lmcache_store.tiers.memory.contracts import Geometry
from lmcache_store.tiers.memory.shared_index import BUCKET_BYTES, num_buckets
from lmcache_store.tiers.memory.slots import ENTRY_BYTES
from lmcache_store.tiers.pages import PAGE_BYTES

HEAD_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20

# In a smaller arena, alignment to huge pages would waste a noticeable part.
_LARGE_ARENA_BYTES = 1 << 30


@dataclass(frozen=True)
class ArenaLayout:
    """Offsets in one format of the arena."""

    geometry: Geometry
    num_rows: int
    """Number of slots in a column, in whole frames."""
    data_offset: int
    column_bytes: int
    """Distance between the starts of two columns, in bytes."""

    @classmethod
    def plan(cls, capacity_bytes: int, geometry: Geometry) -> ArenaLayout:
        """Lay out as many rows as fit. Raises ArenaError if not even one row fits."""
        columns, slot_bytes, frame_slots = geometry.num_columns, geometry.slot_bytes, geometry.slots_per_frame
        if slot_bytes < PAGE_BYTES or slot_bytes % PAGE_BYTES or columns < 1:
            raise ArenaError(f"{columns} columns of {slot_bytes}-byte slots: slots must be whole pages")
        if not 1 <= frame_slots <= SLOTS_PER_FRAME:
            raise ArenaError(f"invalid geometry: {frame_slots} slots per frame, not 1 to {SLOTS_PER_FRAME}")
        align = HUGE_PAGE_BYTES if capacity_bytes >= _LARGE_ARENA_BYTES else PAGE_BYTES
        fixed = HEAD_BYTES + align * (columns + 1)
        frame_bytes = frame_slots * (columns * (slot_bytes + ENTRY_BYTES) + BUCKET_BYTES)
        num_rows = (capacity_bytes - fixed) // frame_bytes * frame_slots
        if num_rows < 1:
            raise ArenaError(
                f"an arena of {capacity_bytes} bytes is too small: one row needs {fixed + frame_bytes} bytes"
            )
        end = HEAD_BYTES + columns * num_rows * ENTRY_BYTES + num_buckets(num_rows) * BUCKET_BYTES
        return cls(geometry, num_rows, round_up(end, align), round_up(num_rows * slot_bytes, align))

    @classmethod
    def unformatted(cls, capacity_bytes: int) -> ArenaLayout:
        """Return the layout before the first format: one column of pages over the whole file."""
        return cls(Geometry(PAGE_BYTES, 1), capacity_bytes // PAGE_BYTES, 0, capacity_bytes)

    @property
    def row_bytes(self) -> int:
        """Bytes of one slot in all columns."""
        return self.geometry.slot_bytes * self.geometry.num_columns

    def table_offset(self, column: int) -> int:
        """Return the byte offset of a column's part of the slot table."""
        return HEAD_BYTES + column * self.num_rows * ENTRY_BYTES

    @property
    def index_offset(self) -> int:
        """Byte offset of the shared index, which follows the slot table."""
        return self.table_offset(self.geometry.num_columns)

    @property
    def num_buckets(self) -> int:
        """Number of buckets in the shared index."""
        return num_buckets(self.num_rows)

    @property
    def num_frames(self) -> int:
        """Number of frames in a column."""
        return self.num_rows // self.geometry.slots_per_frame

    def pieces(self, slots: range) -> list[tuple[int, int]]:
        """Return the start and end offsets of these slots in each column."""
        return [
            (self.slot_offset(slots.start, column), self.slot_offset(slots.stop, column))
            for column in range(self.geometry.num_columns)
        ]

    def gaps(self, capacity_bytes: int) -> list[tuple[int, int]]:
        """Return the start and end offsets of the unused bytes after each column."""
        columns = range(self.geometry.num_columns)
        ends = [self.slot_offset(self.num_rows, column) for column in columns]
        begins = [*(self.slot_offset(0, column) for column in columns[1:]), capacity_bytes]
        return [(start, end) for start, end in zip(ends, begins, strict=True) if start < end]

    def slot_offset(self, slot: int, column: int) -> int:
        """Return the byte offset of a slot."""
        return self.data_offset + column * self.column_bytes + slot * self.geometry.slot_bytes


@dataclass(frozen=True)
class Head:
    """The head page: it identifies an arena file and records its current format.

    Engines map the page, too, and a faulty engine may overwrite it. It therefore has its own checksum."""

    capacity_bytes: int
    epoch: int
    first_generation: int
    """Lower bound of this format's generations."""

    geometry: Geometry | None
    """Geometry of the format; None if the arena is not formatted."""

    _MAGIC = b"LMCarena"
    _VERSION = 4
    _FIELDS = struct.Struct("<8sIIQQQQI")
    _CHECKSUM = struct.Struct("<I")

    def pack(self) -> bytes:
        """Return the leading bytes of the head page."""
        geometry = self.geometry or Geometry(0, 0, 0)
        fields = self._FIELDS.pack(
            self._MAGIC,
            self._VERSION,
            geometry.num_columns,
            self.capacity_bytes,
            self.epoch,
            self.first_generation,
            geometry.slot_bytes,
            geometry.slots_per_frame,
        )
        return fields + self._CHECKSUM.pack(zlib.crc32(fields))

    @classmethod
    def parse(cls, page: bytes) -> Head | None:
        """Parse a head page. Returns None if it was never written, is damaged or has another version.

        Raises ArenaError if the file is not an arena."""
        fields = cls._FIELDS.unpack_from(page)
        magic, version, columns, capacity, epoch, generation, slot_bytes, slots_per_frame = fields
        if not any(page):
            return None
        if magic != cls._MAGIC:
            raise ArenaError("the file is not an arena: remove it or choose another path")
        (checksum,) = cls._CHECKSUM.unpack_from(page, cls._FIELDS.size)
        if version != cls._VERSION or checksum != zlib.crc32(page[: cls._FIELDS.size]):
            return None
        geometry = Geometry(slot_bytes, columns, slots_per_frame) if slot_bytes else None
        return cls(capacity, epoch, generation, geometry)
