"""Promotions: rows of lower tiers, and adopted rows, become rows that lookups can lease.

::

    miss -> probe every tier in turn -> load or recompute? -> reserve, load, commit -> next lookup hits

A lookup never waits for a promotion. At any time there is at most one promotion per key.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence

from lmcache.common.recent import Recent
from lmcache.tiers.base import RowKey
from lmcache.tiers.memory.contracts import Chains, Place, Slot
from lmcache.tiers.memory.tier import MemoryTier
from lmcache.tiers.tiered.absences import Absence, Absences
from lmcache.tiers.tiered.checksums import Checksums
from lmcache.tiers.tiered.history import ChunkHistory, chunk_names
from lmcache.tiers.tiered.refresh import RefreshQueue
from lmcache.tiers.tiered.search import Search
from lmcache.tiers.tiered.tasks import Tasks
from lmcache.tiers.tiered.tier_worker import TierWorker

_ABSENT_SECONDS = 1.0
"""Seconds for which a key counts as absent in the lower tiers. Repeated lookups of one request then do not
probe again."""

_MAX_ORIGINS = 1 << 14


class Promotions:
    """Belongs to the event loop. ``lower``: the tiers in lookup order, the fastest first."""

    def __init__(
        self,
        memory: MemoryTier,
        checksums: Checksums,
        refresh: RefreshQueue,
        lower: Sequence[TierWorker],
        absences: Absences,
        history: ChunkHistory,
        tasks: Tasks,
        clock: Callable[[], float],
    ) -> None:
        self.origins: Recent[RowKey, str] = Recent(_MAX_ORIGINS)
        """Name of the tier from which each row was promoted."""
        self._memory = memory
        self._checksums = checksums
        self._refresh = refresh
        self._lower = lower
        self._absences = absences
        self._history = history
        self._tasks = tasks
        self._clock = clock
        self._pending: dict[RowKey, int] = {}  # rows to be promoted or verified, and their slots
        self._num_pending_slots = 0
        self._probing: set[RowKey] = set()  # names of running probes
        # Until when a key counts as absent: for one request, or ("") for all.
        self._absent: OrderedDict[tuple[RowKey, str], float] = OrderedDict()

    def verify(self, chains: Chains, present: Sequence[bytes], request: str) -> Search:
        """Find the longest hit when all current promotions succeed, and start to verify its rows.

        Does not ask the lower tiers; see ``promote``.

        ``present``: one byte per chain and chunk; 0 means absent.
        """
        expected = [bytearray(part) for part in present]
        unverified: dict[Place, Slot] = {}
        for group, part in enumerate(expected):
            for chunk in range(part.find(0) % (len(part) + 1), len(part)):
                if not part[chunk]:
                    place = chunk, group
                    part[chunk] = self._is_expected(chains.key(place), place, unverified)
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

    def promote(self, search: Search, request: str, chunk_seconds: float) -> bool:
        """Ask the lower tiers for more rows if that can help now. Returns True while they are being asked.

        ``chunk_seconds``: time that the engine needs to compute a chunk; 0.0 if unknown.
        """
        if not any(lower.is_healthy for lower in self._lower):
            return False
        name = search.next_key()
        if name is None or name in self._probing:
            return name is not None
        num_left = self._memory.usable_slots // 4 - self._num_pending_slots
        chunk_slots = sum(map(self._memory.num_slots, search.full_chunk_bytes))
        if num_left < max(1, chunk_slots):
            self._absences.note(name, Absence.STORE_REFUSED)
            return False
        if chunk_slots:
            search.limit = min(search.limit, search.num_full + num_left // chunk_slots)
        self._probing.add(name)
        self._tasks.spawn(self._probe(search, name, request, chunk_seconds))
        return True

    def _is_expected(self, key: RowKey, place: Place, unverified: dict[Place, Slot]) -> bool:
        """Is the row in memory or being promoted? Adds a row that must be verified to ``unverified``."""
        if key in self._pending:
            return True
        if not self._memory.knows(key):
            return False
        if (slot := self._memory.unverified_slot(key)) is not None:
            unverified[place] = slot
            return True
        return self._memory.is_being_written(key) or self._memory.is_resident(key)

    def is_under_way(self, key: RowKey) -> bool:
        """Is the row being promoted or verified, or a lower tier being asked for it?"""
        return key in self._pending or key in self._probing

    async def _verify(self, slots: Mapping[RowKey, Slot]) -> None:
        left = set(slots)
        try:
            for key, slot in slots.items():
                if not await self._checksums.verify(slot):
                    self._absences.note(key, Absence.INVALID)
                left.remove(key)
                self._end(key)
        finally:  # after an error, the remaining rows are no longer pending
            for key in left:
                self._end(key)

    async def _probe(self, search: Search, name: RowKey, request: str, chunk_seconds: float) -> None:
        """Ask one tier after the other for rows that earlier tiers do not hold."""
        scope = ""  # requests for which absent keys are noted; "": all
        names = {name}
        tiers: list[int] = []  # tiers whose rows are worth loading
        order = deque(range(len(self._lower)))
        try:
            while order:
                position = order.popleft()
                num_expected = search.num_expected
                num_chunks = await search.extend({i: self._lower[i] for i in (*tiers, position)}, position)
                sources = search.sources(num_chunks)
                if sources:
                    found = {search.chains.key(place) for place, _ in sources}
                    found.update(search.chains.keys[0][num_expected:num_chunks])
                    self._history.note_found(chunk_names([*found]))
                if not self._is_worth(search, sources, position, (num_chunks - num_expected) * chunk_seconds):
                    scope = request  # another request's engine may be slower
                    search.undo()
                    continue
                tiers.append(position)
                if search.has_found_more and not search.chains.is_prefix:
                    order.extend(other for other in tiers if other not in (position, *order))
                for place, source in sources:
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
        self, search: Search, sources: Sequence[tuple[Place, int]], position: int, recompute_seconds: float
    ) -> bool:
        """Is loading this tier's rows faster than computing the chunks that they add?"""
        lower, groups = self._lower[position], search.chains.groups
        sizes = [groups[group].chunk_bytes for (_, group), source in sources if source == position]
        is_worth = not sizes or lower.should_load(sum(sizes), recompute_seconds)
        if not is_worth:
            lower.stats.skipped_slower_than_recompute += len(sizes)
            for place, source in sources:
                if source == position:
                    self._absences.note(search.chains.key(place), Absence.SLOWER)
        return is_worth

    def _start(self, search: Search, place: Place, request: str, position: int) -> None:
        key, length = search.chains.key(place), search.chains.groups[place[1]].chunk_bytes
        if key not in self._pending and not self._memory.is_resident(key):
            self._begin(key, self._memory.num_slots(length))
            self._tasks.spawn(self._promote(key, length, request, search.chains.tenant, position))

    async def _promote(self, key: RowKey, length: int, request: str, tenant: bytes, position: int) -> None:
        """Load a row from the tier that holds it, or else from a later tier."""
        try:
            for number, lower in enumerate(self._lower[position:], position):
                if (write := await lower.load(key, length, request, tenant)) is not None:
                    self._refresh.mark_fresh(write.slot)
                    self.origins[key] = lower.name
                    self._absences.forget(key)
                    for nearer in self._lower[:number]:
                        nearer.write(write)
                    return
        finally:
            self._end(key)
            num_invalid = sum(lower.take_invalid(key) for lower in self._lower)  # asks all of them
        if num_invalid:
            self._absences.note(key, Absence.INVALID)
        elif not all(lower.is_healthy for lower in self._lower):
            self._absences.note(key, Absence.UNAVAILABLE)
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
