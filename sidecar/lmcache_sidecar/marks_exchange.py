"""Exchanges marks of documents with the sidecars of other pods, over the remote tier."""

from __future__ import annotations

import asyncio
import logging
import time

import numpy as np

from lmcache_client.rpc import service
from lmcache_sidecar.marks import MarkTables, ScopeMarks
from lmcache_store.common.backoff import Backoff
from lmcache_store.common.logs import Reminders
from lmcache_store.tiers.errors import ServerError, TierError, TierUnavailableError
from lmcache_store.tiers.remote.marks import COMMANDS, MarksQuery
from lmcache_store.tiers.remote.tier import RemoteTier

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 5.0
_BACKOFF = Backoff(_PAUSE_SECONDS, 600.0)
_ALL_SECONDS = 600.0
"""Time after which a sidecar reads all marks again, and adds those that Redis lost."""

_OVERLAP_SECONDS = 60.0
"""Largest difference of the pods' clocks at which a sidecar receives new marks at once."""

_MAX_NEW_MARKS = 16_384
"""Largest number of marks to read if a sidecar does not read all."""

_SLICE = 8192  # marks to add before other tasks run, in 2 to 7 ms


class MarksExchange:
    """Exchanges the marks of ``tables``, while engines use them, until its task is cancelled."""

    def __init__(self, tables: MarkTables, tier: RemoteTier) -> None:
        self._tables = tables
        self._tier = tier
        self._reminders = Reminders()
        self._num_failures = 0

    async def run(self) -> None:
        """Exchange marks when an engine asks, with a pause of at least five seconds in between."""
        while True:
            await self._tables.asked.wait()
            await asyncio.sleep(await self.step())

    async def step(self) -> float:
        """Exchange the marks of each namespace that engines use. Returns the seconds until the next step."""
        problem: Exception | None = None
        for namespace, table in self._tables.take_asked():
            try:
                await self._exchange(namespace, table)
            except Exception as error:  # also a bug: the cache works without marks
                problem = error
        if problem is None:
            self._num_failures = 0
            self._reminders.clear()
            return _PAUSE_SECONDS
        self._log(problem)
        self._num_failures += 1
        return _BACKOFF.seconds(self._num_failures)

    async def _exchange(self, namespace: bytes, table: ScopeMarks) -> None:
        began, now = time.monotonic(), time.time()
        is_all = began >= table.next_all
        since = int(table.exchanged_at - _OVERLAP_SECONDS)
        # A full table keeps seven eighths: more would be the marks that it has just dropped.
        num_marks = service.MAX_MARKS * 7 // 8
        query = MarksQuery(0, num_marks) if is_all else MarksQuery(since, _MAX_NEW_MARKS)
        unsent = table.take_unsent()
        try:
            packed = await asyncio.to_thread(
                self._tier.exchange_marks, namespace, unsent.tobytes(), int(now), service.MAX_MARKS, query
            )
        except BaseException:
            table.unsend(unsent)
            raise
        marks = np.frombuffer(packed, "<u8")
        for start in range(0, len(marks), _SLICE):
            table.add(marks[start : start + _SLICE])
            await asyncio.sleep(0)
        table.exchanged_at = now
        if is_all:
            table.next_all = began + _ALL_SECONDS
            if len(marks) < service.MAX_MARKS // 2:  # Redis dropped none because of their number
                table.unsend(table.unknown_to(marks))

    def _log(self, problem: Exception) -> None:
        if isinstance(problem, TierUnavailableError) or not self._reminders.is_due(str(problem)):
            return  # the tier logs why it is unavailable
        has_rights = not isinstance(problem, ServerError) or problem.code not in ("NOPERM", "ERR")
        rights = " ".join(f"+{command.lower()}" for command in COMMANDS)
        logger.warning(
            "This pod and other pods do not share marks of documents: remote tier %s: %s%s",
            self._tier.address,
            problem,
            "" if has_rights else f". Grant the Redis user {rights}",
            exc_info=None if isinstance(problem, TierError) else problem,
        )
