"""Which row goes when room is needed. Pure: a policy knows numbers of rows, not memory.

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


class Policy(Protocol):
    """Order of eviction over rows, named by their number. A row is in one group: that of its last use."""

    def admit(self, row: int, group: Hashable) -> None:
        """The row was stored: it is deeper in the group's chain than all that the group has."""

    def touch(self, rows: Sequence[int], group: Hashable) -> None:
        """The rows, head first, were used and may be evicted: they are the head of the group's chain."""

    def remove(self, row: int) -> None:
        """The row is in use, or gone; ignored when not held."""

    def victims(self) -> Iterator[int]:
        """Rows in the order in which they should go; ends with the first change."""


class LRU:
    """The group used least recently first, and of it the deepest row; all operations O(1) per row."""

    def __init__(self) -> None:
        self._groups: OrderedDict[Hashable, OrderedDict[int, None]] = OrderedDict()  # next victim's first
        self._group_of: dict[int, Hashable] = {}

    def admit(self, row: int, group: Hashable) -> None:
        """Append to the group, and make the group the youngest."""
        self._move(row, group)

    def touch(self, rows: Sequence[int], group: Hashable) -> None:
        """Put the rows in front of the group, and make the group the youngest."""
        for row in reversed(rows):
            self._move(row, group).move_to_end(row, last=False)

    def remove(self, row: int) -> None:
        """Forget the row."""
        if row in self._group_of:
            group = self._group_of.pop(row)
            del self._groups[group][row]
            if not self._groups[group]:
                del self._groups[group]

    def victims(self) -> Iterator[int]:
        """Yield the oldest group's rows, the last one first, then the next group's."""
        return (row for rows in self._groups.values() for row in reversed(rows))

    def _move(self, row: int, group: Hashable) -> OrderedDict[int, None]:
        self.remove(row)
        self._group_of[row] = group
        rows = self._groups.setdefault(group, OrderedDict())
        rows[row] = None
        self._groups.move_to_end(group)
        return rows
