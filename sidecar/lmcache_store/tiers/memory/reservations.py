"""The store half of the memory tier: reservations, the copies into them, and the quarantine.

A row's life::

    free -> reserved -> (all columns committed) visible -> evicted -> free
                 `-> (a column aborted or quarantined) invalid -> free

**Slot reuse.** While a row is reserved, leased, pinned or in quarantine, a client may be copying its bytes.
No other client gets such a row. The tier reuses a row only after each of its users ended its access, or is
known to be gone. Only ``end_quarantine`` and ``end_leases`` report that a user is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence

from lmcache_store.common.units import ceil_div
from lmcache_store.tiers.base import RowKey
from lmcache_store.tiers.budgets import Budgets
from lmcache_store.tiers.errors import ArenaError, StaleSlotError
from lmcache_store.tiers.memory.adoption import SIDECAR, Quarantine
from lmcache_store.tiers.memory.contracts import Arena, OpenRow, Reservation, Reserved, Slot
from lmcache_store.tiers.memory.rows import MemoryRows
from lmcache_store.tiers.stats import MemoryStats, Removal


class Reservations:
    """Reserved columns by owner. Not thread-safe: one event loop owns it.

    An ``owner`` of reservations is a client's uuid (16 bytes). If a slot does not belong to the caller,
    methods that take slots raise StaleSlotError and change nothing.
    """

    def __init__(
        self,
        arena: Arena,
        clock: Callable[[], float] = time.monotonic,
        stats: MemoryStats | None = None,
        budgets: Budgets | None = None,
    ) -> None:
        self.arena = arena
        if arena.geometry is None:
            raise ArenaError("the arena is not formatted yet")
        self._slot_bytes = arena.geometry.slot_bytes
        self._rows = MemoryRows(arena, clock, arena.geometry.slots_per_frame, stats, budgets)
        self._rows.is_holding_adopted = True
        self._table = arena.table
        self._reservations: dict[bytes, set[tuple[int, int]]] = {}  # owner -> (row, column)
        self._quarantine: Quarantine = {}
        self._held: set[tuple[int, int]] = set()  # (row, column) into which this process copies

    @property
    def stats(self) -> MemoryStats:
        """Counters since the start, or since the start of the ``stats`` given to the constructor."""
        return self._rows.stats

    def num_slots(self, length: int) -> int:
        """Return the slots of a row whose columns have payloads of ``length`` bytes."""
        return max(1, ceil_div(length, self._slot_bytes))

    def set_budgets(self, budgets: Budgets) -> None:
        """Use other budgets of tenants from now on. Does nothing if they are in use already."""
        if budgets is not self.stats.tenants.budgets:
            self._rows.set_budgets(budgets)

    # ---- for clients ----

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
        """Reserve one column of a row, and create the row if it does not exist.

        ``length``: payload bytes of the column. ``depth``: position of the chunk in its chain. ``request``:
        rows of one request are evicted tail first. ``tenant``: whose quota a new row counts against.
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
            return Reservation(Reserved.BUSY)  # another client created the row for shorter payloads
        self._assign(row, column, owner, length)
        return Reservation(Reserved.SLOT, row.slot)

    def hold(self, slots: Sequence[Slot], column: int, owner: bytes, lengths: Sequence[int]) -> None:
        """Protect reserved slots while this process copies ``lengths`` bytes into them for the owner.

        Until ``end_hold`` these slots are neither committed nor reused, even if the reservation ends.
        """
        rows = [row.slot.row for row in self._reserved_rows(slots, column, owner)]
        self._check_not_held(rows, column)
        for number, length in zip(rows, lengths, strict=True):
            if self._rows.allocator.size(number) < self.num_slots(length):  # the copy would hit the next row
                raise StaleSlotError(f"row {number} is not reserved for {length} bytes")
        self._held.update((number, column) for number in rows)
        for number in rows:
            self._rows.pin(number)

    def end_hold(self, slots: Sequence[Slot], column: int) -> None:
        """End ``hold``: no copy into these slots is running any more."""
        for slot in slots:
            self._held.remove((slot.row, column))
            self._rows.unpin(slot.row)

    def commit(self, slots: Sequence[Slot], column: int, owner: bytes) -> list[Slot]:
        """Commit the column of these slots, head first. Returns the rows that became visible.

        The slots may be of several KV groups. Eviction removes all rows of one chunk before those of the
        chunk before it.
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
        """Cancel reservations; their rows never become visible."""
        for row in self._reserved_rows(slots, column, owner):
            self._take_back(row, column, owner)
            self._table.free_slot(row.slot.row, column)
            self._rows.invalidate(row.slot.row)
            self._rows.release_if_unused(row.slot.row)

    def quarantine(self, owner: bytes) -> None:
        """Quarantine a client's reservations after its stream broke: they can't be committed, nor their slots
        reused."""
        reserved = self._reservations.pop(owner, set())
        for number, column in reserved:
            self._rows.invalidate(number).writers[column] = None
        if reserved:
            self._quarantine.setdefault(owner, set()).update(reserved)

    def end_quarantine(self, owner: bytes) -> None:
        """Release a client's quarantined slots: it sent Drained, or is proven dead."""
        for number, column in self._quarantine.pop(owner, set()):
            del self._rows.open_rows[number].writers[column]
            self._table.free_slot(number, column)
            self._rows.release_if_unused(number)

    @property
    def num_quarantined(self) -> int:
        """Number of slots (row and column) in quarantine."""
        return sum(map(len, self._quarantine.values()))

    # ---- for promotions ----

    def reserve_row(
        self, key: RowKey, length: int, request: Hashable = None, tenant: bytes = b""
    ) -> Slot | None:
        """Reserve all columns of a new row, of ``length`` bytes each, for this process.

        Returns None when the row exists, or when no slots can be freed.
        """
        row = None if key in self._rows.row_by_key else self._new_row(key, length, request, 0, tenant)
        if row is None:
            return None
        for column in range(self._table.num_columns):
            self._assign(row, column, SIDECAR, length)
        return row.slot

    def commit_row(self, slot: Slot, checksums: Sequence[bytes]) -> None:
        """Commit all columns of a row of this process, and record their checksums."""
        for column, checksum in enumerate(checksums):
            self._table.record_checksum(slot.row, column, checksum)
            self.commit([slot], column, SIDECAR)

    def abort_row(self, slot: Slot) -> None:
        """Cancel the reservation of a row of this process."""
        for column in range(self._table.num_columns):
            self.abort([slot], column, SIDECAR)

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
                raise StaleSlotError(
                    f"column {column} of {slot} is not reserved by this client, or not any more"
                )
            rows.append(row)
        if len({slot.row for slot in slots}) != len(slots):
            raise StaleSlotError("the request lists a slot twice")
        return rows

    def _check_not_held(self, numbers: Sequence[int], column: int) -> None:
        for number in numbers:
            if (number, column) in self._held:
                raise StaleSlotError(f"a copy into column {column} of row {number} is under way")

    def _take_back(self, row: OpenRow, column: int, owner: bytes) -> None:
        del row.writers[column]
        self._reservations[owner].remove((row.slot.row, column))
