"""Eviction order: which row to evict next. Pure: it handles row numbers, not memory.

A policy holds the visible rows that have no lease. A row that gets a lease leaves the policy, and returns
when its last lease ends, so the search for a victim never has to skip many rows in use. Rows that are being
written through stay in the policy, because they are few.

**Tails before heads.** A chunk is useless without all chunks before it, and the engine stores the chunks of a
long prompt over many steps. The policy therefore keeps rows in groups, one per request. The first victim is
the last row of the least recently used group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol

from lmcache_store.tiers.pages import zeros

_MAX_GROUPS = 2048  # groups remembered by name: concurrent requests


class Links(Protocol):
    """Row numbers by row number."""

    def __getitem__(self, row: int, /) -> int: ...
    def __setitem__(self, row: int, number: int, /) -> None: ...


class _Group:
    """A section of the list, from its oldest row (the deepest) to its newest row (the head)."""

    __slots__ = ("age", "name", "newest", "oldest")

    def __init__(self, name: Hashable, row: int) -> None:
        self.name = name
        self.oldest = self.newest = row
        self.age = 0  # number of the last use, see AgedLRU


class LRU:
    """Least recently used groups first, and within a group the deepest row. All operations are O(1) per row.

    One doubly linked list holds all rows, the next victim first. A group is a section of it that moves as a
    whole. The policy remembers the sections of the latest 2048 groups. A row takes 8 bytes, once it was held.

    A row is in one group: the group of its last use. ``None`` is a new group that no later call can name.
    """

    def __init__(
        self, num_rows: int, older: Links | None = None, newer: Links | None = None, end: int = 0
    ) -> None:
        """``older`` and ``newer``: storage for the links of rows up to ``num_rows``, initially 0.

        Several lists may share the storage if no row is in two of them. ``end`` is then a number above those
        of all rows (``num_rows + 1`` or more), which is the end of this list alone.
        """
        # Rows are shifted by one, so that 0 is the end of the list: untouched memory holds zeros.
        self._older = zeros(num_rows + 1, "I") if older is None else older
        self._newer = zeros(num_rows + 1, "I") if newer is None else newer
        self._end = self._older[end] = self._newer[end] = end
        self._groups: OrderedDict[Hashable, _Group] = OrderedDict()
        self._ends: dict[int, _Group] = {}  # groups by their oldest and newest rows

    def admit(self, row: int, group: Hashable) -> None:
        """Add a row that was stored. The row becomes the oldest of its group, because it is deeper in the
        chain than the group's other rows. The group becomes the newest."""
        self.remove(row)
        row += 1
        known = self._recall(group)
        if known is None:
            self._insert(row, self._older[self._end])
            self._remember(group, row, row)
        else:
            self._insert(row, self._older[known.oldest])
            self._set_ends(known, row, known.newest)

    def touch(self, rows: Sequence[int], group: Hashable) -> None:
        """Add used rows, head first. They become the newest rows of the group, and the group becomes
        the newest."""
        if not rows:
            return
        rows = list(dict.fromkeys(rows))
        self.remove(*rows)
        known = self._recall(group)
        older_of, newer_of, end = self._older, self._newer, self._end
        newest = older_of[end]
        for number in reversed(rows):
            row = number + 1
            older_of[row], newer_of[newest] = newest, row
            newest = row
        newer_of[newest], older_of[end] = end, newest
        if known is None:
            self._remember(group, rows[-1] + 1, rows[0] + 1)
        else:
            self._set_ends(known, known.oldest, rows[0] + 1)

    def remove(self, *rows: int) -> None:
        """Remove rows that are in use, or were freed. Rows that the policy does not hold are ignored."""
        older_of, newer_of, ends = self._older, self._newer, self._ends
        for number in rows:
            row = number + 1
            older, newer = older_of[row], newer_of[row]
            if newer_of[older] != row:
                continue
            newer_of[older], older_of[newer] = newer, older
            older_of[row] = newer_of[row] = 0
            group = ends.pop(row, None)
            if group is None:
                continue
            if group.oldest == group.newest:
                del self._groups[group.name]
            elif row == group.oldest:
                group.oldest = newer
                ends[newer] = group
            else:
                group.newest = older
                ends[older] = group

    def victims(self, sparing: Hashable = None) -> Iterator[int]:
        """Yield rows in eviction order: the oldest group first, and of each group the deepest row first.

        Skips the group ``sparing``: a chunk that replaces an earlier chunk of its own chain is useless. The
        iterator is valid until the next change."""
        spared = self._groups.get(sparing)
        row, end = self._newer[self._end], self._end
        while row != end:
            if spared and row == spared.oldest:
                row = spared.newest
            else:
                yield row - 1
            row = self._newer[row]

    def sections(self) -> Iterator[tuple[Hashable, list[int]]]:
        """Yield the groups in eviction order, each with its rows. Rows without a group have the name None."""
        name: Hashable = None
        rows: list[int] = []
        newest = 0  # last row of the group that is being collected; 0: none
        for row in LRU.victims(self):
            if not newest and (group := self._ends.get(row + 1)) is not None:
                name, newest = group.name, group.newest
            rows.append(row)
            if newest in (0, row + 1):
                yield name, rows
                name, rows, newest = None, [], 0

    def _insert(self, row: int, older: int) -> None:
        newer = self._newer[older]
        self._older[row], self._newer[row] = older, newer
        self._newer[older] = self._older[newer] = row

    def _recall(self, name: Hashable) -> _Group | None:
        """Return a group, and make it the newest."""
        group = self._groups.get(name)
        if group is None:
            return None
        self._groups.move_to_end(name)
        older, newer, newest = self._older, self._newer, self._older[self._end]
        if newest != group.newest:
            before, after = older[group.oldest], newer[group.newest]
            newer[before], older[after] = after, before
            newer[newest], older[group.oldest] = group.oldest, newest
            newer[group.newest], older[self._end] = self._end, group.newest
        return group

    def _remember(self, name: Hashable, oldest: int, newest: int) -> None:
        if name is None:
            return
        group = self._groups[name] = _Group(name, oldest)
        self._set_ends(group, oldest, newest)
        if len(self._groups) > _MAX_GROUPS:
            _, forgotten = self._groups.popitem(last=False)
            for row in {forgotten.oldest, forgotten.newest}:
                del self._ends[row]

    def _set_ends(self, group: _Group, oldest: int, newest: int) -> None:
        self._ends.pop(group.oldest, None)
        self._ends.pop(group.newest, None)
        group.oldest, group.newest = oldest, newest
        self._ends[oldest] = self._ends[newest] = group


class AgedLRU(LRU):
    """An LRU whose victims can be compared with those of other lists, by the number of their last use.

    A row of a group that the policy has forgotten counts as used when that row itself was used.
    """

    def __init__(self, num_rows: int, older: Links, newer: Links, end: int, ages: Links) -> None:
        """``ages``: number of the last use of each row; lists that share their links share it, too."""
        super().__init__(num_rows, older, newer, end)
        self._ages = ages

    @property
    def is_empty(self) -> bool:
        """Does the list hold no row?"""
        return self._newer[self._end] == self._end

    def note_use(self, rows: Sequence[int], group: Hashable, age: int) -> None:
        """Record the number of this use, after ``admit`` or ``touch``. Numbers rise over all lists."""
        for row in rows:
            self._ages[row + 1] = age
        if (known := self._groups.get(group)) is not None:
            known.age = age

    def aged_victims(self, sparing: Hashable = None) -> Iterator[tuple[float, int]]:
        """Yield (number of the last use, row) in eviction order; see ``victims``."""
        group: _Group | None = None
        for row in LRU.victims(self, sparing):
            group = group or self._ends.get(row + 1)
            yield (self._ages[row + 1] if group is None else group.age), row
            if group is not None and group.newest == row + 1:
                group = None

    def aged_sections(self) -> Iterator[tuple[int, Hashable, list[int]]]:
        """Yield ``sections`` with the number of their last use."""
        for name, rows in self.sections():
            known = self._groups.get(name)
            yield (self._ages[rows[-1] + 1] if known is None else known.age), name, rows
