"""Index in shared memory: lookups between any two stores of the writer, and after faulty writes."""

import hashlib
import tempfile
from pathlib import Path
from typing import Any, cast

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmcache_client.core.hits import find_chains
from lmcache_store.common.units import round_up
from lmcache_store.tiers.errors import ArenaError
from lmcache_store.tiers.memory.arena import ArenaFile
from lmcache_store.tiers.memory.contracts import Geometry, Reserved
from lmcache_store.tiers.memory.mapping import MappedIndex
from lmcache_store.tiers.memory.shared_index import (
    BUCKET_BYTES,
    BUCKET_ENTRIES,
    U64,
    SharedIndex,
    num_buckets,
)
from lmcache_store.tiers.memory.tier import MemoryTier
from tests.harness.scope import examples
from tests.harness.tiers.arenas import mapped_column, mapped_index, tier_over
from tests.harness.tiers.chains import one_chain

SLOT_BYTES = 4096
NUM_COLUMNS = 2
SLOTS_PER_FRAME = 3
OWNER = b"o" * 16
CAPACITY = 128 << 10
NUM_EXAMPLES = examples(80)


def row_key(number: int, namespace: bytes = b"n") -> bytes:
    return namespace * 32 + hashlib.sha256(b"%d" % number).digest()


def words(*keys: bytes) -> np.ndarray:
    return np.frombuffer(b"".join(keys), U64).reshape(-1, 8)


def size_of(key: bytes) -> int:
    """Return the bytes of a row: one to three slots."""
    return SLOT_BYTES * (1 + key[-1] % SLOTS_PER_FRAME)


def content(key: bytes, column: int) -> bytes:
    return (key + bytes([column]) * 64) * (size_of(key) // 128)


# A chain in one namespace, and a key of the chain in another namespace.
KEYS = [*map(row_key, range(14)), row_key(3, b"m")]
chains = st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True)


class ObservedWords:
    """Words of shared memory that call ``on_store`` after each store."""

    def __init__(self, memory, on_store) -> None:
        self._memory, self._on_store = memory, on_store

    def __getitem__(self, place):
        return self._memory[place]

    def __setitem__(self, place, value) -> None:
        self._memory[place] = value
        self._on_store()


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self.path = Path(self._folder.name) / "arena"
        self.is_corrupted = False
        self.arena = ArenaFile(self.path, CAPACITY)
        self.arena.format(Geometry(SLOT_BYTES, NUM_COLUMNS, SLOTS_PER_FRAME))
        self.open()

    def open(self) -> None:
        self.reader = mapped_index(self.arena)
        self.columns = [mapped_column(self.arena, column) for column in range(NUM_COLUMNS)]
        self.start()

    def start(self) -> None:
        self.tier = tier_over(self.arena)
        self.tier.end_quarantine(OWNER)
        for shared in (self.arena.table, self.arena.shared_index):
            if not isinstance(shared._words, ObservedWords):
                shared._words = ObservedWords(shared._words, self.found_rows_are_right)

    def teardown(self) -> None:
        # These views keep the memory mapped.
        self.arena.table._words = self.arena.shared_index._words = cast(Any, None)
        del self.tier
        self.arena.close()
        self._folder.cleanup()

    def reserve(self, key: bytes) -> list:
        slots = []
        for column in range(NUM_COLUMNS):
            result, slot = self.tier.reserve(key, column, OWNER, length=size_of(key))
            if result is Reserved.SLOT:
                self.arena.view(slot.row, column, size_of(key))[:] = content(key, column)
                slots.append((slot, column))
        return slots

    @rule(chain=chains)
    def store(self, chain):
        for key in chain:
            for slot, column in self.reserve(key):
                self.tier.commit([slot], column, OWNER)

    @rule(chain=chains)
    def store_only_the_first_column(self, chain):
        for key in chain:
            for slot, column in self.reserve(key):
                (self.tier.abort if column else self.tier.commit)([slot], column, OWNER)

    @rule(first=st.integers(0, 9), is_leased=st.booleans())
    def vacate(self, first, is_leased):
        if is_leased:
            self.tier.lookup((b"e" * 16, "r"), one_chain(KEYS[:4]))
        self.tier.vacate(first)
        num_usable = round_up(first, SLOTS_PER_FRAME)
        assert self.reader.find_each(words(*KEYS)).is_there.sum() <= num_usable or self.is_corrupted
        self.tier.release((b"e" * 16, "r"))
        self.tier.vacate(first)
        self.tier.usable_slots = self.arena.num_rows

    @rule(place=st.integers(0, 10**6), value=st.binary(min_size=8, max_size=8))
    def corrupt(self, place, value):
        offset, buckets = self.arena.index_place
        start_offset = offset + place % (buckets * BUCKET_BYTES) // 8 * 8
        self.arena._data[start_offset : start_offset + 8] = np.frombuffer(value, np.uint8)
        self.is_corrupted = True

    @rule(key=st.sampled_from(KEYS), row=st.integers(0, 20))
    def insert_wrong_entry(self, key, row):
        self.arena.shared_index.insert(key, row)
        self.is_corrupted = True

    @rule()
    def restart(self):
        for number in range(self.arena.num_rows):
            for column in range(NUM_COLUMNS):
                self.arena.table.record_checksum(number, column, b"s" * 16)
        self.is_corrupted = False
        self.start()
        assert not any(len(self.reader.find(words(key)).rows) for key in KEYS), "no row is verified yet"

    @rule(key=st.sampled_from(KEYS), is_intact=st.booleans())
    def verify(self, key, is_intact):
        slot = self.tier.unverified_slot(key)
        if slot is not None and self.tier.pin(slot):
            self.tier.note_verified(slot, is_intact=is_intact)
            self.tier.unpin(slot)

    def found_rows_are_right(self) -> None:
        for key in KEYS:
            for slot in {*self.reader.find(words(key)).slots(), *self.reader.find_few([key])}:
                for number, column in enumerate(self.columns):
                    if column.holds(slot):  # a reader skips the slot otherwise
                        assert column.view(slot.row, size_of(key)).tobytes() == content(key, number)

    @invariant()
    def finds_exactly_the_resident_rows(self):
        self.found_rows_are_right()
        if self.is_corrupted:
            return
        is_listed = [len(self.reader.find(words(key)).rows) == 1 for key in KEYS]
        assert is_listed == [self.tier.is_resident(key) for key in KEYS]
        checked = self.reader.find_each(words(*KEYS))
        assert checked.is_there.tolist() == is_listed
        for key, is_present, row, generation in zip(KEYS, *map(np.ndarray.tolist, checked), strict=True):
            if is_present:
                assert self.reader.find(words(key)).slots() == [(row, generation)]
        leading = (*is_listed, False).index(False)
        result = self.reader.find(words(*KEYS))
        assert [self.arena.table.key(slot.row) for slot in result.slots()] == KEYS[:leading]
        assert self.reader.find_few(KEYS) == result.slots()
        assert [len(self.reader.find_few([key])) == 1 for key in KEYS] == is_listed


TestIndexModel = IndexMachine.TestCase
TestIndexModel.settings = settings(max_examples=NUM_EXAMPLES // 2, stateful_step_count=25)


@pytest.fixture
def tier(tmp_path):
    arena = ArenaFile(tmp_path / "arena", 8 << 20)
    arena.format(Geometry(SLOT_BYTES, 1))
    yield tier_over(arena)
    arena.close()


def fill(tier: MemoryTier, number: int) -> list[bytes]:
    keys = list(map(row_key, range(number)))
    for key in keys:
        tier.commit([tier.reserve(key, 0, OWNER, length=1).slot], 0, OWNER)
    return keys


def test_finds_all_rows_of_a_full_arena(tier):
    keys = fill(tier, tier.arena.num_rows)
    reader = mapped_index(tier.arena)
    slots = [tier._rows.slot(tier._rows.row_by_key[k]) for k in keys]
    assert reader.find(words(*keys)).slots() == reader.find_few(keys) == slots


@pytest.mark.parametrize("missing", [(), (0,), (2,), (3,), (5, 6), range(8)])
def test_one_search_finds_the_leading_rows_of_each_chain(tier, missing):
    keys = [key for number, key in enumerate(fill(tier, 8)) if number not in missing]
    reader, absent = mapped_index(tier.arena), [row_key(100 + number) for number in range(8)]
    all_keys = [absent[number] if number in missing else row_key(number) for number in range(8)]
    chains = [words(*all_keys[part]) for part in (slice(0), slice(3), slice(3, 4), slice(4, 4), slice(4, 8))]
    expected = [reader.find(chain).slots() for chain in chains]
    assert [rows.slots() for rows in find_chains(reader, chains)] == expected
    assert sum(map(len, expected)) <= len(keys)
    assert find_chains(reader, []) == []


def test_insert_into_full_buckets_replaces_a_single_entry(tier):
    buckets = np.zeros(BUCKET_BYTES * 2, np.uint8)
    index = SharedIndex(buckets)
    for _ in range(2):
        index.insert(row_key(0), 0)
    assert (buckets.view(U64) != 0).sum() == 1, "a repeated insert has no effect"
    for row in range(2 * BUCKET_ENTRIES):
        index.insert(row_key(row), row)
    before = buckets.copy()
    new = 2 * BUCKET_ENTRIES + 3
    index.insert(row_key(new), new)
    assert (buckets.view(U64) != before.view(U64)).sum() == 1
    index.remove(row_key(new), new)
    assert (buckets.view(U64) == 0).sum() == 1


@pytest.mark.parametrize("torn", ["generation", "state"])
@pytest.mark.parametrize(("view", "last_read", "num_reads"), [("_table", 3, 3), ("_words", 5, 7)])
def test_entry_changed_during_the_read_is_a_miss(tier, torn, view, last_read, num_reads):
    """The row is reused between the two reads of its entry, so the key may be that of another row."""
    (key,) = fill(tier, 1)
    reader = mapped_index(tier.arena)
    state, generation = 14, 13

    class Changing:
        """A table whose entry changes before the second read of it."""

        num_reads = 0

        def __len__(self):
            return len(memory)

        def __getitem__(self, place):
            self.num_reads += 1
            if self.num_reads == last_read:
                row = tier._rows.row_by_key[key]
                tier.arena.table._quads[row * 16 + (generation if torn == "generation" else state)] += 1
            return memory[place]

    changing, memory = Changing(), getattr(reader, view)
    setattr(reader, view, changing)
    slots = reader.find(words(key)).slots() if view == "_table" else reader.find_few([key])
    assert slots == []
    assert changing.num_reads == num_reads
    setattr(reader, view, memory)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 63, 64, 65, 1000, 1 << 20])
def test_number_of_buckets_is_a_power_of_two_up_to_the_number_of_rows(num_rows):
    buckets = num_buckets(num_rows)
    assert buckets & (buckets - 1) == 0
    assert buckets <= num_rows
    assert num_rows <= 2 * buckets


def test_refuses_too_short_file(tier):
    arena = tier.arena
    offset, buckets = arena.index_place
    with pytest.raises(ArenaError, match="not the same file"):
        MappedIndex(arena.path, arena.table_offset(0), arena.num_rows, offset, buckets << 20)


def test_readers_cannot_write(tier):
    reader = mapped_index(tier.arena)
    with pytest.raises(ValueError, match="read-only"):
        reader._buckets[0] = 0
