"""Marks of documents that the engines of a namespace share. One event loop owns the tables.

A mark proposes to an engine that its prompt contains a document (docs/adr/0062). The sidecar does not
interpret marks: they are 64-bit numbers. Each mark has a sequence number, so that an engine receives each
mark once.
"""

from __future__ import annotations

import asyncio
import math
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from lmcache_client.rpc import service

MAX_NAMESPACES = 16
"""Namespaces with marks, of about 2 MiB each when full. The least recently used one is dropped first."""

Marks: TypeAlias = npt.NDArray[np.uint64]


class MarkScope(NamedTuple):
    """Engines that share marks."""

    namespace: bytes
    is_private: bool
    """True: the marks are of this pod's engines only, because no other engine can find their rows."""


class ScopeMarks:
    """The marks of one scope, the oldest first."""

    def __init__(self, first: int) -> None:
        """Create an empty table. ``first``: sequence number of its first mark."""
        self._first = first
        self._marks: Marks = np.empty(0, np.uint64)
        self._sorted = self._unsent = self._marks
        self.is_asked = False
        """Has an engine called since the last exchange with other pods?"""
        self.exchanged_at = 0.0
        """Unix time of the last exchange with other pods."""
        self.next_all = -math.inf
        """Monotonic time from which an exchange must read all marks."""

    def __len__(self) -> int:
        return len(self._marks)

    @property
    def end(self) -> int:
        """Sequence number of the next mark."""
        return self._first + len(self._marks)

    def add(self, marks: Marks) -> Marks:
        """Add marks, the oldest first. Returns the new ones.

        If there are more than MAX_MARKS then, the oldest eighth is dropped."""
        marks = marks[-service.MAX_MARKS :]
        new = marks[~_is_in(self._sorted, marks)]
        if len(new):
            new = new[np.sort(np.unique(new, return_index=True)[1])]
            self._marks = np.concatenate([self._marks, new])
            ordered = np.sort(new)
            self._sorted = np.insert(self._sorted, np.searchsorted(self._sorted, ordered), ordered)
        if len(self._marks) > service.MAX_MARKS:
            num_dropped = len(self._marks) - service.MAX_MARKS * 7 // 8
            self._marks = self._marks[num_dropped:]
            self._first += num_dropped
            self._sorted = np.sort(self._marks)
        return new

    def add_of_engine(self, marks: Marks) -> None:
        """Add marks of an engine of this pod. Other pods do not have the new ones yet."""
        self.unsend(self.add(marks))

    def since(self, number: int) -> tuple[Marks, int]:
        """Return the oldest marks with a sequence number above ``number``, and the last one's number.

        Returns at most MAX_MARKS_PER_CALL marks.
        """
        start = min(max(0, number + 1 - self._first), len(self._marks))
        page = self._marks[start : start + service.MAX_MARKS_PER_CALL]
        return page, self._first + start + len(page) - 1

    def take_unsent(self) -> Marks:
        """Return the marks that other pods do not have yet, and forget that they do not."""
        unsent, self._unsent = self._unsent, self._unsent[:0]
        return unsent

    def unsend(self, marks: Marks) -> None:
        """Note that other pods do not have these marks."""
        self._unsent = np.concatenate([self._unsent, marks])[-service.MAX_MARKS :]

    def unknown_to(self, marks: Marks) -> Marks:
        """Return the marks of this table that ``marks`` lacks, in ascending order."""
        return self._sorted[~_is_in(np.sort(marks), self._sorted)]


class MarkTables:
    """The tables of all scopes."""

    def __init__(self) -> None:
        self._tables: dict[MarkScope, ScopeMarks] = {}  # the least recently used first
        self.asked = asyncio.Event()
        """Set while ``take_asked`` would return a table."""
        self._next = 1  # sequence numbers are not used again: an engine may continue from a dropped table

    def __len__(self) -> int:
        return sum(map(len, self._tables.values()))

    def table(self, scope: MarkScope) -> ScopeMarks:
        """Return the table of a scope for a call of an engine; an empty one if the scope has none."""
        table = self._tables.pop(scope, None)
        if table is None:  # an empty one is kept: an exchange may be about to fill it
            table = ScopeMarks(self._next)
        self._tables[scope] = table
        if len(self._tables) > MAX_NAMESPACES:
            dropped = self._tables.pop(next(iter(self._tables)))
            self._next = max(self._next, dropped.end)
        if not scope.is_private:
            table.is_asked = True
            self.asked.set()
        return table

    def take_asked(self) -> list[tuple[bytes, ScopeMarks]]:
        """Return the tables that engines have used since the last call, except private ones."""
        self.asked.clear()
        asked = [(scope.namespace, table) for scope, table in self._tables.items() if table.is_asked]
        for _, table in asked:
            table.is_asked = False
        return asked


def _is_in(ordered: Marks, marks: Marks) -> npt.NDArray[np.bool_]:
    """Say of each mark whether it is one of ``ordered``, which ascend."""
    if not len(ordered):
        return np.zeros(len(marks), np.bool_)
    places = np.minimum(np.searchsorted(ordered, marks), len(ordered) - 1)
    is_in: npt.NDArray[np.bool_] = ordered[places] == marks
    return is_in
