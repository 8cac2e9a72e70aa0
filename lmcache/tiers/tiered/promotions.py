"""Rows on their way up: from lower tiers, or from before a restart, into what lookups can lease.

::

    miss -> probe every tier in turn -> load or recompute? -> reserve, load, commit -> next lookup hits

A lookup never waits for any of it. Each key is brought once at a time, however many wait for it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence

from lmcache.recent import Recent
from lmcache.tiers.base import RowKey
from lmcache.tiers.memory.contracts import Chains, Place, Slot
from lmcache.tiers.memory.tier import MemoryTier
from lmcache.tiers.tiered.checksums import Checksums
from lmcache.tiers.tiered.refresh import RefreshQueue
from lmcache.tiers.tiered.search import Search
from lmcache.tiers.tiered.tasks import Tasks
from lmcache.tiers.tiered.tier_worker import TierWorker

_ABSENT_SECONDS = 1.0
"""How long a key stays known as absent below: repeated lookups of one request must not probe again and
again."""

_MAX_ORIGINS = 1 << 14


class Promotions:
    """Belongs to the event loop. ``lower``: in the order in which they are asked, the fastest first."""

    def __init__(
        self,
        memory: MemoryTier,
        checksums: Checksums,
        refresh: RefreshQueue,
        lower: Sequence[TierWorker],
        tasks: Tasks,
        clock: Callable[[], float],
    ) -> None:
        self.origins: Recent[RowKey, str] = Recent(_MAX_ORIGINS)
        """Which tier brought a row."""
        self._memory = memory
        self._checksums = checksums
        self._refresh = refresh
        self._lower = lower
        self._tasks = tasks
        self._clock = clock
        self._pending: dict[RowKey, int] = {}  # being promoted or verified, or waiting for it: slots
        self._num_pending_slots = 0
        self._probing: set[RowKey] = set()  # names of probes under way
        # Keys known as absent, of all requests or ("") of one, until then.
        self._absent: OrderedDict[tuple[RowKey, str], float] = OrderedDict()

    def verify(self, chains: Chains, present: Sequence[bytes], request: str) -> Search:
        """Find the longest hit when all that is on its way to memory has come; start verifying what it needs.
        What lower tiers could add is for ``bring``.

        ``present``: what is there, by chain and chunk.
        """
        expected = [bytearray(part) for part in present]
        unverified: dict[Place, Slot] = {}
        for at, part in enumerate(expected):
            for chunk in range(part.find(0) % (len(part) + 1), len(part)):
                if not part[chunk]:
                    place = chunk, at
                    part[chunk] = self._is_coming(chains.key(place), place, unverified)
                    if chains.is_prefix and not part[chunk]:
                        break
        search = Search(chains, expected, lambda key: self._is_absent(key, request))
        if unverified:
            places = [place for place in chains.places(search.num_expected) if place in unverified]
            slots = {chains.key(place): unverified[place] for place in places}
            for key in slots:
                self._begin(key, 0)
            self._tasks.spawn(self._verify(slots))
        return search

    def bring(self, search: Search, request: str, chunk_seconds: float) -> bool:
        """Ask the lower tiers for more, unless that is of no use now. Return whether they are being asked.

        ``chunk_seconds``: what computing a chunk takes the engine, 0.0 when it is not known.
        """
        if not any(lower.is_healthy for lower in self._lower):
            return False
        name = search.next_key()
        if name is None or name in self._probing:
            return name is not None
        room = self._memory.usable_slots // 4 - self._num_pending_slots
        chunk_slots = sum(map(self._memory.num_slots, search.full_chunk_bytes))
        if room < max(1, chunk_slots):
            return False
        if chunk_slots:
            search.limit = min(search.limit, search.num_full + room // chunk_slots)
        self._probing.add(name)
        self._tasks.spawn(self._probe(search, name, request, chunk_seconds))
        return True

    def _is_coming(self, key: RowKey, place: Place, unverified: dict[Place, Slot]) -> bool:
        """Is it on its way, or here? Note what is only to be verified."""
        if key in self._pending:
            return True
        if not self._memory.knows(key):
            return False
        if (slot := self._memory.unverified(key)) is not None:
            unverified[place] = slot
            return True
        return self._memory.is_coming(key) or self._memory.is_resident(key)

    async def _verify(self, slots: Mapping[RowKey, Slot]) -> None:
        left = set(slots)
        try:
            for key, slot in slots.items():
                await self._checksums.verify(slot)
                left.remove(key)
                self._end(key)
        finally:  # after an error the rest is not on its way any more
            for key in left:
                self._end(key)

    async def _probe(self, search: Search, name: RowKey, request: str, chunk_seconds: float) -> None:
        """Ask one tier after the other for what those before it do not have."""
        scope = ""  # of what is found absent
        names = {name}
        tiers: list[int] = []  # whose rows are of use
        order = deque(range(len(self._lower)))
        try:
            while order:
                position = order.popleft()
                num_expected = search.num_expected
                num_chunks = await search.extend({at: self._lower[at] for at in (*tiers, position)}, position)
                found = search.found(num_chunks)
                if not self._is_worth(search, found, position, (num_chunks - num_expected) * chunk_seconds):
                    scope = request  # another request's engine may be slower
                    search.undo()
                    continue
                tiers.append(position)
                if search.has_found_more and not search.chains.is_prefix:
                    order.extend(other for other in tiers if other not in (position, *order))
                for place, source in found:
                    self._start(search, place, request, source)
                search.take(num_chunks)
                if (following := search.next_key()) is None:
                    return
                names.add(following)
                self._probing.add(following)
        finally:
            self._probing -= names
        for key in search.absent():
            self._note_absent(key, scope)
        if (following := search.next_key()) is not None:
            self._note_absent(following, scope)

    def _is_worth(
        self, search: Search, found: Sequence[tuple[Place, int]], position: int, recompute_seconds: float
    ) -> bool:
        """Is bringing what this tier has sooner done than computing the chunks that it adds?"""
        lower, groups = self._lower[position], search.chains.groups
        sizes = [groups[at].chunk_bytes for (_, at), source in found if source == position]
        is_worth = not sizes or lower.should_load(sum(sizes), recompute_seconds)
        if not is_worth:
            lower.stats.skipped_slower_than_recompute += len(sizes)
        return is_worth

    def _start(self, search: Search, place: Place, request: str, position: int) -> None:
        key, length = search.chains.key(place), search.chains.groups[place[1]].chunk_bytes
        if key not in self._pending and not self._memory.is_resident(key):
            self._begin(key, self._memory.num_slots(length))
            self._tasks.spawn(self._promote(key, length, request, search.chains.tenant, position))

    async def _promote(self, key: RowKey, length: int, request: str, tenant: bytes, position: int) -> None:
        """Bring a row from the tier that has it, or else from one after it."""
        try:
            for number, lower in enumerate(self._lower[position:], position):
                if (brought := await lower.bring(key, length, request, tenant)) is not None:
                    self._refresh.mark_fresh(brought.slot)
                    self.origins[key] = lower.name
                    for nearer in self._lower[:number]:
                        nearer.write(brought)
                    return
        finally:
            self._end(key)
        self._note_absent(key)

    def _begin(self, key: RowKey, num_slots: int) -> None:
        self._pending[key] = num_slots
        self._num_pending_slots += num_slots

    def _end(self, key: RowKey) -> None:
        self._num_pending_slots -= self._pending.pop(key)

    def _is_absent(self, key: RowKey, request: str) -> bool:
        now = self._clock()
        return any(self._absent.get((key, scope), 0.0) > now for scope in ("", request))

    def _note_absent(self, key: RowKey, request: str = "") -> None:
        now = self._clock()
        self._absent[key, request] = now + _ABSENT_SECONDS
        self._absent.move_to_end((key, request))
        while next(iter(self._absent.values())) <= now:
            self._absent.popitem(last=False)
