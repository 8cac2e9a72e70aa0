"""The memory tier: reservations, leases and quarantine over the rows of an arena.

A row's life::

    free -> reserved -> (all columns committed) visible -> evicted -> free
                 `-> (a column aborted or quarantined) invalid -> free

**Slot reuse.** Bytes of a row may be under somebody's copy while it is reserved, leased, pinned or in
quarantine; such a row is in nobody's reach but theirs. A row is reused only after each of them ended what
they began, or is known to be gone: ``end_quarantine`` and ``end_lease_quarantine`` say so, and nothing else
does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence

from lmcache.tiers.base import RowKey
from lmcache.tiers.errors import ArenaError, StaleSlotError
from lmcache.tiers.memory.adoption import SIDECAR, Quarantine, adopt_rows
from lmcache.tiers.memory.contracts import (
    Arena,
    Chains,
    OpenRow,
    Reservation,
    Reserved,
    Residency,
    Slot,
    VacateResult,
)
from lmcache.tiers.memory.leases import LeaseId, Leases
from lmcache.tiers.memory.rows import Rows
from lmcache.tiers.stats import MemoryStats, Removal
from lmcache.units import ceil_div


class MemoryTier:
    """Not thread-safe: one event loop owns it. A row takes the slots that its columns' payloads need.

    An ``owner`` of reservations is a client's uuid (16 bytes); leases belong to an engine. Methods that take
    slots raise StaleSlotError, and change nothing, when one of them is not the caller's.
    """

    def __init__(
        self,
        arena: Arena,
        clock: Callable[[], float] = time.monotonic,
        stats: MemoryStats | None = None,
        tenant_quota_percent: int = 100,
    ) -> None:
        self.arena = arena
        if arena.geometry is None:
            raise ArenaError("the arena is not formatted yet")
        self._slot_bytes = arena.geometry.slot_bytes
        self._rows = Rows(arena, clock, arena.geometry.slots_per_frame, stats, tenant_quota_percent)
        self._rows.is_holding_adopted = True
        self._table = arena.table
        self._reservations: dict[bytes, set[tuple[int, int]]] = {}  # owner -> (row, column)
        self._quarantine: Quarantine = {}
        self._held: set[tuple[int, int]] = set()  # a copy of ours goes there
        self._leases = Leases(self._rows)

    # ---- restart ----

    def adopt(self) -> Iterator[None]:
        """Bring back what an earlier process left, in slices; exhaust it before anything else."""
        return adopt_rows(self.arena, self._rows, self.num_slots, self._quarantine)

    def release_adopted(self) -> None:
        """All clients from before the restart are drained or dead: adopted rows may be evicted."""
        self._rows.is_holding_adopted = False

    # ---- store ----

    def reserve(
        self,
        key: RowKey,
        column: int,
        owner: bytes,
        *,
        length: int,
        depth: int = 0,
        request: Hashable = None,
        tenant: bytes = b"",
    ) -> Reservation:
        """Give out one column of a row, which is made when it does not exist.

        ``length``: payload bytes of the column; ``depth``: position of the chunk in its chain; ``request``:
        rows of one request go tail first; ``tenant``: whom a new row is counted for.
        """
        number = self._rows.row_by_key.get(key)
        if number is not None and number not in self._rows.open_rows and not self._rows.is_readable(number):
            self.stats.removed[Removal.INVALID] += 1
            self._rows.remove(key)
            number = None
        row = (
            self._new_row(key, length, request, depth, tenant)
            if number is None
            else self._rows.open_rows.get(number)
        )
        if number is not None and (row is None or column in row.committed):
            return Reservation(Reserved.EXISTS)
        if row is None or column in row.writers or not self._rows.is_usable(row.slot.row):
            return Reservation(Reserved.BUSY)
        if self._rows.allocator.size(row.slot.row) < self.num_slots(length):
            return Reservation(Reserved.BUSY)  # made by somebody whose rows of this key are shorter
        self._assign(row, column, owner, length)
        return Reservation(Reserved.SLOT, row.slot)

    def hold(self, slots: Sequence[Slot], column: int, owner: bytes, lengths: Sequence[int]) -> None:
        """Somebody copies so many bytes into these reserved slots for the owner: until ``let_go`` they are
        not committed, and not reused, whatever becomes of the reservation."""
        rows = [row.slot.row for row in self._reserved_rows(slots, column, owner)]
        self._check_not_held(rows, column)
        for number, length in zip(rows, lengths, strict=True):
            if self._rows.allocator.size(number) < self.num_slots(length):  # what follows is another row's
                raise StaleSlotError(f"row {number} is not reserved for {length} bytes")
        self._held.update((number, column) for number in rows)
        for number in rows:
            self._rows.pin(number)

    def let_go(self, slots: Sequence[Slot], column: int) -> None:
        """Nothing copies into them any more."""
        for slot in slots:
            self._held.remove((slot.row, column))
            self._rows.unpin(slot.row)

    def commit(self, slots: Sequence[Slot], column: int, owner: bytes) -> list[Slot]:
        """The column's bytes are in these slots (head first). Return the rows that became visible by this.

        Those of several KV groups may come together: all of one chunk are evicted before those of the chunk
        before it.
        """
        self._check_not_held([slot.row for slot in slots], column)
        visible = []
        depths = self._rows.depths
        reserved = self._reserved_rows(slots, column, owner)
        for row in sorted(reserved, key=lambda row: depths[row.slot.row]):
            number = row.slot.row
            self._table.commit(number, column)
            self._take_back(row, column, owner)
            row.committed.add(column)
            if len(row.committed) == self._table.num_columns:
                self._rows.publish(row)
                visible.append(row.slot)
            else:
                self._rows.release_if_unused(number)
        return visible

    def abort(self, slots: Sequence[Slot], column: int, owner: bytes) -> None:
        """Give reservations back: these rows are never visible."""
        for row in self._reserved_rows(slots, column, owner):
            self._take_back(row, column, owner)
            self._table.free_slot(row.slot.row, column)
            self._rows.invalidate(row.slot.row)
            self._rows.release_if_unused(row.slot.row)

    def quarantine(self, owner: bytes) -> None:
        """The client's stream broke: its reservations can't be committed any more, nor their slots reused."""
        reserved = self._reservations.pop(owner, set())
        for number, column in reserved:
            self._rows.invalidate(number).writers[column] = None
        if reserved:
            self._quarantine.setdefault(owner, set()).update(reserved)

    def end_quarantine(self, owner: bytes) -> None:
        """The client sent Drained, or is proven dead: its quarantined slots may be reused."""
        for number, column in self._quarantine.pop(owner, set()):
            del self._rows.open_rows[number].writers[column]
            self._table.free_slot(number, column)
            self._rows.release_if_unused(number)

    @property
    def quarantined_owners(self) -> set[bytes]:
        """Clients whose slots or engines whose leases are in quarantine."""
        return self._quarantine.keys() | self._leases.quarantined.keys()

    # ---- load ----

    def lookup(self, lease_id: LeaseId, chains: Chains, *, is_hint: bool = False) -> Residency:
        """Say what is resident, and lease, but for a hint, the rows that a hit of all the chunks needs.

        Asking again under the same id extends the lease. At most half of the usable slots are leased in all.
        """
        leases, num_chunks, is_prefix = self._rows.lease_counts, chains.num_chunks, chains.is_prefix
        if is_prefix:
            resident = self._rows.prefix(chains.keys[0])
            num_resident = len(resident)
            present: tuple[bytes, ...] = ((b"\1" * num_resident).ljust(num_chunks, b"\0"),)
        else:
            rows = self._find(chains)
            present = tuple(bytes(row >= 0 for row in part) for part in rows)
            num_resident = chains.longest_hit(present)
            places = chains.places(num_resident if is_hint else num_chunks)
            resident = [row for chunk, group in places if (row := rows[group][chunk]) >= 0]
        leased = [] if is_hint else self._leases.extend(lease_id, resident)
        self._rows.policy.touch([row for row in resident[len(leased) :] if row not in leases], lease_id[1])
        self.stats.count_lookup(lease_id, chains.keys[0], num_resident)
        slots = self._rows.slots(leased)
        if is_prefix:
            return Residency(num_resident, len(leased), chains.keys[0], slots, present)
        kept = set(leased)
        num_leased = chains.longest_hit([bytes(row in kept for row in part) for part in rows]) if kept else 0
        return Residency(num_resident, num_leased, list(map(self._rows.key, leased)), slots, present)

    def _find(self, chains: Chains) -> list[list[int]]:
        """Rows by chain and chunk, -1: not there, or of no use."""
        rows = []
        for group, keys in zip(chains.groups, chains.keys, strict=True):
            found = self._rows.prefix(keys) if group.is_full else self._rows.each(keys)
            rows.append(found + [-1] * (chains.num_chunks - len(found)))
        return rows

    def release(self, lease_id: LeaseId) -> None:
        """End a lease; unknown ids are ignored."""
        self._leases.end(lease_id)

    def quarantine_leases(self, engine: bytes) -> None:
        """The engine's leases can't be extended or released any more, and go on holding their rows."""
        self._leases.quarantine(engine)

    def end_lease_quarantine(self, engine: bytes) -> None:
        """All clients of the engine are drained or dead: its quarantined leases end."""
        self._leases.end_quarantine(engine)

    # ---- for the tiers below ----

    def num_slots(self, length: int) -> int:
        """Slots of a row whose columns have payloads of so many bytes."""
        return max(1, ceil_div(length, self._slot_bytes))

    def is_resident(self, key: RowKey) -> bool:
        """Could a lookup lease it?"""
        return self._rows.find(key) is not None

    def knows(self, key: RowKey) -> bool:
        """Is there a row of this key, in whatever state?"""
        return key in self._rows.row_by_key

    def is_coming(self, key: RowKey) -> bool:
        """Is somebody writing it now?"""
        number = self._rows.row_by_key.get(key)
        return number in self._rows.open_rows and bool(self._rows.open_rows[number].writers)

    @property
    def has_unverified(self) -> bool:
        """Are there adopted rows that lookups find only after a verification?"""
        return any(self._rows.unverified.tobytes())

    def unverified(self, key: RowKey) -> Slot | None:
        """Return the slot of an adopted row whose bytes must be compared with their checksums before use."""
        number = self._rows.row_by_key.get(key)
        return None if number is None or not self._rows.unverified[number] else self._rows.slot(number)

    def verified(self, slot: Slot, *, is_intact: bool) -> None:
        """Say what the comparison found; a row that is not intact is gone. The row must be pinned."""
        if is_intact:
            self._rows.mark_verified(slot.row)
            self.stats.verified += 1
        else:
            self._rows.unverified[slot.row] = 0
            self.stats.removed[Removal.INVALID] += 1
            self._table.forget_checksums(slot.row)  # another restart must not bring it back
            self._rows.invalidate(slot.row)

    def pin(self, slot: Slot) -> RowKey | None:
        """Keep a visible row from eviction while its bytes are read; None when it is gone already."""
        if not self._rows.is_visible(slot):
            return None
        self._rows.pin(slot.row)
        return self._rows.key(slot.row)

    def unpin(self, slot: Slot) -> None:
        """End one ``pin``."""
        self._rows.unpin(slot.row)

    def payloads(self, slot: Slot) -> list[memoryview]:
        """Return the payloads of a row's columns, as long as the slot table says."""
        views = self.views(slot)
        return [view[: self._table.length(slot.row, column)] for column, view in enumerate(views)]

    def views(self, slot: Slot) -> list[memoryview]:
        """Return a row's columns: all of their slots."""
        num_bytes = self._rows.allocator.size(slot.row) * self._slot_bytes
        return [self.arena.view(slot.row, column, num_bytes) for column in range(self._table.num_columns)]

    def describe(self, slot: Slot) -> tuple[RowKey, int]:
        """Return a visible row's key and the position of its chunk in its chain (0: not known)."""
        return self._rows.key(slot.row), self._rows.depths[slot.row]

    def reserve_row(
        self, key: RowKey, length: int, request: Hashable = None, tenant: bytes = b""
    ) -> Slot | None:
        """Reserve all columns, of ``length`` bytes each, for this process itself; None when the row exists,
        or no row can be freed."""
        row = None if key in self._rows.row_by_key else self._new_row(key, length, request, 0, tenant)
        if row is None:
            return None
        for column in range(self._table.num_columns):
            self._assign(row, column, SIDECAR, length)
        return row.slot

    def commit_row(self, slot: Slot, checksums: Sequence[bytes]) -> None:
        """All columns are in the slots, with these checksums."""
        for column, checksum in enumerate(checksums):
            self._table.record_checksum(slot.row, column, checksum)
            self.commit([slot], column, SIDECAR)

    def abort_row(self, slot: Slot) -> None:
        """Give all columns back."""
        for column in range(self._table.num_columns):
            self.abort([slot], column, SIDECAR)

    # ---- size and gauges ----

    @property
    def usable_slots(self) -> int:
        """Only rows in slots below this are given out or leased: unless it was set, those that are ready."""
        return self._rows.usable_slots

    @usable_slots.setter
    def usable_slots(self, number: int | None) -> None:
        self._rows.usable_slots = number

    def vacate(self, first_slot: int, num_enough: float = math.inf) -> VacateResult:
        """Use the slots from this one on no more until ``usable_slots`` is set, and evict what is there, as
        far as nobody uses it, until so many rows are evicted: ask again for the rest."""
        self.usable_slots = min(self.usable_slots, first_slot)
        return self._rows.vacate(first_slot, num_enough)

    @property
    def stats(self) -> MemoryStats:
        """What was counted, since the start unless it was given."""
        return self._rows.stats

    @property
    def num_frames(self) -> int:
        """The largest rows that the arena has room for."""
        return self._rows.allocator.num_frames

    @property
    def num_used(self) -> int:
        """Rows that are not free."""
        return self._rows.allocator.num_rows

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots of these rows, in all columns."""
        return self._rows.allocator.num_used_slots * self._slot_bytes * self._table.num_columns

    @property
    def num_leased(self) -> int:
        """Rows under at least one lease, those in quarantine included."""
        return len(self._rows.lease_counts)

    @property
    def num_quarantined(self) -> int:
        """Slots (row and column) whose reuse is not proven safe yet."""
        return sum(map(len, self._quarantine.values()))

    @property
    def num_held(self) -> int:
        """Slots that somebody copies into for their owners, or for owners that gave them back."""
        return len(self._held)

    # ---- inside ----

    def _new_row(
        self, key: RowKey, length: int, request: Hashable, depth: int = 0, tenant: bytes = b""
    ) -> OpenRow | None:
        row = self._rows.open_row(key, self.num_slots(length), request, depth=depth, tenant=tenant)
        if row is not None:
            self._rows.row_by_key[key] = row.slot.row
        return row

    def _assign(self, row: OpenRow, column: int, owner: bytes, length: int) -> None:
        self._rows.write(row, column, owner, length)
        self._reservations.setdefault(owner, set()).add((row.slot.row, column))

    def _reserved_rows(self, slots: Sequence[Slot], column: int, owner: bytes) -> list[OpenRow]:
        rows = []
        for slot in slots:
            row = self._rows.open_rows.get(slot.row)
            if row is None or row.slot != slot or row.writers.get(column) != owner:
                raise StaleSlotError(f"column {column} of {slot} is not reserved by this client (any more)")
            rows.append(row)
        if len({slot.row for slot in slots}) != len(slots):
            raise StaleSlotError("a slot is named twice")
        return rows

    def _check_not_held(self, numbers: Sequence[int], column: int) -> None:
        for number in numbers:
            if (number, column) in self._held:
                raise StaleSlotError(f"a copy into column {column} of row {number} is under way")

    def _take_back(self, row: OpenRow, column: int, owner: bytes) -> None:
        del row.writers[column]
        self._reservations[owner].remove((row.slot.row, column))
