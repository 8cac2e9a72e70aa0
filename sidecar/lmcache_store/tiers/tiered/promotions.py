"""Promotions: rows of lower tiers, and adopted rows, become rows that lookups can lease.

::

    miss -> probe every tier in turn -> load or recompute? -> reserve, load, commit -> next lookup hits

A lookup never waits for a promotion. At any time there is at most one promotion per key.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import NamedTuple

from lmcache_store.common.recent import Recent
from lmcache_store.tiers.base import RowKey
from lmcache_store.tiers.memory.contracts import Chains, Place, Slot
from lmcache_store.tiers.memory.tier import MemoryTier
from lmcache_store.tiers.tiered.absences import Absence, Absences
from lmcache_store.tiers.tiered.checksums import Checksums
from lmcache_store.tiers.tiered.history import ChunkHistory, chunk_names
from lmcache_store.tiers.tiered.refresh import RefreshQueue
from lmcache_store.tiers.tiered.search import Search
from lmcache_store.tiers.tiered.tasks import Tasks
from lmcache_store.tiers.tiered.tier_worker import TierWorker

_ABSENT_SECONDS = 1.0
"""Seconds for which a key counts as absent in the lower tiers. Repeated lookups of one request then do not
probe again."""

_ASK_AGAIN_SECONDS = 0.05
"""Seconds until lower tiers are asked again for a row that was handed over. They double with each question,
up to ``_ABSENT_SECONDS``. More questions would take the time that peers have for other requests."""

_MAX_ORIGINS = _MAX_ABSENT = _MAX_QUESTIONS = 1 << 14


class _Question(NamedTuple):
    """Question to all lower tiers for a row that was handed over. They did not have it."""

    delay: float
    """Seconds until the next question."""
    next_at: float


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
        self._pending: dict[RowKey, tuple[int, bytes]] = {}  # rows to be promoted or verified: slots, tenant
        self._verified: dict[RowKey, asyncio.Future[None]] = {}  # set when a pending row that is read is not
        self._num_pending_slots: Counter[bytes] = Counter()  # by tenant
        self._num_taken = 0  # rows that other pods offered
        self._probing: dict[RowKey, asyncio.Task[None]] = {}  # running probes by name
        # Until when a key counts as absent: for one request, or ("") for all.
        self._absent: Recent[tuple[RowKey, str], float] = Recent(_MAX_ABSENT)
        # Last question of a request for a row that was handed over and is absent.
        self._questions: Recent[tuple[RowKey, str], _Question] = Recent(_MAX_QUESTIONS)

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
        handed_over = {key for keys in chains.keys for key in keys[: chains.num_handed_over]}
        search = Search(chains, expected, lambda key: self._is_absent(key, request, handed_over))
        if unverified:
            places = [place for place in chains.places(search.num_expected) if place in unverified]
            self._start_verifying({chains.key(place): unverified[place] for place in places})
        return search

    async def verify_row(self, key: RowKey) -> None:
        """Verify an adopted row that another pod reads, or wait until it is verified."""
        slot = self._memory.unverified_slot(key)
        if slot is not None:
            if key not in self._pending:
                self._start_verifying({key: slot})
            await asyncio.wait([self._verified.setdefault(key, asyncio.get_running_loop().create_future())])

    def _start_verifying(self, slots: Mapping[RowKey, Slot]) -> None:
        for key in slots:
            self._begin(key, 0, b"")
        self._tasks.spawn(self._verify(slots))

    def promote(self, search: Search, request: str, chunk_seconds: float) -> bool:
        """Ask the lower tiers for more rows if that can help now.

        Returns True while they are being asked, or if a later lookup will ask again for handed-over rows.

        ``chunk_seconds``: time that the engine needs to compute a chunk; 0.0 if unknown.
        """
        if not any(lower.is_healthy for lower in self._lower):
            return False
        name = search.next_key()
        if name is None:
            return self._will_ask_again(search, request)
        if name in self._probing:
            return True
        chunk_slots = sum(map(self._memory.num_slots, search.full_chunk_bytes))
        num_left = self._num_left(search.chains.tenant, chunk_slots)
        if num_left < max(1, chunk_slots):
            self._absences.note(name, Absence.STORE_REFUSED)
            return False
        if chunk_slots:
            search.limit = min(search.limit, search.num_full + num_left // chunk_slots)
        self._probing[name] = self._tasks.spawn(self._probe(search, name, request, chunk_seconds))
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

    async def take_over(self, key: RowKey, length: int, tenant: bytes, source: TierWorker) -> None:
        """Promote a row that no request asks for, unless it is in memory or being promoted.

        Each row is an eviction group of its own, so that a later one does not make this row look used.
        """
        num_slots = self._memory.num_slots(length)
        if key in self._pending or self._memory.knows(key) or num_slots > self._num_left(tenant, num_slots):
            return
        self._begin(key, num_slots, tenant)
        self._num_taken += 1
        try:
            write = await source.load(key, length, f"taken over {self._num_taken}", tenant)
        finally:
            self._end(key)
        if write is not None:
            self._refresh.mark_fresh(write.slot)
            self.origins[key] = source.name
            self._absences.forget(key)

    def is_under_way(self, key: RowKey) -> bool:
        """Is the row being promoted or verified, or a lower tier being asked for it?"""
        return key in self._pending or key in self._probing

    def probes(self, chains: Chains, num_hit: int) -> set[asyncio.Task[None]]:
        """Return the running questions to lower tiers for chunks after the first ``num_hit``."""
        missing = (key for keys in chains.keys for key in keys[num_hit:]) if self._probing else ()
        return {self._probing[key] for key in missing if key in self._probing}

    @property
    def num_pending(self) -> int:
        """Number of rows that are being promoted or verified, plus those for which tiers are being asked."""
        return len(self._pending) + len(self._probing)

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
                self._probing[following] = self._probing[name]
        finally:
            for probed in names:
                self._probing.pop(probed, None)
        absent = search.absent()
        if (following := search.next_key()) is not None:
            absent.append(following)
        for key in absent:
            self._note_absent(key, scope)
            if search.chains.num_handed_over and not scope:
                self._note_question(key, request)

    def _is_worth(
        self, search: Search, sources: Sequence[tuple[Place, int]], position: int, recompute_seconds: float
    ) -> bool:
        """Is loading this tier's rows faster than computing the chunks that they add?"""
        lower, groups = self._lower[position], search.chains.groups
        places = [place for place, source in sources if source == position]
        keys = list(map(search.chains.key, places))
        num_bytes = sum(groups[group].chunk_bytes for _, group in places)
        is_worth = not keys or lower.should_load(keys, num_bytes, recompute_seconds)
        if not is_worth:
            lower.stats.skipped_slower_than_recompute += len(keys)
            for key in keys:
                self._absences.note(key, Absence.SLOWER)
        return is_worth

    def _start(self, search: Search, place: Place, request: str, position: int) -> None:
        key, length = search.chains.key(place), search.chains.groups[place[1]].chunk_bytes
        if key not in self._pending and not self._memory.is_resident(key):
            self._begin(key, self._memory.num_slots(length), search.chains.tenant)
            self._tasks.spawn(self._promote(key, length, request, search.chains.tenant, position))

    async def _promote(self, key: RowKey, length: int, request: str, tenant: bytes, position: int) -> None:
        """Load a row from the tier that holds it, or else from a later tier."""
        refuse = partial(self._absences.note, key, Absence.STORE_REFUSED)
        try:
            for number, lower in enumerate(self._lower[position:], position):
                if (write := await lower.load(key, length, request, tenant, refuse)) is not None:
                    self._refresh.mark_fresh(write.slot)
                    self.origins[key] = lower.name
                    self._absences.forget(key)
                    for nearer in self._lower[:number]:
                        if nearer.takes_writes:
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
        self._note_question(key, request)

    def _num_left(self, tenant: bytes, chunk_slots: int) -> int:
        """Return how many slots more the tenant may promote at once. ``chunk_slots``: slots of a chunk.

        All promotions take at most a quarter of the usable slots. If other tenants take that quarter, a
        tenant may still use a sixteenth, within an eighth for all such tenants. In a small tier, these parts
        are too small for a chunk. The quarter and the sixteenth then have one chunk, and the eighth has two.
        """
        total, usable = self._num_pending_slots.total(), self._memory.usable_slots
        quarter = max(usable // 4, chunk_slots)
        num_reserved = max(usable // 16, chunk_slots) - self._num_pending_slots[tenant]
        num_extra = min(num_reserved, max(usable * 3 // 8, quarter + 2 * chunk_slots) - total)
        return min(max(quarter - total, num_extra), usable - total)

    def _begin(self, key: RowKey, num_slots: int, tenant: bytes) -> None:
        self._pending[key] = num_slots, tenant
        self._num_pending_slots[tenant] += num_slots

    def _end(self, key: RowKey) -> None:
        num_slots, tenant = self._pending.pop(key)
        if verified := self._verified.pop(key, None):
            verified.set_result(None)
        self._num_pending_slots[tenant] -= num_slots
        if not self._num_pending_slots[tenant]:
            del self._num_pending_slots[tenant]

    def _is_absent(self, key: RowKey, request: str, handed_over: Set[RowKey]) -> bool:
        """Is it known that the request cannot get this row from a lower tier?

        A row that was handed over may appear at any time. If tiers did not have it, it is absent only until
        this request asks again.
        """
        if key not in handed_over:
            return self._is_noted(key, "") or self._is_noted(key, request)
        return self._is_noted(key, request) or self._is_asked_later(key, request)

    def _is_noted(self, key: RowKey, scope: str) -> bool:
        return self._absent.get((key, scope), 0.0) > self._clock()

    def _is_asked_later(self, key: RowKey, request: str) -> bool:
        question = self._questions.get((key, request))
        return question is not None and question.next_at > self._clock()

    def _will_ask_again(self, search: Search, request: str) -> bool:
        """Will a later lookup of the request ask for rows that were handed over and are absent now?"""
        num_handed_over = search.chains.num_handed_over
        return search.num_expected < num_handed_over and any(
            self._is_asked_later(key, request)
            and not (self._is_noted(key, request) or self._memory.is_resident(key))
            for keys in search.chains.keys
            for key in keys[:num_handed_over]
        )

    def _note_question(self, key: RowKey, request: str) -> None:
        last = self._questions.get((key, request))
        delay = min(2 * last.delay, _ABSENT_SECONDS) if last is not None else _ASK_AGAIN_SECONDS
        self._questions[key, request] = _Question(delay, self._clock() + delay)

    def _note_absent(self, key: RowKey, request: str = "") -> None:
        self._absent[key, request] = self._clock() + _ABSENT_SECONDS
