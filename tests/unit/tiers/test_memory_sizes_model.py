"""Model-based test of the memory tier with rows of one to three slots: no two users share a slot.

``test_memory_model`` covers the eviction order; this model covers which bytes belong to which row.
"""

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_store.kv_groups import GroupKind, KVGroup
from lmcache_store.tiers.errors import StaleSlotError
from lmcache_store.tiers.header import checksum
from lmcache_store.tiers.memory.adoption import SIDECAR
from lmcache_store.tiers.memory.contracts import Chains, Geometry, Reserved, Slot
from lmcache_store.tiers.memory.private import PrivateArena
from lmcache_store.tiers.memory.tier import MemoryTier
from tests.harness.scope import examples

SLOT_BYTES, SLOTS_PER_FRAME, NUM_FRAMES, NUM_COLUMNS = 4096, 3, 7, 2
NUM_SLOTS = SLOTS_PER_FRAME * NUM_FRAMES
COLUMNS = range(NUM_COLUMNS)
CHUNK_TOKENS, NUM_CHUNKS = 32, 5
GROUPS = (
    KVGroup(0, 16, 3 * SLOT_BYTES - 7),
    KVGroup(1, 16, SLOT_BYTES, 20, GroupKind.SLIDING_WINDOW),
    KVGroup(2, 32, SLOT_BYTES + 1, 0, GroupKind.STATE),
)
OWNERS = [b"a" * 16, b"b" * 16]
REQUESTS = ["r", "s"]
ENGINE = b"E" * 16
NUM_EXAMPLES = examples(120) // 2

groups = st.sampled_from(GROUPS)
chunks = st.integers(0, NUM_CHUNKS - 1)


def key_of(group: KVGroup, chunk: int) -> bytes:
    return bytes([group.group, chunk]) * 32


def num_slots(group: KVGroup) -> int:
    return -(-group.chunk_bytes // SLOT_BYTES)


@dataclass(eq=False)
class Row:
    """A row as the tier reserved it."""

    slot: Slot
    group: KVGroup
    chunk: int
    writers: dict[int, bytes] = field(default_factory=dict)
    quarantined: dict[int, bytes] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)  # columns into which the sidecar copies for their owner
    committed: set[int] = field(default_factory=set)
    readers: int = 0

    @property
    def key(self) -> bytes:
        return key_of(self.group, self.chunk)

    @property
    def slots(self) -> set[int]:
        """Numbers of the row's slots."""
        frame, offset = self.slot.row % NUM_FRAMES, self.slot.row // NUM_FRAMES
        first = frame * SLOTS_PER_FRAME + offset
        assert offset + num_slots(self.group) <= SLOTS_PER_FRAME, "the row must lie inside a frame"
        return set(range(first, first + num_slots(self.group)))

    @property
    def is_in_use(self) -> bool:
        return bool(self.writers or self.quarantined or self.held or self.readers)

    def content(self, column: int) -> bytes:
        word = self.key + self.slot.generation.to_bytes(32, "big") + bytes([column]) * 32
        return (word * (self.group.chunk_bytes // len(word) + 1))[: self.group.chunk_bytes]


class SizesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.arena = PrivateArena(Geometry(SLOT_BYTES, NUM_COLUMNS, SLOTS_PER_FRAME), NUM_SLOTS)
        self.rows: dict[Slot, Row] = {}  # all reserved rows that may be in the arena
        self.leases: dict[str, list[Row]] = {}
        self.start()

    def start(self) -> None:
        self.tier = MemoryTier(self.arena, clock=lambda: self.now)
        for _ in self.tier.adopt():
            pass

    def view(self, row: Row, column: int) -> memoryview:
        return self.arena.view(row.slot.row, column, row.group.chunk_bytes)

    # ---- store ----

    @rule(group=groups, chunk=chunks, column=st.sampled_from(COLUMNS), owner=st.sampled_from(OWNERS))
    def reserve(self, group, chunk, column, owner):
        result, slot = self.tier.reserve(
            key_of(group, chunk), column, owner, length=group.chunk_bytes, depth=chunk, request="r"
        )
        if result is not Reserved.SLOT:
            return
        row = self.rows.get(slot)
        if row is None:
            row = Row(slot, group, chunk)
            self.add_row(row)
        assert (row.group, row.chunk) == (group, chunk)
        assert column not in {*row.writers, *row.quarantined, *row.held}
        row.writers[column] = owner
        self.view(row, column)[:] = row.content(column)

    def add_row(self, row: Row) -> None:
        """Add a new row, and check the slot reuse rule against rows in the same slots."""
        for other in list(self.rows.values()):
            if other.slots & row.slots:
                assert not other.is_in_use, (other, row)
                assert other.slot.row != row.slot.row or other.slot.generation < row.slot.generation
                del self.rows[other.slot]
        self.rows[row.slot] = row

    @rule(group=groups, owner=st.sampled_from(OWNERS), chunk=chunks)
    def refuse_to_share_a_shorter_row(self, group, owner, chunk):
        row = next(
            (row for row in self.rows.values() if row.key == key_of(group, chunk) and row.writers), None
        )
        if row is not None:
            column = 1 - next(iter(row.writers))
            longer = (num_slots(group) + 1) * SLOT_BYTES
            _, slot = self.tier.reserve(row.key, column, owner, length=longer)
            assert slot != row.slot
            if slot is not None:  # one column of the shorter row was aborted, so the key is free
                self.tier.abort([slot], column, owner)

    @rule(chunk=chunks, number=st.integers(1, 3))
    def store_chunks(self, chunk, number):
        for group in GROUPS:
            for position in range(chunk, min(chunk + number, NUM_CHUNKS)):
                for column in COLUMNS:
                    self.reserve(group, position, column, OWNERS[column])
        for column in COLUMNS:
            self.commit(OWNERS[column], column)

    @rule(owner=st.sampled_from(OWNERS), column=st.sampled_from(COLUMNS))
    def hold(self, owner, column):
        for row in self.rows.values():
            if row.writers.get(column) == owner and column not in row.held:
                self.tier.hold([row.slot], column, owner, [row.group.chunk_bytes])
                row.held.add(column)

    @rule(column=st.sampled_from(COLUMNS))
    def end_hold(self, column):
        held = [row for row in self.rows.values() if column in row.held]
        self.tier.end_hold([row.slot for row in held], column)
        for row in held:
            row.held.discard(column)

    @rule(owner=st.sampled_from(OWNERS), column=st.sampled_from(COLUMNS))
    def commit(self, owner, column):
        batch = []
        for row in [row for row in self.rows.values() if row.writers.get(column) == owner]:
            if column not in row.held:
                batch.append(row)
                continue
            for operation, lengths in ((self.tier.commit, []), (self.tier.hold, [[row.group.chunk_bytes]])):
                with pytest.raises(StaleSlotError, match="is under way"):
                    operation([row.slot], column, owner, *lengths)
        visible = self.tier.commit([row.slot for row in batch], column, owner)
        for row in batch:
            del row.writers[column]
            row.committed.add(column)
            if row.slot in visible and row.chunk % 3:
                for other_column in COLUMNS:
                    self.arena.table.record_checksum(
                        row.slot.row, other_column, checksum(self.view(row, other_column))
                    )
        chunk_numbers = [self.rows[slot].chunk for slot in visible]
        assert chunk_numbers == sorted(chunk_numbers), "rows of a chunk are adjacent in eviction order"

    @rule(owner=st.sampled_from(OWNERS), column=st.sampled_from(COLUMNS))
    def abort(self, owner, column):
        batch = [row for row in self.rows.values() if row.writers.get(column) == owner]
        self.tier.abort([row.slot for row in batch], column, owner)
        for row in batch:
            del row.writers[column]

    @rule(
        group=groups,
        chunk=chunks,
        column=st.sampled_from(COLUMNS),
        owner=st.sampled_from(OWNERS),
        is_dead=st.booleans(),
    )
    def end_a_reservation_during_its_copy(self, group, chunk, column, owner, is_dead):
        self.reserve(group, chunk, column, owner)
        self.refuse_to_share_a_shorter_row(group, owner, chunk)
        self.hold(owner, column)
        self.commit(owner, column)  # refused
        if is_dead:
            self.lose_stream(owner)
            self.end_quarantine(owner)
        else:
            self.abort(owner, column)

    @rule(group=groups, chunk=chunks, is_good=st.booleans())
    def promote(self, group, chunk, is_good):
        slot = self.tier.reserve_row(key_of(group, chunk), group.chunk_bytes)
        if slot is None:
            return
        row = Row(slot, group, chunk)
        self.add_row(row)
        for column in COLUMNS:
            self.view(row, column)[:] = row.content(column)
        assert [len(view) for view in self.tier.views(slot)] == [num_slots(group) * SLOT_BYTES] * 2
        if is_good:
            sums = [checksum(self.view(row, column)) for column in COLUMNS]
            self.tier.commit_row(slot, sums)
            row.committed.update(COLUMNS)
        else:
            self.tier.abort_row(slot)

    # ---- load ----

    def chains(self, num_chunks: int) -> Chains:
        return Chains(
            CHUNK_TOKENS,
            GROUPS,
            tuple([key_of(group, chunk) for chunk in range(num_chunks)] for group in GROUPS),
        )

    @rule(request=st.sampled_from(REQUESTS), number=st.integers(1, NUM_CHUNKS))
    def lookup(self, request, number):
        chains = self.chains(number)
        answer = self.tier.lookup((ENGINE, request), chains)
        assert answer.num_leased <= answer.num_resident == chains.longest_hit(answer.present)
        needed = [chains.key(place) for place in chains.places(number)]
        assert list(answer.keys) == [key for key in needed if key in answer.keys], "keys are in chunk order"
        for slot, key in zip(answer.slots, answer.keys, strict=True):
            row = self.rows[slot]
            assert (row.key, row.committed) == (key, set(COLUMNS))
            if row not in self.leases.setdefault(request, []):
                self.leases[request].append(row)
                row.readers += 1
        num_leased = sum(num_slots(row.group) for row in self.rows.values() if row.readers)
        assert num_leased == self.tier._rows.num_leased_slots <= NUM_SLOTS // 2

    @rule(request=st.sampled_from(REQUESTS))
    def release(self, request):
        self.tier.release((ENGINE, request))
        for row in self.leases.pop(request, []):
            row.readers -= 1

    # ---- faults ----

    @rule(owner=st.sampled_from(OWNERS))
    def lose_stream(self, owner):
        self.tier.quarantine(owner)
        for row in self.rows.values():
            for column in [column for column, writer in row.writers.items() if writer == owner]:
                row.quarantined[column] = row.writers.pop(column)

    @rule(owner=st.sampled_from(OWNERS))
    def end_quarantine(self, owner):
        self.tier.end_quarantine(owner)
        for row in self.rows.values():
            row.quarantined = {c: writer for c, writer in row.quarantined.items() if writer != owner}

    @rule()
    def restart(self):
        """Restart the tier: leases end, because their engines have exited, and writers are quarantined."""
        for request in REQUESTS:
            self.release(request)
        for owner in OWNERS:
            self.lose_stream(owner)
        for column in COLUMNS:
            self.end_hold(column)
        self.start()
        assert self.tier.quarantined_owners >= {
            owner for row in self.rows.values() for owner in row.quarantined.values()
        }
        assert SIDECAR not in self.tier.quarantined_owners
        self.tier.release_adopted()

    @rule(first=chunks)
    def verify(self, first):
        for row in list(self.rows.values()):
            slot = self.tier.unverified_slot(row.key)
            if row.chunk >= first and slot is not None and self.tier.pin(slot):
                payloads = [bytes(payload) for payload in self.tier.payloads(slot)]
                assert payloads == [self.rows[slot].content(column) for column in COLUMNS]
                self.tier.note_verified(slot, is_intact=True)
                self.tier.unpin(slot)

    @rule(number=st.integers(0, NUM_FRAMES))
    def shrink(self, number):
        first = number * SLOTS_PER_FRAME
        self.tier.vacate(first)
        for row in self.rows.values():
            if min(row.slots) >= first and not row.is_in_use:
                assert not self.tier._rows.is_visible(row.slot)
        self.tier.usable_slots = NUM_SLOTS

    @rule(seconds=st.sampled_from([1.0, 100.0]))
    def pass_time(self, seconds):
        self.now += seconds

    # ---- invariants ----

    @invariant()
    def bytes_in_use_are_unchanged(self):
        for row in self.rows.values():
            if row.is_in_use or self.tier._rows.is_visible(row.slot):
                for column in row.committed | row.writers.keys():
                    assert bytes(self.view(row, column)) == row.content(column)

    @invariant()
    def used_bytes_match_the_allocator(self):
        allocator = self.tier._rows.allocator
        assert self.tier.used_bytes == allocator.num_used_slots * SLOT_BYTES * NUM_COLUMNS
        assert len(self.tier._held) == sum(len(row.held) for row in self.rows.values())
        in_use = [row for row in self.rows.values() if row.is_in_use]
        assert sum(num_slots(row.group) for row in in_use) <= allocator.num_used_slots
        assert all(allocator.size(row.slot.row) == num_slots(row.group) for row in in_use)

    @precondition(lambda self: not any(row.is_in_use for row in self.rows.values()))
    @rule()
    def all_frames_can_be_allocated(self):
        """Check that no slot leaked: a new chain of the largest rows can use all frames."""
        self.now += 1000
        slots = [
            self.tier.reserve_row(bytes([9, number]) * 32, GROUPS[0].chunk_bytes)
            for number in range(NUM_FRAMES)
        ]
        assert None not in slots
        self.rows.clear()
        for slot in slots:
            self.tier.abort_row(slot)


TestSizes = SizesMachine.TestCase
TestSizes.settings = settings(max_examples=NUM_EXAMPLES, stateful_step_count=30)
