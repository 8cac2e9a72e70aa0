"""The memory tier: leases, lookups and verification on top of ``reservations``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

from lmcache_store.tiers.base import RowKey
from lmcache_store.tiers.memory.adoption import adopt_rows
from lmcache_store.tiers.memory.contracts import Chains, Residency, Slot, VacateResult
from lmcache_store.tiers.memory.holds import Hold
from lmcache_store.tiers.memory.leases import LeaseId, Leases
from lmcache_store.tiers.memory.reservations import Reservations
from lmcache_store.tiers.memory.row_hints import RowHints
from lmcache_store.tiers.stats import Removal


class MemoryTier(Reservations):
    """All rows of an arena. Not thread-safe: one event loop owns it.

    A row takes the slots that its columns' payloads need. Leases belong to an engine, reservations to a
    client.
    """

    @cached_property
    def _leases(self) -> Leases:
        return Leases(self._rows)

    # ---- restart ----

    def adopt(self) -> Iterator[None]:
        """Adopt the rows of an earlier process, in slices. Exhaust the iterator before any other call."""
        return adopt_rows(self.arena, self._rows, self.num_slots, self._quarantine)

    def release_adopted(self) -> None:
        """Allow the eviction of adopted rows: all clients from before the restart are drained or dead."""
        self._rows.is_holding_adopted = False

    # ---- load ----

    def lookup(
        self,
        lease_id: LeaseId,
        chains: Chains,
        *,
        is_hint: bool = False,
        num_found: int | None = None,
        is_counted: bool = True,
    ) -> Residency:
        """Find the request's rows in memory. Unless it is a hint, lease the rows that a hit of all chunks
        needs.

        A repeated lookup under the same id extends the lease. Leases take at most half of the usable slots.

        ``num_found``: chunks that the caller found earlier, counted as hits; None: those in memory now.
        ``is_counted``: count hits and misses.
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
        self._rows.policy.note_hits(resident)
        self._rows.policy.note_misses(chains.keys, num_resident)
        leased = [] if is_hint else self._leases.extend(lease_id, resident)
        self._rows.policy.touch([row for row in resident[len(leased) :] if row not in leases], lease_id[1])
        if is_counted:
            num_hits = num_resident if num_found is None else min(num_found, num_chunks)
            self.stats.count_lookup(lease_id, chains.keys[0], num_hits)
        slots = self._rows.slots(leased)
        if is_prefix:
            return Residency(num_resident, len(leased), chains.keys[0], slots, present)
        lease = set(leased)
        num_leased = (
            chains.longest_hit([bytes(row in lease for row in part) for part in rows]) if lease else 0
        )
        return Residency(num_resident, num_leased, list(map(self._rows.key, leased)), slots, present)

    def _find(self, chains: Chains) -> list[list[int]]:
        """Return rows by chain and chunk; -1 where there is no usable row."""
        rows = []
        for group, keys in zip(chains.groups, chains.keys, strict=True):
            chain_rows = self._rows.prefix(keys) if group.is_full else self._rows.each(keys)
            rows.append(chain_rows + [-1] * (chains.num_chunks - len(chain_rows)))
        return rows

    def release(self, lease_id: LeaseId) -> None:
        """End a lease. Unknown ids are ignored."""
        self._leases.end(lease_id)

    def end_leases(self, engine: bytes) -> None:
        """End the engine's leases: all its clients are drained or dead."""
        self._leases.end_all(engine)

    @property
    def quarantined_owners(self) -> set[bytes]:
        """Clients whose slots are in quarantine."""
        return set(self._quarantine)

    # ---- hints ----

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of a slot, in all columns."""
        return self._slot_bytes * self._table.num_columns

    @property
    def hints(self) -> RowHints:
        """Rows that hints retain."""
        return self._rows.hints

    def retain(self, hold: Hold, keys: Sequence[tuple[RowKey, int]], *, is_open: bool) -> None:
        """Retain the rows of these keys, with their slots. ``is_open``: and rows that its request stores."""
        self._rows.policy.begin_hints()
        self.hints.retain(hold, keys, is_open=is_open)
        rows = (self._rows.find(key) for key, _ in keys)
        self._rows.policy.note_retained(row for row in rows if row is not None)

    def evict_first(self, keys: Sequence[RowKey]) -> int:
        """Evict the rows of these keys first, the last key first, until they are used. Return their number.

        Rows that another hint retains stay retained."""
        self._rows.policy.begin_hints()
        released = self._rows.hints.holds.release(keys)
        rows = [row for key in reversed(released) if (row := self._rows.find(key)) is not None]
        idle = [row for row in rows if row not in self._rows.lease_counts]
        self._rows.policy.release(idle)
        return len(rows)

    # ---- for the lower tiers ----

    def is_resident(self, key: RowKey) -> bool:
        """Could a lookup lease this row?"""
        return self._rows.find(key) is not None

    def resident_slot(self, key: RowKey) -> Slot | None:
        """Return the slot of a row that a lookup could lease."""
        number = self._rows.find(key)
        return None if number is None else self._rows.slot(number)

    def hottest_half(self) -> list[tuple[RowKey, int, bytes]]:
        """Return keys, payload lengths and tenants of the rows that would be evicted last, the last first.

        These are half of the rows without a lease.
        """
        numbers = list(self._rows.policy.victims())
        hottest = reversed(numbers[len(numbers) // 2 :])
        return [(self._rows.key(row), self._table.length(row, 0), self._rows.tenant(row)) for row in hottest]

    def knows(self, key: RowKey) -> bool:
        """Is there a row of this key, in any state?"""
        return key in self._rows.row_by_key

    def is_being_written(self, key: RowKey) -> bool:
        """Has a column of this row a writer?"""
        number = self._rows.row_by_key.get(key)
        return number in self._rows.open_rows and bool(self._rows.open_rows[number].writers)

    @property
    def has_unverified(self) -> bool:
        """Are there adopted rows that lookups do not find until they are verified?"""
        return any(self._rows.unverified.tobytes())

    def unverified_slot(self, key: RowKey) -> Slot | None:
        """Return the slot of an adopted row that must be compared with its checksums before use."""
        number = self._rows.row_by_key.get(key)
        return None if number is None or not self._rows.unverified[number] else self._rows.slot(number)

    def note_verified(self, slot: Slot, *, is_intact: bool) -> None:
        """Apply the result of a verification: a row that is not intact is removed. The row must be pinned."""
        if is_intact:
            self._rows.mark_verified(slot.row)
            self.stats.verified += 1
        else:
            self._rows.unverified[slot.row] = 0
            self.stats.removed[Removal.INVALID] += 1
            self._table.forget_checksums(slot.row)  # so that the next restart does not adopt the row
            self._rows.invalidate(slot.row)

    def pin(self, slot: Slot) -> RowKey | None:
        """Protect a visible row against eviction while this process reads its bytes. Returns None if the row
        is gone."""
        if self.arena.is_lost or not self._rows.is_visible(slot):
            return None
        self._rows.pin(slot.row)
        return self._rows.key(slot.row)

    def unpin(self, slot: Slot) -> None:
        """End one ``pin``."""
        self._rows.unpin(slot.row)

    def payloads(self, slot: Slot) -> list[memoryview]:
        """Return the payloads of a row's columns, of the lengths in the slot table.

        Those of a lost arena may have other lengths."""
        _ = self.arena.is_lost  # makes the file long enough to read the table
        views = self.views(slot)
        return [view[: self._table.length(slot.row, column)] for column, view in enumerate(views)]

    def views(self, slot: Slot) -> list[memoryview]:
        """Return the memory of a row's columns: all of their slots."""
        num_bytes = self._rows.allocator.size(slot.row) * self._slot_bytes
        return [self.arena.view(slot.row, column, num_bytes) for column in range(self._table.num_columns)]

    def describe(self, slot: Slot) -> tuple[RowKey, int]:
        """Return a visible row's key and its position in its chain (0: the head, or unknown)."""
        return self._rows.key(slot.row), self._rows.depths[slot.row]

    def tenant(self, slot: Slot) -> bytes:
        """Return the tenant of a row that is visible or reserved. For other rows, any answer is possible."""
        return self._rows.tenant(slot.row)

    # ---- size and gauges ----

    @property
    def usable_slots(self) -> int:
        """Only rows below this slot are given out or leased. Default: the populated slots."""
        return self._rows.usable_slots

    @usable_slots.setter
    def usable_slots(self, number: int | None) -> None:
        self._rows.usable_slots = number

    def vacate(self, first_slot: int, num_enough: float = math.inf) -> VacateResult:
        """Stop using the slots from ``first_slot`` on, and evict up to ``num_enough`` unused rows there.

        Call it again for the rest. The slots stay out of use until ``usable_slots`` is set.
        """
        self.usable_slots = min(self.usable_slots, first_slot)
        return self._rows.vacate(first_slot, num_enough)

    @property
    def num_frames(self) -> int:
        """Number of rows of the largest size that the arena can hold."""
        return self._rows.allocator.num_frames

    @property
    def num_used(self) -> int:
        """Number of rows that are not free."""
        return self._rows.allocator.num_rows

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots of used rows, in all columns."""
        return self._rows.allocator.num_used_slots * self.bytes_per_slot

    @property
    def num_leased(self) -> int:
        """Number of rows under at least one lease, leases in quarantine included."""
        return len(self._rows.lease_counts)
