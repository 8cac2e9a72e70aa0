"""The memory tier: index, reservations, leases, quarantine and eviction over an arena.

A row's life::

    free -> reserved -> (all columns committed) visible -> evicted -> free
                 `-> (a column aborted or quarantined) spoilt -> free

**Slot reuse.** Bytes of a row may be under somebody's copy while it is reserved, leased, pinned or in
quarantine; such a row is in nobody's reach but theirs. A row is reused only after each of them ended what
they began, or is known to be gone: ``end_quarantine`` and ``end_lease_quarantine`` say so, and nothing else
does.

**Eviction** happens when a row is needed and none is free: first rows dropped after a restart, then
incomplete ones, then what the policy says. Costs: O(1) per key, O(log rows) per row taken or freed.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lmcache.tiers.base import Arena, Removal, Reservation, Reserved, RowKey, Slot, StaleSlot
from lmcache.tiers.policy import LRU, Policy
from lmcache.tiers.rows import Row, adopted_row
from lmcache.tiers.slots import State
from lmcache.tiers.stats import MemoryStats

SIDECAR = bytes(16)  # owner of the rows that the tier's own process fills (promotions)
LeaseId = tuple[bytes, str]  # (engine uuid, request id)

# Ranks of one engine store a chunk within one step: by then missing columns will not come any more.
INCOMPLETE_SECONDS = 30.0

_ADOPT_SLICE_ROWS = 128
_MAX_EVICTIONS = 64  # per row needed: bounds the time of one call


class MemoryTier:
    """Not thread-safe: one event loop owns it.

    An ``owner`` of reservations is a client's uuid (16 bytes); leases belong to an engine. Methods that take
    slots raise StaleSlot, and change nothing, when one of them is not the caller's.
    """

    def __init__(
        self, arena: Arena, policy: Policy | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.arena = arena
        self.stats = MemoryStats()
        # Only rows below this are given out or leased: what all attached workers have mapped.
        self.usable_rows = arena.ready_rows
        self._policy = policy or LRU()
        self._clock = clock
        self._table = arena.table
        self._next_generation = max(arena.first_generation, self._table.max_generation() + 1)
        self._index: dict[RowKey, Row] = {}
        self._rows: dict[int, Row] = {}  # all rows that are not free
        self._free: list[int] = []  # heap
        self._incomplete: OrderedDict[int, float] = OrderedDict()  # row nobody writes -> since when
        self._reservations: dict[bytes, set[tuple[int, int]]] = {}  # owner -> (row, column)
        self._quarantine: dict[bytes, set[tuple[int, int]]] = {}
        self._leases: dict[LeaseId, dict[int, None]] = {}  # rows, head first
        self._lease_quarantine: dict[bytes, list[tuple[str, dict[int, None]]]] = {}  # engine -> its leases
        self.num_leased = 0  # rows under at least one lease, those in quarantine included
        self._dropped: list[Row] = []  # adopted rows of no use, not free while adopted rows are held
        self._holding_adopted = True

    # ---- restart ----

    def adopt(self) -> Iterator[None]:
        """Build the index from the slot table in slices of less than 1 ms; exhaust it before anything else.

        Committed rows with checksums come back, to be verified on first use; reserved slots are quarantined
        under the owner that the table names; what else there is was not finished, and is dropped.
        """
        for first in range(0, self.arena.num_rows, _ADOPT_SLICE_ROWS):
            entries = self._table.snapshot(first, min(first + _ADOPT_SLICE_ROWS, self.arena.num_rows))
            used = (entries["state"] != State.FREE).any(axis=0)
            for offset in range(entries.shape[1]):
                if used[offset]:
                    self._adopt_row(first + offset, entries[:, offset])
                else:
                    heapq.heappush(self._free, first + offset)
            yield
        self._holding_adopted = bool(self._index or self._dropped)

    def release_adopted(self) -> None:
        """All clients from before the restart are drained or dead: adopted rows may be evicted."""
        self._holding_adopted = False

    def _adopt_row(self, number: int, entries: NDArray[np.void]) -> None:
        row = self._rows[number] = adopted_row(number, entries)
        if row.visible and self._index.setdefault(row.key, row) is not row:
            self._spoil(row)
        for column, entry in enumerate(entries):
            owner = entry["owner"].tobytes()
            if entry["state"] == State.RESERVED and owner != SIDECAR:
                row.writers[column] = None
                self._quarantine.setdefault(owner, set()).add((number, column))
        self._settle(row)

    # ---- store ----

    def reserve(
        self, key: RowKey, column: int, owner: bytes, *, length: int, depth: int = 0, request: Hashable = None
    ) -> Reservation:
        """Give out one column of a row, which is made when it does not exist.

        ``length``: payload bytes of the column; ``depth``: position of the chunk in its chain; ``request``:
        rows of one request go tail first.
        """
        row = self._index.get(key) or self._new_row(key, depth, request)
        if row is not None and column in row.committed:
            return Reservation(Reserved.EXISTS)
        if row is None or column in row.writers or row.slot.row >= self.usable_rows:
            return Reservation(Reserved.BUSY)
        self._give(row, column, owner, length)
        return Reservation(Reserved.SLOT, row.slot)

    def commit(self, slots: Sequence[Slot], column: int, owner: bytes) -> list[Slot]:
        """The column's bytes are in these slots (head first). Return the rows that became visible by this."""
        rows = self._reserved_rows(slots, column, owner)
        for row in rows:
            self._table.commit(row.slot.row, column)
            self._take_back(row, column, owner)
            row.committed.add(column)
            row.visible = len(row.committed) == self._table.num_columns
            self._settle(row)
        return [row.slot for row in rows if row.visible]

    def abort(self, slots: Sequence[Slot], column: int, owner: bytes) -> None:
        """Give reservations back: these rows are never visible."""
        for row in self._reserved_rows(slots, column, owner):
            self._take_back(row, column, owner)
            self._table.free_slot(row.slot.row, column)
            self._spoil(row)
            self._settle(row)

    def quarantine(self, owner: bytes) -> None:
        """The client's stream broke: its reservations can't be committed any more, nor their slots reused."""
        reserved = self._reservations.pop(owner, set())
        for number, column in reserved:
            row = self._rows[number]
            row.writers[column] = None
            self._spoil(row)
        if reserved:
            self._quarantine.setdefault(owner, set()).update(reserved)

    def end_quarantine(self, owner: bytes) -> None:
        """The client sent Drained, or is proven dead: its quarantined slots may be reused."""
        for number, column in self._quarantine.pop(owner, set()):
            row = self._rows[number]
            del row.writers[column]
            self._table.free_slot(number, column)
            self._settle(row)

    @property
    def quarantined_owners(self) -> set[bytes]:
        """Clients whose slots or engines whose leases are in quarantine."""
        return self._quarantine.keys() | self._lease_quarantine.keys()

    # ---- load ----

    def lookup(self, lease_id: LeaseId, keys: Sequence[RowKey]) -> tuple[int, list[Slot]]:
        """Return the number of leading keys resident, and the slots of those (leading, too) now under the
        lease.

        Asking again under the same id extends the lease. At most half of the usable rows are leased in all.
        """
        lease = self._leases.get(lease_id, {})
        resident = self._resident(keys)
        slots = []
        for row in resident:
            if row.slot.row not in lease and not self._lease(row):
                break
            lease[row.slot.row] = None
            slots.append(row.slot)
        if lease:
            self._leases[lease_id] = lease
        self._policy.touch([row.slot.row for row in resident if not row.num_leases], lease_id[1])
        self.stats.count_lookup(lease_id, keys, len(resident))
        return len(resident), slots

    def release(self, lease_id: LeaseId) -> None:
        """End a lease; unknown ids are ignored."""
        self._end_lease(lease_id[1], self._leases.pop(lease_id, {}))

    def quarantine_leases(self, engine: bytes) -> None:
        """The engine's leases can't be extended or released any more, and go on holding their rows."""
        for lease_id in [lease_id for lease_id in self._leases if lease_id[0] == engine]:
            lease = self._leases.pop(lease_id)
            self._lease_quarantine.setdefault(engine, []).append((lease_id[1], lease))

    def end_lease_quarantine(self, engine: bytes) -> None:
        """All clients of the engine are drained or dead: its quarantined leases end."""
        for request, lease in self._lease_quarantine.pop(engine, []):
            self._end_lease(request, lease)

    # ---- for the tiers below ----

    def is_resident(self, key: RowKey) -> bool:
        """Could a lookup lease it?"""
        return bool(self._resident([key]))

    def unverified(self, key: RowKey) -> Slot | None:
        """Return the slot of an adopted row whose bytes must be compared with their checksums before use."""
        row = self._index.get(key)
        return row.slot if row and row.unverified else None

    def verified(self, slot: Slot, *, is_intact: bool) -> None:
        """Say what the comparison found; a row that is not intact is gone. The row must be pinned."""
        row = self._rows[slot.row]
        row.unverified = False
        if not is_intact:
            self.stats.removed[Removal.INVALID] += 1
            self._table.unseal(slot.row)  # another restart must not bring it back
            self._spoil(row)

    def pin(self, slot: Slot) -> RowKey | None:
        """Keep a visible row from eviction while its bytes are read; None when it is gone already."""
        row = self._rows.get(slot.row)
        if row is None or row.slot != slot or not row.visible:
            return None
        row.num_pins += 1
        return row.key

    def unpin(self, slot: Slot) -> None:
        """End one ``pin``."""
        row = self._rows[slot.row]
        row.num_pins -= 1
        # Being read by us is not being used: the row keeps its place in the order of eviction.
        if row.spoilt:
            self._settle(row)

    def describe(self, slot: Slot) -> tuple[RowKey, int]:
        """Return a row's key and the position of its chunk in its chain (0: not known)."""
        row = self._rows[slot.row]
        return row.key, row.depth

    def reserve_row(self, key: RowKey, request: Hashable = None) -> Slot | None:
        """Reserve all columns for this process itself; None when the row exists, or no row can be freed."""
        row = self._new_row(key, 0, request) if key not in self._index else None
        if row is None:
            return None
        for column in range(self._table.num_columns):
            self._give(row, column, SIDECAR, length=0)
        return row.slot

    def commit_row(self, slot: Slot, lengths: Sequence[int], checksums: Sequence[bytes]) -> None:
        """All columns are in the slots, with these payload lengths and checksums."""
        for column, (length, checksum) in enumerate(zip(lengths, checksums, strict=True)):
            self._table.set_length(slot.row, column, length)
            self._table.seal(slot.row, column, checksum)
            self.commit([slot], column, SIDECAR)

    def abort_row(self, slot: Slot) -> None:
        """Give all columns back."""
        for column in range(self._table.num_columns):
            self.abort([slot], column, SIDECAR)

    @property
    def num_used(self) -> int:
        """Rows that are not free."""
        return len(self._rows)

    @property
    def num_quarantined(self) -> int:
        """Slots (row and column) whose reuse is not proven safe yet."""
        return sum(map(len, self._quarantine.values()))

    # ---- inside ----

    def _resident(self, keys: Sequence[RowKey]) -> list[Row]:
        """Leading rows that can be leased."""
        rows: list[Row] = []
        for key in keys:
            row = self._index.get(key)
            if row is None or not row.visible or row.unverified or row.slot.row >= self.usable_rows:
                break
            rows.append(row)
        return rows

    def _lease(self, row: Row) -> bool:
        if row.num_leases == 0:
            if self.num_leased >= self.usable_rows // 2:
                return False
            self.num_leased += 1
            self._policy.remove(row.slot.row)
        row.num_leases += 1
        return True

    def _end_lease(self, request: str, lease: dict[int, None]) -> None:
        unused = []
        for row in map(self._rows.__getitem__, lease):
            row.num_leases -= 1
            if row.num_leases == 0:
                self.num_leased -= 1
                unused.append(row.slot.row)
        self._policy.touch(unused, request)

    def _new_row(self, key: RowKey, depth: int, request: Hashable) -> Row | None:
        number = self._take_free()
        if number is None:
            self.stats.refused += 1
            return None
        row = Row(key, Slot(number, self._next_generation), depth, request or object())
        self._next_generation += 1
        self._rows[number] = self._index[key] = row
        return row

    def _give(self, row: Row, column: int, owner: bytes, length: int) -> None:
        number, generation = row.slot
        self._table.reserve(number, column, key=row.key, owner=owner, length=length, generation=generation)
        row.writers[column] = owner
        self._reservations.setdefault(owner, set()).add((number, column))
        self._incomplete.pop(number, None)

    def _reserved_rows(self, slots: Sequence[Slot], column: int, owner: bytes) -> list[Row]:
        rows = []
        for slot in slots:
            row = self._rows.get(slot.row)
            if row is None or row.slot != slot or row.writers.get(column) != owner:
                raise StaleSlot(f"column {column} of {slot} is not reserved by this client (any more)")
            rows.append(row)
        if len({slot.row for slot in slots}) != len(slots):
            raise StaleSlot("a slot is named twice")
        return rows

    def _take_back(self, row: Row, column: int, owner: bytes) -> None:
        del row.writers[column]
        self._reservations[owner].remove((row.slot.row, column))

    def _spoil(self, row: Row) -> None:
        """Take the row out of the index: whoever asks for its key gets another one."""
        if self._index.get(row.key) is row:
            del self._index[row.key]
        self._policy.remove(row.slot.row)
        row.visible = False
        row.spoilt = True

    def _settle(self, row: Row) -> None:
        """Put a row where it belongs now that a use of it ended."""
        if row.spoilt:
            if row.is_unused:
                self._discard(row)
        elif row.visible:
            self._policy.admit(row.slot.row, row.request)
        elif not row.writers:
            self._incomplete[row.slot.row] = self._clock()

    def _discard(self, row: Row) -> None:
        """Free a row that nobody uses, or put it aside while a reader from before the restart may be left."""
        if row.adopted and self._holding_adopted:
            self._dropped.append(row)
            return
        number = row.slot.row
        self._table.free(number)
        del self._rows[number]
        heapq.heappush(self._free, number)

    def _take_free(self) -> int | None:
        for _ in range(_MAX_EVICTIONS):
            if self._free and self._free[0] < self.usable_rows:
                return heapq.heappop(self._free)
            if self.usable_rows == 0 or self._holding_adopted or not self._make_room():
                break
        return None

    def _make_room(self) -> bool:
        """Free one row, whichever can be spared most easily (it may lie beyond ``usable_rows``: of no use
        there)."""
        if self._dropped:
            self._discard(self._dropped.pop())
            return True
        number, since = next(iter(self._incomplete.items()), (-1, self._clock()))
        if self._clock() - since > INCOMPLETE_SECONDS:
            del self._incomplete[number]
        else:
            victims = itertools.islice(self._policy.victims(), _MAX_EVICTIONS)
            number = next((number for number in victims if not self._rows[number].num_pins), -1)
        if number < 0:
            return False
        row = self._rows[number]
        self._spoil(row)
        self._discard(row)
        self.stats.removed[Removal.EVICTED] += 1
        return True
