"""Eviction order with hints, which are believed as far as they pay.

The order is compared with that of an LRU without hints. Four sets of rows are the difference:

- **Aside**: retained rows that an LRU would evict before the rows of the list. They are in the LRU, too.
- **Spared**: rows in memory that the LRU would have evicted. Either a hint retains them, or rows that a hint
  released were evicted in their place.
- **Ghosts**: names of rows that were evicted, and that the LRU would still have. They never have more slots
  than the spared rows.
- **Missed**: names of retained rows that were evicted nevertheless.

A hit of a spared row shows that hints pay, and so does a lookup of a missed row. A lookup of a ghost shows
what hints cost. The **belief** is the share of the hints' budget that is in use. It rises by what pays, and
falls by what costs. With wrong hints it falls to 0, and the order is that of the LRU.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Protocol

from lmcache_store.common.recent import Recent
from lmcache_store.tiers.memory.ghosts import Ghosts
from lmcache_store.tiers.memory.holds import LOWEST, Hold, Rank, compact
from lmcache_store.tiers.policy import AgedLRU, Links
from lmcache_store.tiers.stats import Account

_STEP = 8.0
"""Slots by which one slot of a hit or of a ghost changes the believed slots."""

_DOUBT = 0.125
"""Belief below which lookups of missed rows raise it. Above, only hits do: rows that these lookups need would
also cost hits."""

_MAX_ASIDE = 1024
"""Rows that one search for victims puts aside at most. This bounds its time."""

_MAX_SURPLUS = 8
"""Rows aside that a search for victims finds at most before those of the list."""

_MAX_MISSED = 1 << 16

_NAME_BYTES = slice(-8, None)
"""Part of a key that names an evicted row. Two keys agree in it once in 2**64."""


_Place = tuple[Rank, int]
"""Place of a row in the order of eviction: its rank, and the number of its last change."""


class HintedRows(Protocol):
    """Facts about rows that the eviction order needs."""

    def hold(self, row: int) -> Hold | None:
        """Return the hint that retains a row, or None."""

    def size(self, row: int) -> int:
        """Return the slots of a row."""

    def key(self, row: int) -> bytes:
        """Return the key of a row."""

    def limits(self, account: Account | None) -> tuple[int, int]:
        """Return how many slots of an account's rows hints may retain, and release early; None: of all."""

    @property
    def now(self) -> Callable[[], float]:
        """Return the time to which ends of holds refer, in seconds."""


class HintedLRU(AgedLRU):
    """An AgedLRU whose rows may be retained and released by hints. Without hints, it behaves like an LRU."""

    def __init__(
        self,
        num_rows: int,
        older: Links,
        newer: Links,
        end: int,
        ages: Links,
        rows: HintedRows,
        limits: Callable[[], tuple[int, int]],
        *,
        counts_uses: bool = False,
    ) -> None:
        """Create an empty list, see ``AgedLRU``.

        ``rows``: their holds, sizes and keys. ``limits`` returns the budgets, in slots: of rows aside that a
        hint retains, and of other rows aside. ``counts_uses``: nobody calls ``note_use``.
        """
        super().__init__(num_rows, older, newer, end, ages)
        self.belief = 1.0
        """Part of the hints' budget that is in use, from 0 to 1."""
        self.is_hinted = False
        """Were there hints? Uses before the first one have the number 0."""
        self._rows = rows
        self._limits = limits
        self._counts_uses, self._use = counts_uses, 0
        self._aside: dict[int, _Place] = {}  # and spared; they are not in the list
        self._queue: list[tuple[_Place, int]] = []  # the same, the next victim first; may have old entries
        self._number = 0
        self._expiries: list[tuple[float, int, int]] = []  # the same by the end of their hold, and number
        self._due: dict[int, int] = {}  # those that the LRU has, with the number of their last use
        self._retained_slots = self._other_slots = self._spared_slots = 0
        self._released: dict[int, None] = {}  # rows of the list to evict first, in this order
        self._ghosts = Ghosts()
        self._missed: Recent[bytes, tuple[int, float]] = Recent(_MAX_MISSED)  # slots, end of the hold

    @property
    def is_empty(self) -> bool:
        """Does the order hold no row?"""
        return not self._aside and super().is_empty

    @property
    def spared(self) -> list[int]:
        """Rows that an LRU would have evicted."""
        return [row for row in self._aside if row not in self._due]

    def admit(self, row: int, group: Hashable) -> None:
        """See LRU."""
        super().admit(row, group)
        if self.is_hinted:
            self._ghosts.take(self._rows.key(row)[_NAME_BYTES])
            self._count_use((row,), group)

    def touch(self, rows: Sequence[int], group: Hashable) -> None:
        """See LRU."""
        super().touch(rows, group)
        if self.is_hinted:
            self._count_use(rows, group)

    def begin_hints(self) -> None:
        """Compare the order with that of an LRU from now on."""
        self.is_hinted = True

    def release(self, rows: Iterable[int]) -> None:
        """Evict these rows first, in this order, until they are used. Ignores rows that are not here."""
        for row in rows:
            if row in self._aside:
                self._rank(row, LOWEST)
            elif self._is_listed(row):
                self._released[row] = None

    def note_retained(self, rows: Iterable[int]) -> None:
        """Note that these rows may have another hold now."""
        for row in rows:
            if row in self._aside:
                self._rank_by_hold(row)

    def note_hits(self, rows: Iterable[int]) -> None:
        """Note that a lookup found these rows, before it touches or leases them."""
        if self._aside:
            for row in self._aside.keys() & set(rows):
                if row not in self._due:
                    self._believe(self._rows.size(row))
                    if (hold := self._rows.hold(row)) is not None:
                        hold.num_saved += 1

    def note_misses(self, chains: Iterable[Sequence[bytes]], num_hit: int) -> None:
        """Note that a lookup of these chains found their first ``num_hit`` keys.

        The next keys would have been a hit as far as they are known here.
        """
        if not self._ghosts.num_slots and not self._missed:
            return
        for chain in chains:
            for position in range(num_hit, len(chain)):
                name = chain[position][_NAME_BYTES]
                num_missed, end = self._missed.pop(name, (0, 0.0))
                num_ghosts = self._ghosts.take(name)
                if not (num_missed or num_ghosts):
                    break
                pays = self.belief < _DOUBT and end > self._rows.now()
                self._believe((num_missed if pays else 0) - num_ghosts)

    def note_evicted(self, row: int) -> None:
        """Note that this row is about to be evicted, and take it out."""
        if not self.is_hinted:
            return
        name, num_slots = self._rows.key(row)[_NAME_BYTES], self._rows.size(row)
        if (hold := self._rows.hold(row)) is not None:
            hold.num_evicted += 1
            self._missed[name] = num_slots, hold.expires_at
        if row not in self._aside:
            self._ghosts.add(name, self._age(row), num_slots)
        elif row in self._due:
            self._ghosts.add(name, self._due[row], num_slots)
        self.remove(row)
        self._follow_lru()

    def remove(self, *rows: int) -> None:
        """See LRU."""
        super().remove(*rows)
        if self._aside or self._released:
            for row in rows:
                self._released.pop(row, None)
                if row in self._aside:
                    self._take_back(row)
            self._follow_lru()

    def victims(self, sparing: Hashable = None) -> Iterator[int]:
        """Yield rows in eviction order. What hints retain comes last, as far as they are believed."""
        return self._hinted_victims(sparing) if self.is_hinted else super().victims(sparing)

    def _hinted_victims(self, sparing: Hashable) -> Iterator[int]:
        self._put_aside()
        is_believed = self._other_slots < self.belief * self._limits()[1]
        released = self._released if is_believed else {}
        surplus, num_left = self._surplus(), self._num_left
        rest: list[tuple[Rank, int, int]] = []
        yield from released
        yield from surplus
        for row in super().victims(sparing):
            if row in released:
                continue
            hold = self._rows.hold(row)
            if hold is not None and (num_slots := self._rows.size(row)) <= num_left:
                num_left -= num_slots
                rest.append((hold.rank, self._number + len(rest) + 1, row))
            else:
                yield row
        rest += ((*place, row) for row, place in self._aside.items() if row not in surplus)
        yield from (row for *_, row in sorted(rest))

    def aged_victims(self, sparing: Hashable = None) -> Iterator[tuple[float, int]]:
        """Yield (number of the last use, row) in eviction order.

        The numbers are those of an LRU's victims. So hints change which rows of this list are evicted, but
        not how many.
        """
        if not self.is_hinted:
            return super().aged_victims(sparing)
        listed = (age for age, _ in super().aged_victims(sparing))
        first = min(next(iter(self._due.values()), math.inf), self._ghosts.oldest[0])
        ahead = itertools.repeat(first, len(self._due) + len(self._ghosts))
        ages = itertools.chain(heapq.merge(ahead, listed), itertools.repeat(math.inf))
        return zip(ages, self.victims(sparing), strict=False)

    def sections(self) -> Iterator[tuple[Hashable, list[int]]]:
        """Yield the groups in the order of their last use. Rows aside come first, each as a group."""
        yield from ((None, [row]) for row in self._aside)
        yield from super().sections()

    def aged_sections(self) -> Iterator[tuple[int, Hashable, list[int]]]:
        """Yield ``sections`` with the number of their last use."""
        yield from ((0, None, [row]) for row in self._aside)
        yield from super().aged_sections()

    def _count_use(self, rows: Sequence[int], group: Hashable) -> None:
        if self._counts_uses:
            self._use += 1
            self.note_use(rows, group, self._use)

    def _is_listed(self, row: int) -> bool:
        return self._newer[self._older[row + 1]] == row + 1

    def _age(self, row: int) -> int:
        group = self._ends.get(row + 1)
        return self._ages[row + 1] if group is None else group.age

    @property
    def _oldest(self) -> int | None:
        """Next victim of the list."""
        row = self._newer[self._end]
        return None if row == self._end else row - 1

    @property
    def _num_left(self) -> int:
        """Slots of retained rows that may still be put aside."""
        return math.floor(self.belief * self._limits()[0]) - self._retained_slots

    def _put_aside(self) -> None:
        """Put retained rows aside that are next in the list."""
        now = self._rows.now()
        while self._expiries and self._expiries[0][0] <= now:
            entry = heapq.heappop(self._expiries)
            if self._is_pending(entry):
                self._rank_by_hold(entry[2])
        for _ in range(_MAX_ASIDE):
            oldest = self._oldest
            hold = None if oldest is None else self._rows.hold(oldest)
            if oldest is None or hold is None or self._rows.size(oldest) > self._num_left:
                break
            self._due[oldest] = self._age(oldest)
            self._move_aside(oldest, hold.rank)
            self._await_end(oldest, hold)

    def _surplus(self) -> list[int]:
        """Return rows aside to be evicted before those of the list, the first victim first."""
        num_excess, oldest = -self._num_left, self._oldest
        has_room = oldest is None or self._rows.size(oldest) + num_excess <= 0
        waiting = None if oldest is None or has_room else self._rows.hold(oldest)
        rows, entries = list[int](), list[tuple[_Place, int]]()
        while self._queue and len(rows) < _MAX_SURPLUS:
            (rank, _), row = entry = self._queue[0]
            if self._is_aside(entry):
                is_replaced = waiting is not None and not rows and rank < waiting.rank
                if rank != LOWEST and num_excess <= 0 and not is_replaced:
                    break
                num_excess -= self._rows.size(row) if rank != LOWEST else 0
                rows.append(row)
                entries.append(entry)
            heapq.heappop(self._queue)
        for entry in entries:
            heapq.heappush(self._queue, entry)
        return rows

    def _follow_lru(self) -> None:
        """Evict rows from the LRU until it has as many slots as the rows here."""
        while self._ghosts.num_slots > self._spared_slots:
            ghost_age, name = self._ghosts.oldest
            due = next(iter(self._due), None)
            due_age = math.inf if due is None else self._due[due]
            listed = self._oldest
            listed_age = math.inf if listed is None else self._age(listed)
            if due is not None and due_age <= min(ghost_age, listed_age):
                del self._due[due]
                self._spared_slots += self._rows.size(due)
            elif listed is not None and listed_age < ghost_age:
                self._move_aside(listed, LOWEST)
                self._spared_slots += self._rows.size(listed)
            else:
                self._ghosts.take(name)

    def _move_aside(self, row: int, rank: Rank) -> None:
        super().remove(row)
        self._released.pop(row, None)
        self._place(row, rank)

    def _take_back(self, row: int) -> None:
        self._count(row, self._aside.pop(row)[0], -1)
        if self._due.pop(row, None) is None:
            self._spared_slots -= self._rows.size(row)

    def _rank(self, row: int, rank: Rank) -> None:
        self._count(row, self._aside[row][0], -1)
        self._place(row, rank)

    def _rank_by_hold(self, row: int) -> None:
        if (hold := self._rows.hold(row)) is None:
            self._rank(row, LOWEST)
        else:
            self._rank(row, hold.rank)
            self._await_end(row, hold)

    def _await_end(self, row: int, hold: Hold) -> None:
        heapq.heappush(self._expiries, (hold.expires_at, self._aside[row][1], row))
        compact(self._expiries, self._is_pending, len(self._aside))

    def _is_pending(self, entry: tuple[float, int, int]) -> bool:
        _, number, row = entry
        return row in self._aside and self._aside[row][1] == number

    def _place(self, row: int, rank: Rank) -> None:
        self._number += 1
        self._aside[row] = rank, self._number
        self._count(row, rank, 1)
        heapq.heappush(self._queue, (self._aside[row], row))
        compact(self._queue, self._is_aside, len(self._aside))

    def _is_aside(self, entry: tuple[_Place, int]) -> bool:
        place, row = entry
        return self._aside.get(row) == place

    def _count(self, row: int, rank: Rank, sign: int) -> None:
        num_slots = sign * self._rows.size(row)
        if rank == LOWEST:
            self._other_slots += num_slots
        else:
            self._retained_slots += num_slots

    def _believe(self, num_slots: int) -> None:
        """Believe hints more, or less if ``num_slots`` is negative."""
        change = _STEP * num_slots / max(1, self._limits()[0])
        self.belief = min(1.0, max(0.0, self.belief + change))
