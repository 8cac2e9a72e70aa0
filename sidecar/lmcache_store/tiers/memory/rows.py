"""Rows of the memory tier from reservation to eviction: free slots, leases, pins and budgets of tenants.

**Eviction** happens when a new row needs slots and none are free. Rows that were dropped after a restart go
first, then rows that stayed incomplete, then the victims of the policy. A long row may need the slots of
several neighbors. Among the next few victims, those go first whose neighbors are victims, too.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence

from lmcache_store.common.units import ceil_div
from lmcache_store.tiers.base import RowKey
from lmcache_store.tiers.budgets import Budgets
from lmcache_store.tiers.memory.allocator import EMPTY, GUARANTEED, SHARED
from lmcache_store.tiers.memory.contracts import Arena, OpenRow, Slot, VacateResult
from lmcache_store.tiers.memory.hinted_lru import HintedLRU
from lmcache_store.tiers.memory.quotas import TenantOrders, leading, whole_order
from lmcache_store.tiers.memory.row_hints import RowHints
from lmcache_store.tiers.memory.row_index import RowIndex
from lmcache_store.tiers.pages import zeros
from lmcache_store.tiers.stats import Account, MemoryStats, Removal, TenantUse, TenantUses

INCOMPLETE_SECONDS = 30.0
"""Ranks of one engine store a chunk within one step. After this time the missing columns are lost."""

_MAX_DEPTH = (1 << 32) - 1  # largest 32-bit number
_MAX_EVICTIONS = 64  # for one new row, and rows to look at (of each budget): bounds the time of one call


class MemoryRows(RowIndex):
    """Rows of one arena. ``stats``: counters to continue, if any. ``budgets``: see ``quotas``."""

    def __init__(
        self,
        arena: Arena,
        clock: Callable[[], float] = time.monotonic,
        slots_per_frame: int = 1,
        stats: MemoryStats | None = None,
        budgets: Budgets | None = None,
    ) -> None:
        super().__init__(arena, slots_per_frame)
        self.stats = stats or MemoryStats()
        self.stats.tenants = TenantUses(budgets)
        self._tenants: list[TenantUse] = []  # by row number, up to the largest number used
        self.hints = RowHints(self, self.stats, clock)
        self._make_policy(self.stats.tenants.budgets)
        self.pin_counts: dict[int, int] = {}  # row -> readers in this process; the row stays in the policy
        self.lease_counts: dict[int, int] = {}  # row -> leases; the row is not in the policy
        self._num_extra_leased = 0  # slots of leased rows beyond the first slot of each
        # An earlier process gave out all generations below, and the rows under them.
        self.next_generation = self.first_generation = arena.first_generation
        self.is_evicting = True  # False: when no slots are free, new rows are refused
        self.is_holding_adopted = False  # clients from before the restart may be reading adopted rows
        self._clock = clock
        self.depths = zeros(self.allocator.num_numbers, "I")  # position in the chain; 0: the head, or unknown
        self._incomplete: OrderedDict[int, float] = OrderedDict()  # row without a writer -> since when
        self.dropped: dict[int, None] = {}  # useless adopted rows: not free while adopted rows are held

    @property
    def num_leased_slots(self) -> int:
        """Number of slots in leased rows."""
        return len(self.lease_counts) + self._num_extra_leased

    def _num_extra(self, rows: Iterable[int]) -> int:
        return sum(self.allocator.size(row) - 1 for row in rows) if self.allocator.slots_per_frame > 1 else 0

    def set_budgets(self, budgets: Budgets) -> None:
        """Use other budgets from now on. Takes time in proportion to the rows; their order does not change.

        Rows above a new upper bound leave when their tenant stores other rows."""
        if self.stats.tenants.extend(budgets):
            return
        sections = list(self.policy.sections())
        self.stats.tenants.set_budgets(budgets)
        self._make_policy(budgets)
        for name, numbers in sections:
            self.policy.touch(numbers[::-1], name)

    def _make_policy(self, budgets: Budgets) -> None:
        rows = self.allocator.num_numbers, self.hints
        self._orders = TenantOrders(*rows, self._tenants) if budgets.has_limits else None
        self.policy: HintedLRU | TenantOrders = self._orders or whole_order(*rows)
        self.hints.note_order(self.policy)

    # ---- from reserved to visible ----

    def open_row(
        self, key: RowKey, num_slots: int, request: Hashable, *, depth: int = 0, tenant: bytes = b""
    ) -> OpenRow | None:
        """Take a row for the key, evicting other rows if necessary. None: no slots can be freed."""
        sparing = None if key in self.row_by_key else request  # the row it replaces frees its slots next
        fits = num_slots <= self.allocator.slots_per_frame and self._fits_quota(tenant, num_slots, sparing)
        number = self._allocate(num_slots, sparing, tenant) if fits else None
        if number is None:
            self.stats.refused += 1
            self.stats.tenant_counts.refused[self.stats.tenants.budgets.of(tenant).name] += 1
            return None
        row = self.open_rows[number] = OpenRow(key, Slot(number, self.next_generation), request)
        self.name(row.slot, key, tenant)
        self.next_generation += 1
        self.depths[number] = min(depth, _MAX_DEPTH)
        return row

    def name(self, slot: Slot, key: RowKey, tenant: bytes = b"") -> None:
        """Record key, generation and tenant of a row that was just allocated."""
        number, generation = slot
        use = self.stats.tenants.enter(tenant, self.allocator.size(number) * self._bytes_per_slot)
        if (missing := number + 1 - len(self._keys)) > 0:
            self._keys.extend(itertools.repeat(b"", missing))
            self._tenants.extend(itertools.repeat(use, missing))
        self._keys[number], self._generations[number] = key, generation
        self._tenants[number] = use

    def tenant(self, number: int) -> bytes:
        """Return the tenant of a row that was named."""
        return self._tenants[number].name

    def publish(self, row: OpenRow) -> None:
        """Make a row visible whose columns are all committed. It replaces the index entry of its key."""
        number = row.slot.row
        del self.open_rows[number]
        if self.row_by_key.get(row.key, number) != number:
            self.remove(row.key)
        self.row_by_key[row.key] = number
        self._publish_key(row.key, number)
        self.policy.admit(number, row.request)
        self.hints.note_published(number, row)

    def remove(self, key: RowKey) -> None:
        """Remove a visible row from the index; its slots are free when its last reader ends."""
        number = self.row_by_key[key]
        self.invalidate(number)
        self.release_if_unused(number)

    def invalidate(self, number: int) -> OpenRow:
        """Remove a row from the index for good. A later request for its key gets another row."""
        row = self.open_rows.setdefault(number, OpenRow(self._keys[number], self.slot(number)))
        self._unindex(row.key, number)
        self.policy.remove(number)
        row.is_invalid = True
        return row

    def release_if_unused(self, number: int) -> None:
        """Free an invalid row without users; note since when an incomplete row has no writer."""
        row = self.open_rows.get(number)
        if row is None or row.writers:
            return
        if not row.is_invalid:
            self._incomplete[number] = self._clock()
        elif number not in self.pin_counts and number not in self.lease_counts:
            if self.is_holding_adopted and row.slot.generation < self.first_generation:
                self.dropped[number] = None
            else:
                self._free(number)

    def write(self, row: OpenRow, column: int, owner: bytes, length: int) -> None:
        """Reserve one column of a row for a writer."""
        number, generation = row.slot
        fields = {"key": row.key, "owner": owner, "tenant": self.tenant(number)}
        self.table.reserve(number, column, **fields, length=length, generation=generation)
        row.writers[column] = owner
        self._incomplete.pop(number, None)

    # ---- use ----

    def lease(self, numbers: Collection[int]) -> None:
        """Protect visible rows against eviction; they leave the policy."""
        leases = self.lease_counts
        self.policy.remove(*numbers)
        self._num_extra_leased += self._num_extra(number for number in numbers if number not in leases)
        for number in numbers:
            leases[number] = leases.get(number, 0) + 1

    def end_lease(self, numbers: Iterable[int], request: Hashable) -> None:
        """End one lease on each of these rows, head first. Rows without another lease count as just used."""
        leases = self.lease_counts
        ended = []
        for number in numbers:
            num_leases = leases[number] - 1
            if num_leases:
                leases[number] = num_leases
            else:
                del leases[number]
                ended.append(number)
        self._num_extra_leased -= self._num_extra(ended)
        invalid = self.open_rows.keys() & ended
        for number in invalid:
            self.release_if_unused(number)
        self.policy.touch([number for number in ended if number not in invalid], request)

    def pin(self, number: int) -> None:
        """Protect a row against eviction while this process reads it."""
        self.pin_counts[number] = self.pin_counts.get(number, 0) + 1

    def unpin(self, number: int) -> None:
        """End one ``pin``. The row does not count as used: it keeps its place in the eviction order."""
        self.pin_counts[number] -= 1
        if not self.pin_counts[number]:
            del self.pin_counts[number]
            self.release_if_unused(number)

    # ---- capacity ----

    def vacate(self, first_slot: int, num_enough: float) -> VacateResult:
        """Evict up to ``num_enough`` unused rows from this slot on, and hide the used ones from readers."""
        num_evicted, blocked = 0, Counter[str]()
        frames = self.allocator.used_frames(ceil_div(first_slot, self.allocator.slots_per_frame))
        for frame in frames:
            if num_evicted >= num_enough:
                break
            for number in self.allocator.rows_in(frame):
                use = self._use(number)
                if use is None:
                    self._evict(number)
                    num_evicted += 1
                else:
                    blocked[use] += 1
                    if self._shared is not None:
                        self._shared.remove(self._keys[number], number)
                        self._hidden.add(number)
        return VacateResult(num_evicted, dict(blocked))

    def _use(self, number: int) -> str | None:
        """Return the use that protects a row against eviction, or None."""
        if number in self.lease_counts:
            return "leased"
        if number in self.pin_counts:
            return "pinned"
        writers = self.open_rows[number].writers if number in self.open_rows else {}
        if writers and None not in writers.values():
            return "reserved"
        return "quarantined" if writers or self.is_holding_adopted else None

    def _fits_quota(self, tenant: bytes, num_slots: int, sparing: Hashable) -> bool:
        """Evict rows of the tenant until ``num_slots`` more fit its upper bound. False: they do not fit."""
        if not tenant or self._orders is None:
            return True
        account = self.stats.tenants.account(tenant)
        if account.budget.memory_percent >= 100:
            return True
        is_alone = account.has_tenant_bounds
        num_bytes = self.stats.tenants.num_bytes(tenant) if is_alone else account.num_bytes
        num_present = num_bytes // self._bytes_per_slot
        excess = num_present + num_slots - self._share(account.budget.memory_percent)
        incomplete = (
            n
            for n in self._long_incomplete()
            if self._tenants[n].account is account and (not is_alone or self._tenants[n].name == tenant)
        )
        victims = itertools.chain(incomplete, self._orders.victims_of(tenant, account, sparing))
        idle = (n for n in itertools.islice(victims, _MAX_EVICTIONS) if self._use(n) is None)
        leaving = leading(idle, excess, self.allocator.size)
        is_enough = sum(map(self.allocator.size, leaving)) >= excess
        if (leaving and not self.is_evicting) or not (is_enough or excess > num_slots):
            return False
        for number in leaving:
            self._evict(number, Removal.QUOTA)
        return is_enough

    def _share(self, percent: int) -> int:
        """Return a percentage of the usable slots."""
        return self.usable_slots * percent // 100

    def _is_protected(self, account: Account) -> bool:
        """Does the account use at most its guaranteed share, so that only its stores evict its rows?"""
        guaranteed = self._share(account.budget.min_memory_percent)
        return account.num_bytes <= guaranteed * self._bytes_per_slot

    def _are_idle(self, numbers: Sequence[int]) -> bool:
        return not any(map(self._use, numbers))

    def _can_evict(self, numbers: Sequence[int], tenant: bytes) -> bool:
        """Can a store of this tenant evict all of these rows?"""
        if not self._are_idle(numbers):
            return False
        account, present = self.stats.tenants.account(tenant), dict[Account, int]()
        for number in numbers:
            other = self._tenants[number].account
            num_bytes = present.get(other, other.num_bytes)
            guaranteed = self._share(other.budget.min_memory_percent) * self._bytes_per_slot
            if other is not account and num_bytes <= guaranteed:
                return False
            present[other] = num_bytes - self.allocator.size(number) * self._bytes_per_slot
        return True

    def _victims(self, num_slots: int, sparing: Hashable, tenant: bytes) -> Iterator[int]:
        """Yield rows in the order in which a store of this tenant evicts them.

        Pinned and unusable rows are among them. So each budget has a limit that only its rows can fill."""
        if not self.is_evicting:
            return iter(())
        if self._orders is None:
            return itertools.islice(self.policy.victims(sparing), _MAX_EVICTIONS)
        account = self.stats.tenants.account(tenant)
        is_within_share = self._is_within_share(account, num_slots)
        return self._orders.victims_for(
            account, sparing, self._is_protected, _MAX_EVICTIONS, is_within_share=is_within_share
        )

    def _is_within_share(self, account: Account, num_slots: int) -> bool:
        """Is the tenant within its guaranteed share with ``num_slots`` more?"""
        num_present = account.num_bytes // self._bytes_per_slot
        return num_present + num_slots <= self._share(account.budget.min_memory_percent)

    def _long_incomplete(self) -> Iterator[int]:
        """Yield the oldest few rows whose missing columns are lost."""
        oldest, now = itertools.islice(self._incomplete.items(), _MAX_EVICTIONS), self._clock()
        return (n for n, _ in itertools.takewhile(lambda row: now - row[1] > INCOMPLETE_SECONDS, oldest))

    def _allocate(self, num_slots: int, sparing: Hashable, tenant: bytes) -> int | None:
        usable_frames = self._usable_frames
        preferred, second = self._kinds(tenant)
        for attempt in range(_MAX_EVICTIONS):
            number = self.allocator.allocate(num_slots, usable_frames, (preferred, EMPTY))
            if number is None and preferred == GUARANTEED and self._evict_frame(num_slots, sparing, tenant):
                continue
            # Holes in guaranteed frames come last, so that the next row of a guaranteed tenant fits there.
            if number is None and (attempt or preferred == GUARANTEED or self._has_spare_holes):
                number = self.allocator.allocate(num_slots, usable_frames, (second,))
            if number is not None:
                return number
            if self.is_holding_adopted or not self._evict_one(num_slots, sparing, tenant):
                break
        return self.allocator.allocate(num_slots, usable_frames, (second,))

    def _kinds(self, tenant: bytes) -> tuple[int, int]:
        """Return the kind of frames for rows of this tenant, and the kind for other rows."""
        budget = None if self._orders is None else self.stats.tenants.account(tenant).budget
        return (GUARANTEED, SHARED) if budget and budget.min_memory_percent else (SHARED, GUARANTEED)

    @property
    def _has_spare_holes(self) -> bool:
        """Have guaranteed frames more free slots than a frame for each guaranteed tenant?"""
        num_free = self.allocator.num_free_slots[GUARANTEED]
        if not num_free:
            return False
        num_tenants = sum(account.budget.min_memory_percent > 0 for account in self.stats.tenants.accounts)
        return num_free > num_tenants * self.allocator.slots_per_frame

    def _evict_frame(self, num_slots: int, sparing: Hashable, tenant: bytes) -> bool:
        """Evict all rows of a frame of other tenants, for a shorter row of a tenant within its share.

        Further short rows of the tenant will share this frame, and not one frame each with other tenants.
        Returns False if no frame can be evicted."""
        slots_per_frame = self.allocator.slots_per_frame
        account = self.stats.tenants.account(tenant)
        is_long = num_slots == slots_per_frame
        if is_long or self.is_holding_adopted or not self._is_within_share(account, num_slots):
            return False

        def can_evict(rows: Sequence[int]) -> bool:
            includes_account = any(self._tenants[row].account is account for row in rows)
            return not includes_account and self._can_evict(rows, tenant)

        victims = itertools.islice(self._usable(self._victims(num_slots, sparing, tenant)), _MAX_EVICTIONS)
        leaving = self.allocator.rows_to_evict(victims, slots_per_frame, can_evict, self.hints.is_retained)
        for number in leaving:
            self._evict(number)
        return bool(leaving)

    def _usable(self, rows: Iterable[int]) -> Iterator[int]:
        usable_frames = self._usable_frames
        return (number for number in rows if number % self.allocator.num_frames < usable_frames)

    def _evict_one(self, num_slots: int, sparing: Hashable, tenant: bytes) -> bool:
        """Free the slots of the most expendable row within the usable slots. False: no row can be evicted."""
        for number in self._usable(itertools.islice(self.dropped, _MAX_EVICTIONS)):
            self._free(number)
            return True
        for number in self._usable(self._long_incomplete()):
            self._evict(number)
            return True
        victims = self._usable(self._victims(num_slots, sparing, tenant))
        can_evict = self._are_idle if self._orders is None else lambda rows: self._can_evict(rows, tenant)
        leaving = self.allocator.rows_to_evict(victims, num_slots, can_evict, self.hints.is_retained)
        for number in leaving:
            self._evict(number)
        return bool(leaving)

    def _evict(self, number: int, reason: Removal = Removal.EVICTED) -> None:
        self.policy.note_evicted(number)
        self._unindex(self._keys[number], number)
        self.policy.remove(number)
        self._free(number)
        self.stats.removed[reason] += 1
        self.stats.tenant_counts.evicted[self._tenants[number].account.budget.name] += 1

    def _free(self, number: int) -> None:
        self.open_rows.pop(number, None)
        self._incomplete.pop(number, None)
        self.dropped.pop(number, None)
        self.unverified[number] = 0
        self._keys[number] = b""
        self.table.free(number)
        self.stats.tenants.leave(self._tenants[number], self.allocator.size(number) * self._bytes_per_slot)
        self.allocator.free(number)
