"""Which row goes when room is needed. Pure: it knows numbers of rows, not memory.

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

from lmcache.tiers.pages import zeros

_MAX_GROUPS = 2048  # that are remembered by name: requests that are under way at the same time


class _Group:
    """A piece of the list: from its oldest row, the deepest, to its youngest, the head."""

    __slots__ = ("name", "oldest", "youngest")

    def __init__(self, name: Hashable, row: int) -> None:
        self.name = name
        self.oldest = self.youngest = row


class LRU:
    """The group used least recently first, and of it the deepest row; all operations O(1) per row.

    One doubly linked list of all rows, the next victim first; a group is a piece of it, and moves as a whole.
    Which piece belongs to whom is remembered of the last 2048 groups. A row costs 8 bytes, and only if it was
    ever held.

    A row is in one group: that of its last use; ``None`` is a group that nobody names again.
    """

    def __init__(self, num_rows: int) -> None:
        # Rows are shifted by one: 0 is the end of the list, and zeros are what untouched memory holds.
        self._older = zeros(num_rows + 1, "I")
        self._younger = zeros(num_rows + 1, "I")
        self._groups: OrderedDict[Hashable, _Group] = OrderedDict()
        self._ends: dict[int, _Group] = {}  # by their oldest and youngest rows

    def admit(self, row: int, group: Hashable) -> None:
        """The row was stored: put it before the group's oldest, since it is deeper in the chain than all that
        the group has, and make the group the youngest."""
        self.remove(row)
        row += 1
        known = self._recall(group)
        if known is None:
            self._insert(row, self._older[0])
            self._remember(group, row, row)
        else:
            self._insert(row, self._older[known.oldest])
            self._set_ends(known, row, known.youngest)

    def touch(self, rows: Sequence[int], group: Hashable) -> None:
        """The rows, head first, were used and may be evicted: put them in front of the group, and make it the
        youngest."""
        if not rows:
            return
        rows = list(dict.fromkeys(rows))
        self.remove(*rows)
        known = self._recall(group)
        older_of, younger_of = self._older, self._younger
        youngest = older_of[0]
        for number in reversed(rows):
            row = number + 1
            older_of[row], younger_of[youngest] = youngest, row
            youngest = row
        younger_of[youngest], older_of[0] = 0, youngest
        if known is None:
            self._remember(group, rows[-1] + 1, rows[0] + 1)
        else:
            self._set_ends(known, known.oldest, rows[0] + 1)

    def remove(self, *rows: int) -> None:
        """The rows are in use, or gone; ignored when not held."""
        older_of, younger_of, ends = self._older, self._younger, self._ends
        for number in rows:
            row = number + 1
            older, younger = older_of[row], younger_of[row]
            if younger_of[older] != row:
                continue
            younger_of[older], older_of[younger] = younger, older
            older_of[row] = younger_of[row] = 0
            group = ends.pop(row, None)
            if group is None:
                continue
            if group.oldest == group.youngest:
                del self._groups[group.name]
            elif row == group.oldest:
                group.oldest = younger
                ends[younger] = group
            else:
                group.youngest = older
                ends[older] = group

    def victims(self, sparing: Hashable = None) -> Iterator[int]:
        """Yield the oldest group's rows, the last one first, then the next group's, but for those of the
        group ``sparing``: a chunk that takes the place of one before it in its chain is of no use. Ends with
        the first change."""
        spared = self._groups.get(sparing)
        row = self._younger[0]
        while row:
            if spared and row == spared.oldest:
                row = spared.youngest
            else:
                yield row - 1
            row = self._younger[row]

    def _insert(self, row: int, older: int) -> None:
        younger = self._younger[older]
        self._older[row], self._younger[row] = older, younger
        self._younger[older] = self._older[younger] = row

    def _recall(self, name: Hashable) -> _Group | None:
        """Find a group, and make it the youngest."""
        group = self._groups.get(name)
        if group is None:
            return None
        self._groups.move_to_end(name)
        older, younger, youngest = self._older, self._younger, self._older[0]
        if youngest != group.youngest:
            before, after = older[group.oldest], younger[group.youngest]
            younger[before], older[after] = after, before
            younger[youngest], older[group.oldest] = group.oldest, youngest
            younger[group.youngest], older[0] = 0, group.youngest
        return group

    def _remember(self, name: Hashable, oldest: int, youngest: int) -> None:
        if name is None:
            return
        group = self._groups[name] = _Group(name, oldest)
        self._set_ends(group, oldest, youngest)
        if len(self._groups) > _MAX_GROUPS:
            _, forgotten = self._groups.popitem(last=False)
            for row in {forgotten.oldest, forgotten.youngest}:
                del self._ends[row]

    def _set_ends(self, group: _Group, oldest: int, youngest: int) -> None:
        self._ends.pop(group.oldest, None)
        self._ends.pop(group.youngest, None)
        group.oldest, group.youngest = oldest, youngest
        self._ends[oldest] = self._ends[youngest] = group
