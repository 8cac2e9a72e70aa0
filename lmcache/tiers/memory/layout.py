"""Where things are in an arena file. Pure arithmetic, and the head page that records it.

::

    0            4096                                 index_offset   data_offset           (aligned)
    | head page  | table column 0, table column 1, .. | shared index | slots of column 0 | slots of col..

A column's slots follow each other without gaps, so a rank maps and pins one range.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from lmcache.tiers.errors import ArenaError
from lmcache.tiers.memory.allocator import SLOTS_PER_FRAME
from lmcache.tiers.memory.contracts import Geometry
from lmcache.tiers.memory.shared_index import BUCKET_BYTES, num_buckets
from lmcache.tiers.memory.slots import ENTRY_BYTES
from lmcache.tiers.pages import PAGE_BYTES
from lmcache.units import round_up

HEAD_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20

# Below this, aligning to huge pages would waste a noticeable part of the arena.
_LARGE_ARENA_BYTES = 1 << 30


@dataclass(frozen=True)
class ArenaLayout:
    """Offsets of one format of the arena."""

    geometry: Geometry
    num_rows: int
    """Slots of a column: whole frames."""
    data_offset: int
    column_bytes: int
    """Distance between two columns."""

    @classmethod
    def plan(cls, capacity_bytes: int, geometry: Geometry) -> ArenaLayout:
        """Lay out as many rows as fit; raises ArenaError when not even one does."""
        columns, slot_bytes, frame_slots = geometry.num_columns, geometry.slot_bytes, geometry.slots_per_frame
        if slot_bytes < PAGE_BYTES or slot_bytes % PAGE_BYTES or columns < 1:
            raise ArenaError(f"{columns} columns of {slot_bytes}-byte slots: slots are whole pages")
        if not 1 <= frame_slots <= SLOTS_PER_FRAME:
            raise ArenaError(f"{frame_slots} slots per frame: there are 1 to {SLOTS_PER_FRAME}")
        align = HUGE_PAGE_BYTES if capacity_bytes >= _LARGE_ARENA_BYTES else PAGE_BYTES
        fixed = HEAD_BYTES + align * (columns + 1)
        frame_bytes = frame_slots * (columns * (slot_bytes + ENTRY_BYTES) + BUCKET_BYTES)
        num_rows = (capacity_bytes - fixed) // frame_bytes * frame_slots
        if num_rows < 1:
            raise ArenaError(
                f"an arena of {capacity_bytes} bytes holds no row: one needs {fixed + frame_bytes} bytes"
            )
        end = HEAD_BYTES + columns * num_rows * ENTRY_BYTES + num_buckets(num_rows) * BUCKET_BYTES
        return cls(geometry, num_rows, round_up(end, align), round_up(num_rows * slot_bytes, align))

    @classmethod
    def unformatted(cls, capacity_bytes: int) -> ArenaLayout:
        """One column of pages over the whole file: the way it is filled before the first format."""
        return cls(Geometry(PAGE_BYTES, 1), capacity_bytes // PAGE_BYTES, 0, capacity_bytes)

    @property
    def row_bytes(self) -> int:
        """Bytes of all columns of a row of one slot."""
        return self.geometry.slot_bytes * self.geometry.num_columns

    def table_offset(self, column: int) -> int:
        """Byte offset of the entry of row 0 of a column."""
        return HEAD_BYTES + column * self.num_rows * ENTRY_BYTES

    @property
    def index_offset(self) -> int:
        """Byte offset of the shared index, which follows the tables."""
        return self.table_offset(self.geometry.num_columns)

    @property
    def num_buckets(self) -> int:
        """Buckets of the shared index."""
        return num_buckets(self.num_rows)

    @property
    def num_frames(self) -> int:
        """Frames of a column."""
        return self.num_rows // self.geometry.slots_per_frame

    def pieces(self, slots: range) -> list[tuple[int, int]]:
        """Where these slots begin and end, column by column."""
        return [
            (self.slot_offset(slots.start, column), self.slot_offset(slots.stop, column))
            for column in range(self.geometry.num_columns)
        ]

    def gaps(self, capacity_bytes: int) -> list[tuple[int, int]]:
        """Where what no slot takes after each column begins and ends."""
        columns = range(self.geometry.num_columns)
        ends = [self.slot_offset(self.num_rows, column) for column in columns]
        begins = [*(self.slot_offset(0, column) for column in columns[1:]), capacity_bytes]
        return [(start, end) for start, end in zip(ends, begins, strict=True) if start < end]

    def slot_offset(self, slot: int, column: int) -> int:
        """Byte offset of a slot."""
        return self.data_offset + column * self.column_bytes + slot * self.geometry.slot_bytes


@dataclass(frozen=True)
class Head:
    """The head page: what a file is, and how its last format laid it out. Engines map it, too, and may have
    written over it: it has a checksum of its own."""

    capacity_bytes: int
    epoch: int
    first_generation: int
    """All generations of earlier formats are below."""

    geometry: Geometry | None
    """None: not formatted."""

    _MAGIC = b"LMCarena"
    _VERSION = 4
    _FIELDS = struct.Struct("<8sIIQQQQI")
    _CHECKSUM = struct.Struct("<I")

    def pack(self) -> bytes:
        """Return the head page's leading bytes."""
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
        """Read a head page; None when it was never written, is damaged or of another version. ArenaError: not
        an arena."""
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
