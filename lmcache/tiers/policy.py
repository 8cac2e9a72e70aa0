"""Which row goes when a row is needed. Pure: it knows numbers of rows, not memory.

A policy holds the visible rows that nobody has leased: a leased row is removed from it and comes back when
its last lease ends, so that finding a victim never means skipping many rows in use. (The few that are being
written through stay.)

**Tails before heads.** A chunk is of no use without all chunks before it, and the chunks of a long prompt are
stored over many steps of the engine. So rows are held in groups, one per request: what goes first is the last
row of the group that was used least recently.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol

from lmcache.tiers.pages import zeros

_MAX_GROUPS = 2048  # that are remembered by name: requests that are under way at the same time


class Links(Protocol):
    """Numbers by number."""

    def __getitem__(self, at: int, /) -> int: ...
    def __setitem__(self, at: int, number: int, /) -> None: ...


class _Group:
    """A piece of the list: from its oldest row, the deepest, to its newest, the head."""

    __slots__ = ("name", "newest", "oldest")

    def __init__(self, name: Hashable, row: int) -> None:
        self.name = name
        self.oldest = self.newest = row


class LRU:
    """The group used least recently first, and of it the deepest row; all operations O(1) per row.

    One doubly linked list of all rows, the next victim first; a group is a piece of it, and moves as a whole.
    Which piece belongs to whom is remembered of the last 2048 groups. A row costs 8 bytes, and only if it was
    ever held.

    A row is in one group: that of its last use; ``None`` is a group that nobody names again.
    """

    def __init__(self, num_rows: int, older: Links | None = None, newer: Links | None = None) -> None:
        """``older`` and ``newer``: where numbers up to ``num_rows`` are kept, 0 at first."""
        # Rows are shifted by one: 0 is the end of the list, and zeros are what untouched memory holds.
        self._older = zeros(num_rows + 1, "I") if older is None else older
        self._newer = zeros(num_rows + 1, "I") if newer is None else newer
        self._groups: OrderedDict[Hashable, _Group] = OrderedDict()
        self._ends: dict[int, _Group] = {}  # by their oldest and newest rows

    def admit(self, row: int, group: Hashable) -> None:
        """The row was stored: put it before the group's oldest, since it is deeper in the chain than all that
        the group has, and make the group the newest."""
        self.remove(row)
        row += 1
        known = self._recall(group)
        if known is None:
            self._insert(row, self._older[0])
            self._remember(group, row, row)
        else:
            self._insert(row, self._older[known.oldest])
            self._set_ends(known, row, known.newest)

    def touch(self, rows: Sequence[int], group: Hashable) -> None:
        """The rows, head first, were used and may be evicted: put them in front of the group, and make it the
        newest."""
        if not rows:
            return
        rows = list(dict.fromkeys(rows))
        self.remove(*rows)
        known = self._recall(group)
        older_of, newer_of = self._older, self._newer
        newest = older_of[0]
        for number in reversed(rows):
            row = number + 1
            older_of[row], newer_of[newest] = newest, row
            newest = row
        newer_of[newest], older_of[0] = 0, newest
        if known is None:
            self._remember(group, rows[-1] + 1, rows[0] + 1)
        else:
            self._set_ends(known, known.oldest, rows[0] + 1)

    def remove(self, *rows: int) -> None:
        """The rows are in use, or gone; ignored when not held."""
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
        """Yield the oldest group's rows, the last one first, then the next group's, but for those of the
        group ``sparing``: a chunk that takes the place of one before it in its chain is of no use. Ends with
        the first change."""
        spared = self._groups.get(sparing)
        row = self._newer[0]
        while row:
            if spared and row == spared.oldest:
                row = spared.newest
            else:
                yield row - 1
            row = self._newer[row]

    def _insert(self, row: int, older: int) -> None:
        newer = self._newer[older]
        self._older[row], self._newer[row] = older, newer
        self._newer[older] = self._older[newer] = row

    def _recall(self, name: Hashable) -> _Group | None:
        """Find a group, and make it the newest."""
        group = self._groups.get(name)
        if group is None:
            return None
        self._groups.move_to_end(name)
        older, newer, newest = self._older, self._newer, self._older[0]
        if newest != group.newest:
            before, after = older[group.oldest], newer[group.newest]
            newer[before], older[after] = after, before
            newer[newest], older[group.oldest] = group.oldest, newest
            newer[group.newest], older[0] = 0, group.newest
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
