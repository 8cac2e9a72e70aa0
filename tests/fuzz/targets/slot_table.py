"""Any damage to the arena's file costs rows at most: the next sidecar starts, and can use every slot again.

Input: patches of the file, each a position (three bytes) and a string (two bytes of length in front).
"""

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lmcache_store.tiers.errors import ArenaError
from lmcache_store.tiers.header import digests, slot_checksum
from lmcache_store.tiers.memory.arena import ArenaFile
from lmcache_store.tiers.memory.contracts import Geometry, Reserved
from lmcache_store.tiers.memory.tier import MemoryTier
from tests.fuzz.bytes_input import BytesInput
from tests.fuzz.target import Target

CAPACITY, SLOT_BYTES, NUM_COLUMNS, SLOTS_PER_FRAME = 96 << 10, 4096, 2, 2
OWNER, WRITER = b"o" * 16, b"w" * 16


class Image(NamedTuple):
    """Path of the arena, its bytes before the damage, and the end of its tables."""

    path: Path
    content: bytes
    end: int


def row_key(number: int) -> bytes:
    return hashlib.sha512(b"%d" % number).digest()


def store(tier: MemoryTier, number: int, length: int = SLOT_BYTES) -> list[Reserved]:
    """Store a row with its checksums."""
    results, key = [], row_key(number)
    for column in range(NUM_COLUMNS):
        reservation = tier.reserve(key, column, OWNER, length=length)
        results.append(reservation.result)
        if (slot := reservation.slot) is not None:
            tier.commit([slot], column, OWNER)
            payload = tier.arena.view(slot.row, column, length)
            checksum = slot_checksum(key, column, length, digests(payload))
            tier.arena.table.record_checksum(slot.row, column, checksum)
    return results


def adopted(arena: ArenaFile) -> MemoryTier:
    tier = MemoryTier(arena)
    list(tier.adopt())
    tier.usable_slots = arena.num_rows
    return tier


@contextlib.contextmanager
def opened() -> Iterator[Image]:
    with tempfile.TemporaryDirectory(prefix="lmc-fuzz-") as folder:
        path = Path(folder) / "arena"
        arena = ArenaFile(path, CAPACITY)
        arena.format(Geometry(SLOT_BYTES, NUM_COLUMNS, SLOTS_PER_FRAME))
        tier = adopted(arena)
        tier.release_adopted()
        for number in range(4):
            store(tier, number, SLOT_BYTES * (1 + number % 2))
        tier.reserve(row_key(9), 0, WRITER, length=SLOT_BYTES)
        end = arena.column_offset(0)
        arena.close()
        yield Image(path, path.read_bytes(), end)


def run(data: bytes, opened: Image) -> None:
    path, image, end = opened
    source, damaged = BytesInput(data), bytearray(image)
    while source.has_more:
        position, patch = source.number(3) % end, source.sized()
        damaged[position : position + len(patch)] = patch
    path.write_bytes(damaged[: len(image)])
    try:
        arena = ArenaFile(path, CAPACITY)
    except ArenaError:
        path.unlink()
        return
    try:
        if arena.geometry is None:
            arena.format(Geometry(SLOT_BYTES, NUM_COLUMNS, SLOTS_PER_FRAME))
        check(arena)
    finally:
        arena.close()


def check(arena: ArenaFile) -> None:
    """Adopt the rows, drop their owners, and store new rows in all slots."""
    if arena.geometry != Geometry(SLOT_BYTES, NUM_COLUMNS, SLOTS_PER_FRAME):
        return  # the damaged head has another format: the first client would format it
    tier = adopted(arena)
    for owner in list(tier.quarantined_owners):
        tier.end_quarantine(owner)
    tier.release_adopted()
    for number in range(100, 100 + arena.num_rows):
        assert store(tier, number) == [Reserved.SLOT] * NUM_COLUMNS
    assert tier.num_used == arena.num_rows


TARGET = Target(run, opened=opened)
