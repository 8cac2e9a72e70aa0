"""Rows on their way up: from lower tiers, or from before a restart, into what lookups can lease.

::

    miss -> probe every tier in turn -> load or recompute? -> reserve, load, commit -> next lookup hits

A lookup never waits for any of it. Each key is brought once at a time, however many wait for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from lmcache.tiers.base import RowKey
from lmcache.tiers.memory.contracts import Slot
from lmcache.tiers.memory.tier import MemoryTier
from lmcache.tiers.tiered.checksums import Checksums
from lmcache.tiers.tiered.refresh import RefreshQueue
from lmcache.tiers.tiered.tasks import Tasks
from lmcache.tiers.tiered.tier_worker import TierWorker

_ABSENT_SECONDS = 1.0
"""How long a key stays known as absent below: repeated lookups of one request must not probe again and
again."""


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
        self._memory = memory
        self._checksums = checksums
        self._refresh = refresh
        self._lower = lower
        self._tasks = tasks
        self._clock = clock
        self._pending: set[RowKey] = set()  # being promoted or verified, or waiting for it
        self._probing: set[RowKey] = set()  # first keys of probes under way
        # Keys known as absent, of all requests or ("") of one, until then.
        self._absent: OrderedDict[tuple[RowKey, str], float] = OrderedDict()

    def verify(self, keys: Sequence[RowKey]) -> int:
        """Return how many leading keys are here or on their way; start verifying those that need it."""
        to_verify = []
        num_leading = 0
        for key in keys:
            if key not in self._pending:
                if (slot := self._memory.unverified(key)) is not None:
                    to_verify.append((key, slot))
                elif not (self._memory.is_coming(key) or self._memory.is_resident(key)):
                    break
            num_leading += 1
        if to_verify:
            self._pending.update(key for key, _ in to_verify)
            self._tasks.spawn(self._verify(to_verify))
        return num_leading

    def bring(self, keys: Sequence[RowKey], length: int, request: str, row_seconds: float) -> bool:
        """Ask the lower tiers for these keys, unless that is of no use now. Return whether they are being
        asked.

        ``length``: payload bytes of a column of each row; ``row_seconds``: what computing a row takes the
        engine, 0.0 when it is not known.
        """
        if not keys or not any(lower.is_healthy for lower in self._lower):
            return False
        if keys[0] in self._probing:
            return True
        room = self._memory.usable_slots // 4 - len(self._pending)
        if room <= 0 or self._is_absent(keys[0], request):
            return False
        self._probing.add(keys[0])
        self._tasks.spawn(self._probe(keys[:room], length, request, row_seconds))
        return True

    async def _verify(self, rows: Sequence[tuple[RowKey, Slot]]) -> None:
        left = dict(rows)
        try:
            for key, slot in rows:
                await self._checksums.verify(slot)
                del left[key]
                self._pending.discard(key)
        finally:  # after an error the rest is not on its way any more
            self._pending.difference_update(left)

    async def _probe(self, keys: Sequence[RowKey], length: int, request: str, row_seconds: float) -> None:
        """Ask one tier after the other for what those before it do not have."""
        num_found = 0
        scope = ""  # of what is found absent
        asked = set()
        try:
            for position, lower in enumerate(self._lower):
                left = keys[num_found:]
                if not left:
                    break
                asked.add(left[0])
                self._probing.add(left[0])
                num_present = await lower.probe(left)
                if num_present and not lower.should_load(num_present, row_seconds):
                    lower.stats.skipped_slower_than_recompute += num_present
                    scope = request  # another request's engine may be slower
                    continue
                for key in left[:num_present]:
                    self._start(key, length, request, position)
                num_found += num_present
        finally:
            self._probing -= asked
        for key in keys[num_found : num_found + 1]:
            self._note_absent(key, scope)

    def _start(self, key: RowKey, length: int, request: str, position: int) -> None:
        if key not in self._pending and not self._memory.is_resident(key):
            self._pending.add(key)
            self._tasks.spawn(self._promote(key, length, request, position))

    async def _promote(self, key: RowKey, length: int, request: str, position: int) -> None:
        """Bring a row from the tier that has it, or else from one after it."""
        try:
            for number, lower in enumerate(self._lower[position:], position):
                if (brought := await lower.bring(key, length, request)) is not None:
                    self._refresh.mark_fresh(brought.slot)
                    for nearer in self._lower[:number]:
                        nearer.write(brought)
                    return
        finally:
            self._pending.discard(key)
        self._note_absent(key)

    def _is_absent(self, key: RowKey, request: str) -> bool:
        now = self._clock()
        return any(self._absent.get((key, scope), 0.0) > now for scope in ("", request))

    def _note_absent(self, key: RowKey, request: str = "") -> None:
        now = self._clock()
        self._absent[key, request] = now + _ABSENT_SECONDS
        self._absent.move_to_end((key, request))
        while next(iter(self._absent.values())) <= now:
            self._absent.popitem(last=False)
