"""Which row goes when room is needed. Pure: a policy knows keys, not memory.

A policy holds the visible rows that nobody has leased: a leased row is removed from it and admitted again
afterwards, so that finding a victim never means skipping many rows in use. (The few that are being written
through stay.)

**Tails before heads.** A chunk is of no use without all chunks before it. So the keys of one request, which
come head first, are touched last to first: the head ends up as the most recently used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Protocol


class Policy(Protocol):
    """Order of eviction over rows, named by their number."""

    def admit(self, rows: Iterable[int]) -> None:
        """Rows of one request, head first, may be evicted from now on."""

    def touch(self, rows: Iterable[int]) -> None:
        """Rows of one request, head first, were used; those not held are ignored."""

    def remove(self, row: int) -> None:
        """The row is in use, or gone; ignored when not held."""

    def victims(self) -> Iterator[int]:
        """Rows in the order in which they should go; ends with the first change."""


class LRU:
    """Least recently used first; all operations O(1) per row."""

    def __init__(self) -> None:
        self._rows: OrderedDict[int, None] = OrderedDict()  # next victim first

    def admit(self, rows: Iterable[int]) -> None:
        """Admit as most recently used."""
        for row in reversed(tuple(rows)):
            self._rows[row] = None
            self._rows.move_to_end(row)

    def touch(self, rows: Iterable[int]) -> None:
        """Make the rows the most recently used, the head last."""
        for row in reversed(tuple(rows)):
            if row in self._rows:
                self._rows.move_to_end(row)

    def remove(self, row: int) -> None:
        """Forget the row."""
        self._rows.pop(row, None)

    def victims(self) -> Iterator[int]:
        """Yield the least recently used first."""
        return iter(self._rows)
