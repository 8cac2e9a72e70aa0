"""Where lower tiers have what a hit needs: which rows are to be brought, and how far the request gets by
them.

Full groups are extended by what follows their leading rows. Then a window settles where the hit ends: at the
last chunk whose window is whole. What a window needs lies elsewhere for each end, so the rows of the
likeliest end are asked for first, and then, where some are absent, those of ever more chunks before it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from lmcache.tiers.base import RowKey
from lmcache.tiers.memory.contracts import Chains, Place
from lmcache.tiers.tiered.tier_worker import TierWorker


class Search:
    """One request's rows. Tiers go by their positions, in the order in which they are asked."""

    def __init__(
        self, chains: Chains, present: Sequence[bytearray], is_absent: Callable[[RowKey], bool]
    ) -> None:
        """``present``: per chain a byte per chunk, not 0: in memory, or on its way there; ``is_absent``: is
        it known that no tier has a row?"""
        self.chains = chains
        self.limit = chains.num_chunks
        """Chunks from here on are not looked for."""
        self._present = present
        self._is_absent = is_absent
        self._full = [at for at, group in enumerate(chains.groups) if group.is_full]
        self._windows = [at for at, group in enumerate(chains.groups) if not group.is_full]
        self.num_full = self._num_leading()
        """Leading chunks of which full groups have all, by what was found, too."""
        self.num_expected = self.num_full
        if not chains.is_prefix:
            self.num_expected = chains.longest_hit(present, self.num_full)
        """The hit when all that is present, or was found, is there."""
        self._found: dict[Place, int] = {}  # by whom, of what is not yet to be brought
        self._before = self.num_full, self._found  # the last question
        self._asked: dict[Place, int] = {}  # of windows' rows: the last tier

    @property
    def full_chunk_bytes(self) -> list[int]:
        """Of a column of a chunk, in each full group."""
        return [self.chains.groups[at].chunk_bytes for at in self._full]

    def next_key(self) -> RowKey | None:
        """Name what a longer hit waits for; None: for what is known to be absent, or nothing."""
        num_leading = self._num_leading()
        if num_leading < self.limit:
            keys = [self.chains.keys[at][num_leading] for at in self._full]
            if not any(map(self._is_absent, keys)):
                return keys[0]
        if self.num_expected == num_leading:
            return None
        end = self._longest(self._possible(num_leading), num_leading)
        missing = [(chunk, at) for chunk, at in self.chains.places(end) if not self._present[at][chunk]]
        return self.chains.key(missing[-1]) if missing else None

    async def extend(self, tiers: Mapping[int, TierWorker], position: int) -> int:
        """Ask one of these tiers for more of the full groups, and all of them for the rows of windows. Return
        the chunks of the longest hit by what they have."""
        self._before = self.num_full, dict(self._found)
        chunks = range(self.num_full, self.limit)
        following = [
            (chunk, at) for chunk in chunks for at in self._full if not self._is_present((chunk, at))
        ]
        keys = list(
            itertools.takewhile(lambda key: not self._is_absent(key), map(self.chains.key, following))
        )
        if keys:
            num_found = await tiers[position].probe(keys)
            self._found |= dict.fromkeys(following[:num_found], position)
            self.num_full = following[num_found][0] if num_found < len(following) else self.limit
        return await self._settle(tiers) if self._windows else self.num_full

    @property
    def has_found_more(self) -> bool:
        """Did the last question find a row?"""
        return len(self._found) > len(self._before[1])

    def found(self, num_chunks: int) -> list[tuple[Place, int]]:
        """Rows to be brought for a hit of so many chunks, and the positions of the tiers that have them."""
        places = self.chains.places(num_chunks)
        return [(place, self._found[place]) for place in places if place in self._found]

    def take(self, num_chunks: int) -> None:
        """The rows for so many chunks are being brought."""
        self.num_expected = num_chunks
        for (chunk, at), _ in self.found(num_chunks):
            self._present[at][chunk] = 1
            del self._found[chunk, at]

    def undo(self) -> None:
        """What was found at last is of no use: go on as if it was not asked for."""
        self.num_full, self._found = self._before

    def absent(self) -> list[RowKey]:
        """Rows of windows that no tier has, of those that were asked for."""
        return [self.chains.key(place) for place in self._asked if not self._is_present(place)]

    async def _settle(self, tiers: Mapping[int, TierWorker]) -> int:
        possible = self._possible(self.num_full)
        num_more = 0
        while True:
            end = self._longest(possible, self.num_full)
            unknown = [place for place in self.chains.places(end) if not self._is_present(place)]
            if not unknown:
                return end
            first = unknown[0][0]
            before = ((chunk, at) for chunk in range(max(0, first - num_more), first) for at in self._windows)
            unknown += [(chunk, at) for chunk, at in before if possible[at][chunk]]
            num_more = 2 * num_more + 1
            for position, lower in sorted(tiers.items()):
                await self._ask(unknown, position, lower)
            for chunk, at in unknown:
                possible[at][chunk] = self._is_present((chunk, at))

    async def _ask(self, places: Sequence[Place], position: int, lower: TierWorker) -> None:
        asked = [place for place in places if self._asked.get(place, -1) < position]
        asked = [place for place in asked if not self._is_present(place)]
        there = await lower.find_each(list(map(self.chains.key, asked))) if asked else []
        self._asked |= dict.fromkeys(asked, position)
        self._found |= {place: position for place, is_there in zip(asked, there, strict=True) if is_there}

    def _num_leading(self) -> int:
        """Leading chunks of which full groups have all present."""
        holes = (self._present[at].find(0) for at in self._full)
        return min((hole for hole in holes if hole >= 0), default=self.chains.num_chunks)

    def _possible(self, num_chunks: int) -> dict[int, bytearray]:
        """A byte per chunk of every window's chain: as if all were there but for what is known to be
        absent."""
        chunks = range(num_chunks)
        return {
            at: bytearray(
                self._is_present((chunk, at)) or not self._is_absent(self.chains.keys[at][chunk])
                for chunk in chunks
            )
            for at in self._windows
        }

    def _longest(self, possible: Mapping[int, bytes | bytearray], num_chunks: int) -> int:
        """The longest hit of so many chunks, if that is what windows have."""
        there = b"\1" * num_chunks
        return self.chains.longest_hit(
            [possible.get(at, there) for at in range(len(self._present))], num_chunks
        )

    def _is_present(self, place: Place) -> bool:
        return bool(self._present[place[1]][place[0]]) or place in self._found
