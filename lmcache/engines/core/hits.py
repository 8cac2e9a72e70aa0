"""What memory has of a request, by the index: where it can resume, and where its rows are. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from lmcache.engines.core.grid import Grid
from lmcache.kv_groups import first_needed_chunk, longest_hit
from lmcache.tiers.memory.contracts import Found, Located

T = TypeVar("T", bound=np.generic)

Words = npt.NDArray[np.uint64]
"""Row keys, ``[chunks, 8]``."""


class Index(Protocol):
    """What is in memory; ``MappedIndex`` is one."""

    def find(self, keys: Words) -> Found:
        """Find the leading ones of these rows."""

    def find_each(self, keys: Words) -> Located:
        """Say of each of these rows whether it is there, and where."""


class Hit(NamedTuple):
    """Rows of a request that are in memory."""

    num_chunks: int
    """Leading chunks at whose end the request can resume."""
    num_leading: int
    """Leading chunks of the groups that need all of them: a window may be missing there."""
    found: tuple[Found, ...]
    """Per group with rows, where at least the needed ones of ``num_chunks`` are."""


_NOWHERE = Found(np.empty(0, np.int64), np.empty(0, np.uint64))


def no_hit(grid: Grid) -> Hit:
    """Nothing is there."""
    return Hit(0, 0, (_NOWHERE,) * len(grid.stored))


def find_hit(index: Index, grid: Grid, words: Sequence[Words], at_least: int = 0) -> Hit:
    """Look for the chunks of ``words``, per group with rows; the engine itself has ``at_least`` of them."""
    found = [
        index.find(part) if group.is_full else _NOWHERE
        for group, part in zip(grid.stored, words, strict=True)
    ]
    lengths = [len(part.rows) for group, part in zip(grid.stored, found, strict=True) if group.is_full]
    num_leading = min(lengths, default=len(words[0]))
    found = [Found(part.rows[:num_leading], part.generations[:num_leading]) for part in found]
    windows = [number for number, group in enumerate(grid.stored) if not group.is_full]
    if not windows:
        return Hit(num_leading, num_leading, tuple(found))

    def resume_at(start: int) -> int:
        """Where a request can resume by the windows' rows from chunk ``start`` on."""
        residency = [b"\1" * num_leading] * len(grid.stored)
        for number in windows:
            is_there, rows, generations = index.find_each(words[number][start:num_leading])
            found[number] = Found(_behind(start, rows), _behind(start, generations))
            residency[number] = bytes(start) + is_there.tobytes()
        return longest_hit(grid.stored, grid.chunk_tokens, residency, at_least, num_leading)

    num_chunks = min(at_least, num_leading)
    if num_leading > at_least:  # mostly nothing is missing near the end
        near = (first_needed_chunk(grid.stored[number], num_leading, grid.chunk_tokens) for number in windows)
        num_chunks = resume_at(max(at_least, min(near)))
        if num_chunks < num_leading:
            num_chunks = resume_at(at_least)
    return Hit(num_chunks, num_leading if lengths else num_chunks, tuple(found))


def _behind(num_chunks: int, places: npt.NDArray[T]) -> npt.NDArray[T]:
    """Let places begin at a later chunk."""
    return np.concatenate((np.zeros(num_chunks, places.dtype), places))
