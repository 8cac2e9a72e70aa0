"""Finds a request's rows in the index of the memory tier, and where the request can resume. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from lmcache_client.core.grid import Grid
from lmcache_store.kv_groups import first_needed_chunk, longest_hit
from lmcache_store.tiers.base import KEY_BYTES, ROW_KEY_BYTES
from lmcache_store.tiers.memory.contracts import Found, Located, Slot

T = TypeVar("T", bound=np.generic)

KeyWords = npt.NDArray[np.uint64]
"""Row keys, ``[chunks, 8]``."""


class NamedRows(NamedTuple):
    """Rows by the keys of their chunks, and their places in the arena of part 0."""

    rows: npt.NDArray[np.int64]
    generations: npt.NDArray[np.uint64]
    namespace: bytes
    """Namespace of the keys, as part 0 has it."""
    chunk_keys: bytes
    """Keys of the chunks without the namespace, joined."""

    def part(self, chunks: slice) -> NamedRows:
        """Return the rows of these chunks."""
        chunk_keys = self.chunk_keys[chunks.start * KEY_BYTES : chunks.stop * KEY_BYTES]
        return NamedRows(self.rows[chunks], self.generations[chunks], self.namespace, chunk_keys)

    def slots(self) -> list[Slot]:
        """Return the places as slots of part 0."""
        return list(map(Slot, self.rows.tolist(), self.generations.tolist()))


Rows = Found | NamedRows
"""Places of the leading rows of a chain. Those in a message to several parts also have their names."""


class RowFinder(Protocol):
    """Index of the rows in memory, such as ``MappedIndex``."""

    def find(self, keys: KeyWords) -> Found:
        """Find the leading rows of these keys, up to the first row that is missing."""

    def find_each(self, keys: KeyWords) -> Located:
        """Return for each of these keys whether its row is in memory, and where."""


class Hit(NamedTuple):
    """Rows of a request that are in memory."""

    num_chunks: int
    """Number of leading chunks that can be loaded: the request can resume at their end."""
    num_leading: int
    """Number of leading chunks that all full-attention groups have. Windows may lack rows there."""
    found: tuple[Rows, ...]
    """Places of the rows that a load of ``num_chunks`` needs, and possibly of more; per group with rows."""


_WORD = np.dtype("<u8")
NOWHERE = Found(np.empty(0, np.int64), np.empty(0, np.uint64))
"""Places of no rows."""


def words_of(joined: bytes) -> KeyWords:
    """Return joined row keys as numbers."""
    return np.frombuffer(joined, _WORD).reshape(-1, ROW_KEY_BYTES // _WORD.itemsize)


def no_hit(grid: Grid) -> Hit:
    """Return a hit of no chunks."""
    return Hit(0, 0, (NOWHERE,) * len(grid.stored))


def find_chains(index: RowFinder, chains: Sequence[KeyWords]) -> list[Found]:
    """Find the leading rows of each chain. One search is much faster than one for each short chain."""
    is_there, rows, generations = index.find_each(np.concatenate((words_of(b""), *chains)))
    flags, end, found = is_there.tobytes(), 0, []
    for chain in chains:
        start, end = end, end + len(chain)
        missing = flags.find(b"\0", start, end)
        part = slice(start, end if missing < 0 else missing)
        found.append(Found(rows[part], generations[part]))
    return found


def find_hit(index: RowFinder, grid: Grid, words: Sequence[KeyWords], at_least: int = 0) -> Hit:
    """Find the longest hit of the chunks whose row keys are ``words``, per group with rows.

    ``at_least``: leading chunks that the engine itself has.
    """
    found = [
        index.find(part) if group.is_full else NOWHERE for group, part in zip(grid.stored, words, strict=True)
    ]
    lengths = [len(part.rows) for group, part in zip(grid.stored, found, strict=True) if group.is_full]
    num_leading = min(lengths, default=len(words[0]))
    found = [Found(part.rows[:num_leading], part.generations[:num_leading]) for part in found]
    windows = [number for number, group in enumerate(grid.stored) if not group.is_full]
    if not windows:
        return Hit(num_leading, num_leading, tuple(found))

    def resume_at(start: int) -> int:
        """Return the longest hit, given the windows' rows of chunk ``start`` and later."""
        residency = [b"\1" * num_leading] * len(grid.stored)
        for number in windows:
            is_there, rows, generations = index.find_each(words[number][start:num_leading])
            found[number] = Found(_behind(start, rows), _behind(start, generations))
            residency[number] = bytes(start) + is_there.tobytes()
        return longest_hit(grid.stored, grid.chunk_tokens, residency, at_least, num_leading)

    num_chunks = min(at_least, num_leading)
    if num_leading > at_least:  # usually no row near the end is missing
        near = (first_needed_chunk(grid.stored[number], num_leading, grid.chunk_tokens) for number in windows)
        num_chunks = resume_at(max(at_least, min(near)))
        if num_chunks < num_leading:
            num_chunks = resume_at(at_least)
    return Hit(num_chunks, num_leading if lengths else num_chunks, tuple(found))


def _behind(num_chunks: int, places: npt.NDArray[T]) -> npt.NDArray[T]:
    """Shift places by ``num_chunks`` chunks, filled with zeros."""
    return np.concatenate((np.zeros(num_chunks, places.dtype), places))
