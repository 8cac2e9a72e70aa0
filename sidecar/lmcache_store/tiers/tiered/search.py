"""Search in the lower tiers for the rows of one request: which rows to promote, and how long a hit they make.

A **row** is one chunk of one KV group. To **promote** a row is to load it from a lower tier into memory. A
**chain** is the rows of one group for the leading chunks of the request. A ``Place`` is (chunk, group).

1. A **full group** (full attention) needs all rows of the hit. Memory holds the first rows of its chain. The
   search asks the tiers for the rows that follow.
2. A **window group** (sliding window, chunked attention or state) needs only the rows before the end of the
   hit. The hit therefore ends at the last chunk before which these rows are complete. Each possible end needs
   other rows. The search asks for the rows of the longest possible hit first. If some are absent, it asks for
   the rows of more and more chunks before that end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from lmcache_store.tiers.base import RowKey
from lmcache_store.tiers.memory.contracts import Chains, Place
from lmcache_store.tiers.tiered.tier_worker import TierWorker


class Search:
    """Search for the rows of one request. A tier is identified by its position in the lookup order.

    The caller asks the tiers with ``extend``, one after the other. After each answer it calls ``take`` to
    promote the rows, or ``undo`` if loading them is not worth the time.
    """

    def __init__(
        self, chains: Chains, present: Sequence[bytearray], is_absent: Callable[[RowKey], bool]
    ) -> None:
        """``present``: one byte per chain and chunk, not 0 if the row is in memory or being promoted.
        ``is_absent``: is it known that no tier holds a row?"""
        self.chains = chains
        self.limit = chains.num_chunks
        """Upper bound of the chunks to search for."""
        self._present = present
        self._is_absent = is_absent
        self._full = [i for i, group in enumerate(chains.groups) if group.is_full]
        self._windows = [i for i, group in enumerate(chains.groups) if not group.is_full]
        self.num_full = self._num_leading()
        """Leading chunks that all full groups have, including rows found in lower tiers."""
        self.num_expected = self.num_full
        """Length of the hit in chunks, once all rows are in memory that are present or being promoted."""
        if not chains.is_prefix:
            self.num_expected = chains.longest_hit(present, self.num_full)
        self._sources: dict[Place, int] = {}  # rows found but not yet promoted -> position of their tier
        self._before = self.num_full, self._sources  # state before the last call of extend
        self._asked: dict[Place, int] = {}  # rows of window groups, and the last tier that was asked for them

    @property
    def full_chunk_bytes(self) -> list[int]:
        """Bytes of one column of a chunk, for each full group."""
        return [self.chains.groups[group].chunk_bytes for group in self._full]

    def next_key(self) -> RowKey | None:
        """Return the key of a row that would make the hit longer. None: such rows are known to be absent."""
        num_leading = self._num_leading()
        if num_leading < self.limit:
            keys = [self.chains.keys[group][num_leading] for group in self._full]
            if not any(map(self._is_absent, keys)):
                return keys[0]
        if self.num_expected == num_leading:
            return None
        end = self._longest(self._possible(num_leading), num_leading)
        missing = [place for place in self.chains.places(end) if not self._present[place[1]][place[0]]]
        return self.chains.key(missing[-1]) if missing else None

    async def extend(self, tiers: Mapping[int, TierWorker], position: int) -> int:
        """Ask one of these tiers for more rows of full groups, and all of them for rows of window groups.

        Returns the length of the longest hit with the rows found, in chunks."""
        self._before = self.num_full, dict(self._sources)
        chunks = range(self.num_full, self.limit)
        following = [
            (chunk, group) for chunk in chunks for group in self._full if not self._is_present((chunk, group))
        ]
        keys = list(
            itertools.takewhile(lambda key: not self._is_absent(key), map(self.chains.key, following))
        )
        if keys:
            num_found = await tiers[position].probe(keys, self.chains.tenant)
            self._sources |= dict.fromkeys(following[:num_found], position)
            self.num_full = following[num_found][0] if num_found < len(following) else self.limit
        return await self._settle(tiers) if self._windows else self.num_full

    @property
    def has_found_more(self) -> bool:
        """Did the last call of ``extend`` find a row?"""
        return len(self._sources) > len(self._before[1])

    def sources(self, num_chunks: int) -> list[tuple[Place, int]]:
        """Return the rows to promote for a hit of ``num_chunks``, and the positions of their tiers."""
        places = self.chains.places(num_chunks)
        return [(place, self._sources[place]) for place in places if place in self._sources]

    def take(self, num_chunks: int) -> None:
        """Note that the rows for a hit of ``num_chunks`` are being promoted."""
        self.num_expected = num_chunks
        for (chunk, group), _ in self.sources(num_chunks):
            self._present[group][chunk] = 1
            del self._sources[chunk, group]

    def undo(self) -> None:
        """Discard the rows that the last call of ``extend`` found: they are not worth loading."""
        self.num_full, self._sources = self._before

    def absent(self) -> list[RowKey]:
        """Return the keys of requested rows of window groups that no tier holds."""
        return [self.chains.key(place) for place in self._asked if not self._is_present(place)]

    async def _settle(self, tiers: Mapping[int, TierWorker]) -> int:
        """Ask for rows of window groups until the end of the hit is certain. Returns the hit's length.

        Each round assumes that rows of unknown state exist, and asks for those of the longest hit. If some
        are absent, the next round asks for those of the next shorter hit and, ahead of time, for rows before
        them.
        """
        possible = self._possible(self.num_full)
        num_more = 0
        while True:
            end = self._longest(possible, self.num_full)
            unknown = [place for place in self.chains.places(end) if not self._is_present(place)]
            if not unknown:
                return end
            first = unknown[0][0]
            before = itertools.product(range(max(0, first - num_more), first), self._windows)
            unknown += [(chunk, group) for chunk, group in before if possible[group][chunk]]
            num_more = 2 * num_more + 1
            for position, lower in sorted(tiers.items()):
                await self._ask(unknown, position, lower)
            for chunk, group in unknown:
                possible[group][chunk] = self._is_present((chunk, group))

    async def _ask(self, places: Sequence[Place], position: int, lower: TierWorker) -> None:
        asked = [place for place in places if self._asked.get(place, -1) < position]
        asked = [place for place in asked if not self._is_present(place)]
        keys = list(map(self.chains.key, asked))
        answers = await lower.look(keys, self.chains.tenant) if asked else None
        self._asked |= dict.fromkeys(asked, position)
        self._sources |= dict.fromkeys(itertools.compress(asked, answers or ()), position)

    def _num_leading(self) -> int:
        """Return the number of leading chunks that are present in all full groups."""
        holes = (self._present[group].find(0) for group in self._full)
        return min((hole for hole in holes if hole >= 0), default=self.chains.num_chunks)

    def _possible(self, num_chunks: int) -> dict[int, bytearray]:
        """Return one byte per chunk for each window group: 1 unless the row is known to be absent."""
        chunks = range(num_chunks)
        return {
            group: bytearray(
                self._is_present((chunk, group)) or not self._is_absent(self.chains.keys[group][chunk])
                for chunk in chunks
            )
            for group in self._windows
        }

    def _longest(self, possible: Mapping[int, bytes | bytearray], num_chunks: int) -> int:
        """Return the longest hit within ``num_chunks`` chunks if window groups have these rows."""
        all_present = b"\1" * num_chunks
        return self.chains.longest_hit(
            [possible.get(group, all_present) for group in range(len(self._present))], num_chunks
        )

    def _is_present(self, place: Place) -> bool:
        return bool(self._present[place[1]][place[0]]) or place in self._sources
