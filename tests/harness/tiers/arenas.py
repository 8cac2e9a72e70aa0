"""Memory tiers over arenas of files, and what clients map of them."""

from lmcache_store.tiers.memory.arena import ArenaFile
from lmcache_store.tiers.memory.mapping import MappedColumn, MappedIndex
from lmcache_store.tiers.memory.tier import MemoryTier


def tier_over(arena: ArenaFile) -> MemoryTier:
    """Return a memory tier that may use all rows, and adopts those of the last tier."""
    tier = MemoryTier(arena)
    tier.usable_slots = arena.num_rows
    for _ in tier.adopt():
        pass
    tier.release_adopted()
    return tier


def mapped_column(arena: ArenaFile, column: int) -> MappedColumn:
    geometry = arena.geometry
    return MappedColumn(
        arena.path,
        arena.table_offset(column),
        arena.column_offset(column),
        geometry.slot_bytes,
        arena.num_rows,
        geometry.slots_per_frame,
    )


def mapped_index(arena: ArenaFile) -> MappedIndex:
    return MappedIndex(arena.path, arena.table_offset(0), arena.num_rows, *arena.index_place)
