"""Model-based test of the memory tier: resident rows, users of bytes and eviction order match an oracle."""

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, precondition, rule

from lmcache_store.tiers.errors import StaleSlotError
from lmcache_store.tiers.header import checksum
from lmcache_store.tiers.memory.contracts import Reserved
from lmcache_store.tiers.memory.rows import INCOMPLETE_SECONDS
from tests.harness.scope import examples
from tests.harness.tiers.chains import one_chain
from tests.harness.tiers.memory_machine import (
    CHAIN,
    ENGINES,
    NUM_COLUMNS,
    NUM_ROWS,
    OWNERS,
    REQUESTS,
    SLOT_BYTES,
    MemoryOracleMachine,
)
from tests.harness.tiers.memory_oracle import KnownRow, tenant_of

# The default keeps local runs short; the environment variable asks for more examples.
NUM_EXAMPLES = examples(120)

keys = st.sampled_from(CHAIN)
owners = st.sampled_from(OWNERS)
columns = st.integers(0, NUM_COLUMNS - 1)
requests = st.sampled_from([*REQUESTS, None])
lease_ids = st.tuples(st.sampled_from(ENGINES), st.sampled_from(REQUESTS))


class MemoryMachine(MemoryOracleMachine):
    # ---- store ----

    @rule(key=keys, column=columns, owner=owners, request=requests)
    def reserve(self, key, column, owner, request):
        row = self.find(key)
        if row is None:
            self.check_new_row(key, column, owner, request)
            return
        result = self.tier.reserve(key, column, owner, length=SLOT_BYTES, request=request)
        if column in row.committed:
            assert result.result is Reserved.EXISTS
        elif column in row.writing:
            assert result.result is Reserved.BUSY
        else:
            assert result == (Reserved.SLOT, row.slot)
            self.begin_write(row, column, owner)

    # Engines mostly call these two rules. Without them, full arenas and evictions would be rare.
    @rule(lease_id=lease_ids, first=st.integers(0, 8), count=st.integers(1, 6), keeps_lease=st.booleans())
    def serve(self, lease_id, first, count, keeps_lease):
        self.lookup(lease_id, first, count)
        self.store_whole_rows(first, count, lease_id[1])
        if not keeps_lease:
            self.release(lease_id)

    @initialize(count=st.integers(0, 6))
    def store_initial_rows(self, count):
        self.store_whole_rows(0, count, None)

    @rule(first=st.integers(0, 8), count=st.integers(1, 6), request=requests)
    def store_whole_rows(self, first, count, request):
        for key in CHAIN[first : first + count]:
            for column in range(NUM_COLUMNS):
                self.reserve(key, column, OWNERS[column], request)
        for column in range(NUM_COLUMNS):
            self.commit_all(column, OWNERS[column])
        for key in CHAIN[first : first + count : 1 + first % 3 % 2]:
            self.seal(key)

    def check_new_row(self, key: bytes, column: int, owner: bytes, request: str | None) -> None:
        tenant = tenant_of(key)
        leaving = self.quota_victims(tenant, request)
        for number in leaving or ():
            self.drop_row(number)
        allowed = [] if leaving is None else self.allowed_rows(request, tenant)
        length = SLOT_BYTES
        result, slot = self.tier.reserve(key, column, owner, length=length, request=request, tenant=tenant)
        if not allowed:
            assert result is Reserved.BUSY
            return
        assert result is Reserved.SLOT
        assert slot is not None
        # The slot reuse rule: the oracle allows only rows without users.
        assert slot.row in allowed
        assert slot.generation > self.generations[slot.row]
        self.generations[slot.row] = slot.generation
        self.drop_row(slot.row)
        self.rows[slot.row] = KnownRow(slot, key, NUM_COLUMNS, SLOT_BYTES, request or object(), tenant)
        self.begin_write(self.rows[slot.row], column, owner)

    def begin_write(self, row: KnownRow, column: int, owner: bytes) -> None:
        row.writing[column] = owner
        self.arena.view(row.slot.row, column)[:] = row.content(column)

    def writers(self) -> list[tuple[KnownRow, int, bytes]]:
        return [(row, c, owner) for row in self.rows.values() for c, owner in row.writing.items()]

    @precondition(lambda self: self.writers())
    @rule(data=st.data())
    def commit(self, data):
        row, column, owner = data.draw(st.sampled_from(self.writers()))
        other = OWNERS[OWNERS.index(owner) - 1]
        for slot, name in ((row.slot, other), (row.slot._replace(generation=row.slot.generation - 1), owner)):
            with pytest.raises(StaleSlotError):
                self.tier.commit([slot], column, name)
        self.commit_all(column, owner)

    def commit_all(self, column: int, owner: bytes) -> None:
        batch = [row for row in self.rows.values() if row.writing.get(column) == owner]
        visible = self.tier.commit([row.slot for row in batch], column, owner)
        for row in batch:
            del row.writing[column]
            row.committed.add(column)
            self.stale.append((row.slot, column, owner))
        assert visible == [row.slot for row in batch if row.visible]
        self.settle(batch)

    @precondition(lambda self: self.writers())
    @rule(data=st.data())
    def abort(self, data):
        row, column, owner = data.draw(st.sampled_from(self.writers()))
        self.tier.abort([row.slot], column, owner)
        self.stale.append((row.slot, column, owner))
        del row.writing[column]
        row.spoilt = True
        self.settle([row])

    @rule(owner=owners)
    def lose_stream(self, owner):
        self.tier.quarantine(owner)
        for row, column, writer in self.writers():
            if writer == owner:
                row.quarantined[column] = row.writing.pop(column)
                row.spoilt = True
                self.stale.append((row.slot, column, owner))

    @rule(owner=owners)
    def end_quarantine(self, owner):
        self.tier.end_quarantine(owner)
        for row in list(self.rows.values()):
            ended = [column for column, writer in row.quarantined.items() if writer == owner]
            for column in ended:
                del row.quarantined[column]
            if ended:
                self.settle([row])

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def refuse_stale_slots(self, data):
        slot, column, owner = data.draw(st.sampled_from(self.stale))
        row = self.rows.get(slot.row)
        if row is not None and row.slot == slot and row.writing.get(column) == owner:
            return
        with pytest.raises(StaleSlotError):
            self.tier.commit([slot], column, owner)
        with pytest.raises(StaleSlotError):
            self.tier.abort([slot], column, owner)

    # ---- load ----

    @rule(lease_id=lease_ids, first=st.integers(0, 8), count=st.integers(1, 6))
    def lookup(self, lease_id, first, count):
        chain = CHAIN[first : first + count]
        num_resident, _, _, slots, _ = self.tier.lookup(lease_id, one_chain(chain))
        lease = self.leases.get(lease_id, [])
        resident, leased = [], []
        for key in chain:
            row = self.find(key)
            if row is None or not row.visible or row.unverified:
                break
            num_leased = sum(row.readers > 0 for row in self.rows.values())
            if len(leased) == len(resident) and (row in lease or row.readers or num_leased < NUM_ROWS // 2):
                leased.append(row)
                if row not in lease:
                    lease.append(row)
                    row.readers += 1
                    self.order.remove(row.slot.row)
            resident.append(row)
        self.order.add_head([row.slot.row for row in resident if not row.readers], lease_id[1])
        if lease:
            self.leases[lease_id] = lease
        assert num_resident == len(resident)
        assert slots == [row.slot for row in leased]

    @rule(lease_id=lease_ids)
    def release(self, lease_id):
        self.tier.release(lease_id)
        self.end_lease(lease_id[1], self.leases.pop(lease_id, []))

    def end_lease(self, request: str, lease: list[KnownRow]) -> None:
        for row in lease:
            row.readers -= 1
        self.order.add_head([row.slot.row for row in lease if not row.readers], request)

    @rule(engine=st.sampled_from(ENGINES))
    def lose_engine(self, engine):
        self.tier.end_leases(engine)
        for lease_id in [lease_id for lease_id in self.leases if lease_id[0] == engine]:
            self.end_lease(lease_id[1], self.leases.pop(lease_id))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def pin(self, data):
        row = data.draw(st.sampled_from(list(self.rows.values())))
        assert self.tier.pin(row.slot) == (row.key if row.visible else None)
        row.pins += row.visible

    @precondition(lambda self: any(row.pins for row in self.rows.values()))
    @rule(data=st.data())
    def unpin(self, data):
        row = data.draw(st.sampled_from([row for row in self.rows.values() if row.pins]))
        self.tier.unpin(row.slot)
        row.pins -= 1
        if row.spoilt:
            self.settle([row])

    # ---- size ----

    @rule(first=st.integers(0, NUM_ROWS))
    def shrink_and_grow(self, first):
        evicted, blocked = [], Counter()
        for number in [number for number in self.rows if number >= first]:
            reason = self.rows[number].user or ("quarantined" if self.is_adopting else None)
            if reason is None:
                evicted.append(number)
            else:
                blocked[reason] += 1
        assert self.tier.vacate(first) == (len(evicted), blocked)
        for number in evicted:
            self.drop_row(number)
        assert self.tier.usable_slots == first
        # The key of a spoilt row may have another row below ``first``.
        beyond = [row for number, row in self.rows.items() if number >= first and not row.spoilt]
        assert not any(self.tier.is_resident(row.key) for row in beyond)
        self.tier.usable_slots = NUM_ROWS

    # ---- restart ----

    @rule(key=keys)
    def seal(self, key):
        row = self.find(key)
        if row is not None and row.visible:
            for column in range(NUM_COLUMNS):
                self.arena.table.record_checksum(row.slot.row, column, checksum(row.content(column)))
            row.sealed = True

    @rule(is_due=st.sampled_from([False, False, False, True]))
    def restart(self, is_due):
        if not is_due:  # more restarts would leave too few steps for the other rules
            return
        # Rows without users may be reused at once; other rows wait for their users.
        self.order = self.new_orders()
        self.dropped.clear()
        self.leases.clear()
        self.is_adopting = True
        for row in sorted(self.rows.values(), key=lambda row: row.slot.row):
            row.quarantined |= row.writing
            if not row.quarantined and not row.committed:
                del self.rows[row.slot.row]
                continue
            row.writing.clear()
            row.readers = row.pins = 0
            row.held = True
            row.request = object()
            row.unverified = row.sealed
            row.spoilt |= not (row.sealed and row.visible)
            self.settle([row])
        if self.order.is_empty and not self.dropped:
            self.is_adopting = False
        self.start()
        self.tier.usable_slots = NUM_ROWS

    @rule()
    def release_adopted_rows(self):
        self.tier.release_adopted()
        self.is_adopting = False

    @rule(key=keys, is_intact=st.booleans(), is_pinned_twice=st.booleans())
    def verify(self, key, is_intact, is_pinned_twice):
        row = self.find(key)
        assert self.tier.unverified_slot(key) == (row.slot if row and row.unverified else None)
        if row and row.unverified and self.tier.pin(row.slot):
            if is_pinned_twice and self.tier.pin(row.slot):
                row.pins += 1
            self.tier.note_verified(row.slot, is_intact=is_intact)
            row.unverified = False
            self.tier.unpin(row.slot)
            if not is_intact:
                row.spoilt = True
                row.sealed = False
                self.order.remove(row.slot.row)
                self.settle([row])

    @rule(seconds=st.sampled_from([1.0, INCOMPLETE_SECONDS + 1]))
    def wait(self, seconds):
        self.now += seconds

    # ---- invariants ----

    @invariant()
    def resident_rows_match_the_oracle(self):
        for key in CHAIN:
            row = self.find(key)
            assert self.tier.is_resident(key) == bool(row and row.visible and not row.unverified)

    @invariant()
    def bytes_in_use_are_unchanged(self):
        for row in self.rows.values():
            for column in {*row.writing, *row.quarantined, *(row.committed if row.visible else ())}:
                assert bytes(self.arena.view(row.slot.row, column)) == row.content(column)

    @invariant()
    def tenants_match_the_oracle(self):
        counts = Counter(row.tenant for row in self.rows.values())
        uses, rest = self.tier.stats.tenants.largest()
        used = {use.name: (use.num_rows, use.num_bytes) for use in uses}
        assert used == {name: (n, n * NUM_COLUMNS * SLOT_BYTES) for name, n in counts.items()}
        assert rest.num_rows == 0

    @invariant()
    def gauges_match_the_oracle(self):
        assert self.tier.num_used == len(self.rows)
        assert self.tier.num_leased == sum(row.readers > 0 for row in self.rows.values())
        assert self.tier.num_quarantined == sum(len(row.quarantined) for row in self.rows.values())


TestMemoryModel = MemoryMachine.TestCase
TestMemoryModel.settings = settings(max_examples=NUM_EXAMPLES, stateful_step_count=50)
