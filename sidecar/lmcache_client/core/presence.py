"""Remembers which rows the other parts of an engine have (``parts``). Pure.

The parts evict rows at any time, so an entry may be wrong. A load of an evicted row fails, because each rank
proves its bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import and_

import numpy as np
from numpy.typing import NDArray

from lmcache_client.core.hits import KeyWords, NamedRows, RowFinder, Rows
from lmcache_store.common.recent import Recent
from lmcache_store.tiers.memory.contracts import Found, Located

MAX_ROWS = 1 << 18
"""Largest number of rows, which take about 35 MB."""

_NAMESPACE_WORDS = 4
"""Words of a row key that are its namespace."""


class Presence:
    """Rows and the parts that have them. A bit mask of parts has bit ``p`` for part ``p``."""

    def __init__(self, num_parts: int) -> None:
        self.all_parts = sum(1 << part for part in range(1, num_parts))
        """Bit mask of all parts but part 0, whose index shows its rows."""
        self._masks: Recent[int, int] = Recent(MAX_ROWS)  # short name of a row -> bit mask

    def __len__(self) -> int:
        return len(self._masks)

    def add(self, words: KeyWords) -> None:
        """Record that all parts have these rows."""
        for name in _names(words):
            self._masks[name] = self.all_parts

    def forget(self, words: KeyWords) -> None:
        """Record that it is unknown which parts have these rows."""
        for name in _names(words):
            self._masks.pop(name, None)

    def take(self, part: int, words: KeyWords, residency: bytes) -> None:
        """Record which of these rows a part has, as bits (``PartAnswer``)."""
        bit, flags = 1 << part, np.unpackbits(np.frombuffer(residency, np.uint8), count=len(words))
        for name, is_resident in zip(_names(words), flags.tolist(), strict=True):
            mask = self._masks.get(name, 0)
            if is_resident != bool(mask & bit):
                self._masks[name] = mask ^ bit

    def common(self, rows: Iterable[KeyWords]) -> int:
        """Return the bit mask of the parts that are known to have all of these rows."""
        masks: set[int | None] = set()
        for words in rows:
            masks.update(map(self._masks.get, _names(words)))
        return reduce(and_, (mask or 0 for mask in masks), self.all_parts)

    def are_everywhere(self, words: KeyWords) -> NDArray[np.bool_]:
        """Return for each row whether all parts are known to have it."""
        masks = map(self._masks.get, _names(words))
        return np.fromiter((mask == self.all_parts for mask in masks), np.bool_, len(words))


class JointIndex:
    """Index of the rows that all parts have, at their places in part 0."""

    def __init__(self, index: RowFinder, presence: Presence, num_held: int) -> None:
        """``num_held``: leading chunks that the engine itself has. The other parts need no rows of them."""
        self._index = index
        self._presence = presence
        self._num_held = num_held

    def find(self, keys: KeyWords) -> Found:
        """Find the leading rows, see ``RowFinder``."""
        found = self._index.find(keys)
        are_everywhere = self._presence.are_everywhere(keys[: len(found.rows)])
        are_everywhere[: self._num_held] = True
        return found if are_everywhere.all() else found.part(slice(int(are_everywhere.argmin())))

    def find_each(self, keys: KeyWords) -> Located:
        """Find each of these rows, see ``RowFinder``."""
        located = self._index.find_each(keys)
        return located._replace(is_there=located.is_there & self._presence.are_everywhere(keys))


def named(found: Rows, words: KeyWords, namespace: bytes) -> NamedRows:
    """Return rows with the keys of their chunks. ``words`` begins with these keys."""
    return NamedRows(found.rows, found.generations, namespace, chunk_keys(words[: len(found.rows)]))


def chunk_keys(words: KeyWords) -> bytes:
    """Return row keys without their namespace, joined."""
    return words[:, _NAMESPACE_WORDS:].tobytes()


def _names(words: KeyWords) -> list[int]:
    """Return short names of rows: a word of the namespace combined with one of the chunk key."""
    names: list[int] = (words[:, 0] ^ words[:, _NAMESPACE_WORDS]).tolist()
    return names
