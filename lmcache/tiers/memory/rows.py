"""Which rows there are: index, free slots and eviction. Who uses them is the business of those above.

**What a row costs.** A plain row, complete and in nobody's hands, is an index entry and numbers: its length
stands in the slot table, its place in the order of eviction in the policy. Only a row that is being written,
or that is gone from the index while somebody still has it in reach, is an ``OpenRow``.

**The slot table is written and not believed.** Engines have it mapped, and one of them may write where it
must not: whose a row is, and under which generation, is read from this process's own memory.

**Eviction** happens when a row is needed and no slots are free: first rows dropped after a restart, then
incomplete ones, then what the policy says, with the neighbours that stand in the way of a longer row (of the
next few victims the one whose neighbours are next, too).
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence

from lmcache.tiers.base import RowKey
from lmcache.tiers.errors import ArenaError
from lmcache.tiers.memory.allocator import FrameAllocator
from lmcache.tiers.memory.contracts import Arena, OpenRow, Slot, VacateResult
from lmcache.tiers.memory.quotas import TenantOrders, leading
from lmcache.tiers.pages import zeros
from lmcache.tiers.policy import LRU
from lmcache.tiers.stats import MemoryStats, Removal, Tenants, TenantUse
from lmcache.units import ceil_div

# Ranks of one engine store a chunk within one step: by then missing columns will not come any more.
INCOMPLETE_SECONDS = 30.0
_MAX_DEPTH = (1 << 32) - 1  # that fits a number of 32 bits
_MAX_EVICTIONS = 64  # per row needed: bounds the time of one call


class Rows:
    """Rows of one arena; see the module. ``slots_per_frame``: slots of the longest row; ``stats``: to be gone
    on with; ``tenant_quota_percent``: see ``quotas``, 100 is none."""

    def __init__(
        self,
        arena: Arena,
        clock: Callable[[], float] = time.monotonic,
        slots_per_frame: int = 1,
        stats: MemoryStats | None = None,
        tenant_quota_percent: int = 100,
    ) -> None:
        self.stats = stats or MemoryStats()
        self.stats.tenants = Tenants()
        self.allocator = FrameAllocator(arena.num_rows, slots_per_frame)
        self._tenants: list[TenantUse] = []  # by row, as far as rows were ever taken
        num_numbers, self._quota_percent = self.allocator.num_numbers, tenant_quota_percent
        self._orders = TenantOrders(num_numbers, self._tenants) if tenant_quota_percent < 100 else None
        self.policy = self._orders or LRU(num_numbers)
        self.table = arena.table
        if arena.geometry is None:
            raise ArenaError("the arena is not formatted yet")
        self._bytes_per_slot = arena.geometry.slot_bytes * arena.geometry.num_columns
        self._shared = arena.shared_index
        if self._shared is not None:
            self._shared.clear()
        self._arena = arena
        self.row_by_key: dict[RowKey, int] = {}  # visible rows, and those that are being written under a key
        self.open_rows: dict[int, OpenRow] = {}
        self.pin_counts: dict[int, int] = {}  # row -> readers of our own; it stays in the policy
        self.lease_counts: dict[int, int] = {}  # row -> users; it is out of the policy
        self._num_more_leased = 0  # slots of those rows beyond the first of each
        # Generations below were given by an earlier process, and so were the rows under them.
        self.next_generation = self.first_generation = arena.first_generation
        self.is_evicting = True  # False: what is full refuses
        self.is_holding_adopted = False  # clients from before the restart may be reading adopted rows
        self._clock = clock
        self._keys: list[RowKey] = []  # by row, as far as rows were ever taken; not copies
        self._generations = zeros(self.allocator.num_numbers, "Q")
        self.depths = zeros(self.allocator.num_numbers, "I")  # position in its chain; 0: not known
        self.unverified = zeros(self.allocator.num_numbers, "B")  # 1: adopted, and not compared yet
        self._incomplete: OrderedDict[int, float] = OrderedDict()  # row nobody writes -> since when
        self.dropped: dict[int, None] = {}  # adopted rows of no use: not free while adopted rows are held
        self._limit: int | None = None
        self._hidden: set[int] = set()  # rows beyond it, as long as it holds

    @property
    def usable_slots(self) -> int:
        """Only rows below this slot are given out or leased: unless it was set, those that are populated."""
        return self._arena.ready_rows if self._limit is None else self._limit

    @usable_slots.setter
    def usable_slots(self, number: int | None) -> None:
        self._limit = number
        while number is None and self._hidden:
            row = self._hidden.pop()
            if self.is_visible(self.slot(row)):
                self.is_readable(row)

    @property
    def _usable_frames(self) -> int:
        return ceil_div(self.usable_slots, self.allocator.slots_per_frame)

    # ---- find ----

    def is_usable(self, row: int) -> bool:
        """Does it lie where rows may be used?"""
        return row % self.allocator.num_frames < self._usable_frames

    def find(self, key: RowKey) -> int | None:
        """Return the visible row of this key, if it may be read."""
        return next(iter(self.prefix((key,))), None)

    def prefix(self, keys: Iterable[RowKey]) -> list[int]:
        """Rows of the leading keys."""
        rows = []
        index, opened, unverified = self.row_by_key, self.open_rows, self.unverified
        num_frames, usable_frames = self.allocator.num_frames, self._usable_frames
        for key in keys:
            row = index.get(key)
            if row is None or row in opened or unverified[row] or row % num_frames >= usable_frames:
                break
            rows.append(row)
        return rows

    def each(self, keys: Iterable[RowKey]) -> list[int]:
        """Rows of these keys; -1: there is none."""
        index, opened, unverified = self.row_by_key, self.open_rows, self.unverified
        num_frames, usable_frames = self.allocator.num_frames, self._usable_frames
        return [
            row
            if (row := index.get(key, -1)) >= 0
            and row not in opened
            and not unverified[row]
            and row % num_frames < usable_frames
            else -1
            for key in keys
        ]

    @property
    def num_leased_slots(self) -> int:
        """Slots of the rows under a lease."""
        return len(self.lease_counts) + self._num_more_leased

    def _num_more(self, rows: Iterable[int]) -> int:
        return sum(self.allocator.size(row) - 1 for row in rows) if self.allocator.slots_per_frame > 1 else 0

    def key(self, row: int) -> RowKey:
        """Return the key of a row that is not free."""
        return self._keys[row]

    def slot(self, row: int) -> Slot:
        """Return the slot of a visible row."""
        return Slot(row, self._generations[row])

    def slots(self, rows: Sequence[int]) -> list[Slot]:
        """Return the slots of visible rows."""
        generations = self._generations
        return [Slot(row, generations[row]) for row in rows]

    def is_visible(self, slot: Slot) -> bool:
        """Is the slot a complete row of the index now?"""
        row, generation = slot
        return (
            row not in self.open_rows
            and self._generations[row] == generation
            and self.row_by_key.get(self._keys[row]) == row
        )

    def is_readable(self, number: int) -> bool:
        """Do readers find the visible row? It is shown to them again if it was not; False: somebody wrote
        over what the slot table says of it, and maybe over its bytes."""
        key, generation, table = self._keys[number], self._generations[number], self.table
        columns = range(table.num_columns)
        is_so = table.key(number) == key and all(table.is_committed(number, generation, at) for at in columns)
        if is_so and not self.unverified[number]:
            self._publish_key(key, number)
        return is_so

    # ---- from reserved to visible ----

    def open_row(
        self, key: RowKey, num_slots: int, request: Hashable, *, depth: int = 0, tenant: bytes = b""
    ) -> OpenRow | None:
        """Take a row for the key, evicting what has to go; None when nothing can."""
        sparing = None if key in self.row_by_key else request  # a predecessor frees its slots next
        may_be = num_slots <= self.allocator.slots_per_frame and self._fits_quota(tenant, num_slots, sparing)
        number = self._allocate(num_slots, sparing) if may_be else None
        if number is None:
            self.stats.refused += 1
            return None
        row = self.open_rows[number] = OpenRow(key, Slot(number, self.next_generation), request)
        self.name(row.slot, key, tenant)
        self.next_generation += 1
        self.depths[number] = min(depth, _MAX_DEPTH)
        return row

    def name(self, slot: Slot, key: RowKey, tenant: bytes = b"") -> None:
        """Note whose the slots of a row are from now on."""
        number, generation = slot
        use = self.stats.tenants.enter(tenant, self.allocator.size(number) * self._bytes_per_slot)
        if (missing := number + 1 - len(self._keys)) > 0:
            self._keys.extend(itertools.repeat(b"", missing))
            self._tenants.extend(itertools.repeat(use, missing))
        self._keys[number], self._generations[number] = key, generation
        self._tenants[number] = use

    def publish(self, row: OpenRow) -> None:
        """All columns are committed: the row takes the place of what the index has under its key."""
        number = row.slot.row
        del self.open_rows[number]
        if self.row_by_key.get(row.key, number) != number:
            self.remove(row.key)
        self.row_by_key[row.key] = number
        self._publish_key(row.key, number)
        self.policy.admit(number, row.request)

    def mark_verified(self, number: int) -> None:
        """An adopted row is intact."""
        self.unverified[number] = 0
        if self.is_visible(self.slot(number)):
            self._publish_key(self._keys[number], number)

    def remove(self, key: RowKey) -> None:
        """Take a visible row out; it is free when its last reader ends."""
        number = self.row_by_key[key]
        self.invalidate(number)
        self.release_if_unused(number)

    def invalidate(self, number: int) -> OpenRow:
        """Take the row out of the index: whoever asks for its key gets another one."""
        row = self.open_rows.setdefault(number, OpenRow(self._keys[number], self.slot(number)))
        self._unindex(row.key, number)
        self.policy.remove(number)
        row.is_invalid = True
        return row

    def release_if_unused(self, number: int) -> None:
        """Put a row where it belongs now that a use of it ended."""
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
        """Give one column of a row to a writer."""
        number, generation = row.slot
        self.table.reserve(number, column, key=row.key, owner=owner, length=length, generation=generation)
        row.writers[column] = owner
        self._incomplete.pop(number, None)

    # ---- use ----

    def lease(self, numbers: Collection[int]) -> None:
        """Keep visible rows from eviction, and out of the policy."""
        leases = self.lease_counts
        self.policy.remove(*numbers)
        self._num_more_leased += self._num_more(number for number in numbers if number not in leases)
        for number in numbers:
            leases[number] = leases.get(number, 0) + 1

    def end_lease(self, numbers: Iterable[int], request: Hashable) -> None:
        """End one lease on each of these rows, head first; those that nobody else leases were just used."""
        leases = self.lease_counts
        ended = []
        for number in numbers:
            users = leases[number] - 1
            if users:
                leases[number] = users
            else:
                del leases[number]
                ended.append(number)
        self._num_more_leased -= self._num_more(ended)
        invalid = self.open_rows.keys() & ended
        for number in invalid:
            self.release_if_unused(number)
        self.policy.touch([number for number in ended if number not in invalid], request)

    def pin(self, number: int) -> None:
        """Keep a row from eviction."""
        self.pin_counts[number] = self.pin_counts.get(number, 0) + 1

    def unpin(self, number: int) -> None:
        """End one ``pin``. Being read by us is not being used: the row keeps its place."""
        self.pin_counts[number] -= 1
        if not self.pin_counts[number]:
            del self.pin_counts[number]
            self.release_if_unused(number)

    # ---- capacity ----

    def vacate(self, first_slot: int, num_enough: float) -> VacateResult:
        """Evict the rows that lie beyond, as far as nobody uses them, until so many are evicted."""
        num_evicted, blocked = 0, Counter[str]()
        frames = self.allocator.used_frames(ceil_div(first_slot, self.allocator.slots_per_frame))
        for frame in frames:
            if num_evicted >= num_enough:
                break
            for number in self.allocator.rows_in(frame):
                user = self._user(number)
                if user is None:
                    self._evict(number)
                    num_evicted += 1
                else:
                    blocked[user] += 1
                    if self._shared is not None:
                        self._shared.remove(self._keys[number], number)
                        self._hidden.add(number)
        return VacateResult(num_evicted, dict(blocked))

    def _user(self, number: int) -> str | None:
        """Who keeps a row from being evicted?"""
        if number in self.lease_counts:
            return "leased"
        if number in self.pin_counts:
            return "pinned"
        writers = self.open_rows[number].writers if number in self.open_rows else {}
        if writers and None not in writers.values():
            return "reserved"
        return "quarantined" if writers or self.is_holding_adopted else None

    def _fits_quota(self, tenant: bytes, num_slots: int, sparing: Hashable) -> bool:
        """Evict rows of the tenant's own, if he needs that for so many slots more, or is over his share."""
        if not tenant or self._orders is None:
            return True
        has = self.stats.tenants.num_bytes(tenant) // self._bytes_per_slot
        excess = has + num_slots - self.usable_slots * self._quota_percent // 100
        incomplete = (n for n in self._long_incomplete() if self._tenants[n].name == tenant)
        victims = itertools.chain(incomplete, self._orders.victims_of(tenant, sparing))
        idle = (n for n in itertools.islice(victims, _MAX_EVICTIONS) if self._user(n) is None)
        leaving = leading(idle, excess, self.allocator.size)
        is_enough = sum(map(self.allocator.size, leaving)) >= excess
        if (leaving and not self.is_evicting) or not (is_enough or excess > num_slots):
            return False
        for number in leaving:
            self._evict(number, Removal.QUOTA)
        return is_enough

    def _long_incomplete(self) -> Iterator[int]:
        """Rows whose missing columns will not come any more; the oldest few."""
        few, now = itertools.islice(self._incomplete.items(), _MAX_EVICTIONS), self._clock()
        return (n for n, _ in itertools.takewhile(lambda row: now - row[1] > INCOMPLETE_SECONDS, few))

    def _allocate(self, num_slots: int, sparing: Hashable) -> int | None:
        usable_frames = self._usable_frames
        for _ in range(_MAX_EVICTIONS):
            number = self.allocator.allocate(num_slots, usable_frames)
            if number is not None:
                return number
            if self.is_holding_adopted or not self._evict_one(num_slots, sparing, usable_frames):
                break
        return None

    def _evict_one(self, num_slots: int, sparing: Hashable, usable_frames: int) -> bool:
        """Free the slots of one row, whichever can be spared most easily, of those that may be used again."""

        def first_usable(rows: Iterable[int]) -> Iterator[int]:
            few = itertools.islice(rows, _MAX_EVICTIONS)
            return (number for number in few if number % self.allocator.num_frames < usable_frames)

        for number in first_usable(self.dropped):
            self._free(number)
            return True
        for number in first_usable(self._long_incomplete()):
            self._evict(number)
            return True
        victims = first_usable(self.policy.victims(sparing) if self.is_evicting else ())
        leaving = self.allocator.leaving(victims, num_slots, self._user)
        for number in leaving:
            self._evict(number)
        return bool(leaving)

    def _evict(self, number: int, reason: Removal = Removal.EVICTED) -> None:
        self._unindex(self._keys[number], number)
        self.policy.remove(number)
        self._free(number)
        self.stats.removed[reason] += 1

    def _publish_key(self, key: RowKey, number: int) -> None:
        if self._shared is not None:
            self._shared.insert(key, number)

    def _unindex(self, key: RowKey, number: int) -> None:
        if self.row_by_key.get(key) == number:
            del self.row_by_key[key]
        if self._shared is not None:  # before the slot is free
            self._shared.remove(key, number)

    def _free(self, number: int) -> None:
        self.open_rows.pop(number, None)
        self._incomplete.pop(number, None)
        self.dropped.pop(number, None)
        self.unverified[number] = 0
        self._keys[number] = b""
        self.table.free(number)
        self.stats.tenants.leave(self._tenants[number], self.allocator.size(number) * self._bytes_per_slot)
        self.allocator.free(number)
