"""Finds out which of the engine's chunks the sidecar has in memory, for the engine's KV events.

Routers use these events to send a request to the engine that has its prefix. The events need no calls,
because chunks that were stored or loaded are looked up in the index in shared memory. Reported chunks are
looked up again, a few in each step, so that evictions are reported within some steps. Chunks that the sidecar
still has are reported again from time to time, because a router that started later has missed the first
report.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, NamedTuple

from lmcache_client.core.hits import RowFinder, words_of
from lmcache_client.core.jobs import StoreJob
from lmcache_client.core.requests import EngineRequest
from lmcache_store.tiers.base import ROW_KEY_BYTES, RowKey

CHECKED_PER_STEP = 32
"""Number of reported chunks that each step looks up again, about 30 us of the scheduler's thread."""
REPEAT_SECONDS = 10.0
"""Age of a report at which it is repeated. A router that starts later knows all chunks after about this time,
if the engine runs steps."""


class Chunk(NamedTuple):
    """A chunk of a request."""

    request: EngineRequest
    number: int


class _Report(NamedTuple):
    description: Any
    reported_at: float


class ChunkEvents:
    """Chunks that came into memory or left it, see the module. Only the scheduler's thread uses it.

    A chunk is identified by its row in the first KV group that has rows. It is reported by the engine's own
    description, with which the report can be repeated after the request has ended.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._storing: dict[int, dict[RowKey, Chunk]] = {}  # by job id
        self._candidates: dict[RowKey, Chunk] = {}  # chunks that may be in memory
        # Reported chunks, in the order of the next checks. An OrderedDict, because a dict is slow at finding
        # its first key after many removals.
        self._reported: OrderedDict[RowKey, _Report] = OrderedDict()
        self._removed: list[Any] = []

    def begin_stores(self, request: EngineRequest, jobs: Iterable[StoreJob], group: int) -> None:
        """Record the chunks of new StoreJobs; ``group``: the group whose rows identify them."""
        for job in jobs:
            self._storing[job.job_id] = {
                part.keys[offset : offset + ROW_KEY_BYTES]: Chunk(request, number)
                for part in job.groups
                if part.group == group
                for number, offset in enumerate(range(0, len(part.keys), ROW_KEY_BYTES), part.first_chunk)
            }

    def end_store(self, job_id: int) -> None:
        """Record that all ranks ended the job. The index then shows which chunks it stored."""
        self._candidates |= self._storing.pop(job_id, {})

    def note_found(self, request: EngineRequest, row_keys: Iterable[RowKey]) -> None:
        """Record that a lookup found these leading chunks in memory."""
        self._candidates |= {key: Chunk(request, number) for number, key in enumerate(row_keys)}

    def clear(self) -> None:
        """Report all chunks as removed: no request can find them any more."""
        self._removed += [report.description for report in self._reported.values()]
        for chunks in (self._storing, self._candidates, self._reported):
            chunks.clear()

    def take(self, index: RowFinder | None, describe: Callable[[Chunk], Any]) -> tuple[list[Any], list[Any]]:
        """Return descriptions of (chunks in memory, removed chunks) since the last call.

        A chunk in memory is described when it came into memory, and then again every ``REPEAT_SECONDS``.

        Args:
            index: None if there is no sidecar; all chunks are then reported as removed.
            describe: describes a chunk. The description is stored as long as the chunk is in memory.
        """
        if index is None:
            self.clear()
        candidates = {key: chunk for key, chunk in self._candidates.items() if key not in self._reported}
        to_check = list(islice(self._reported, CHECKED_PER_STEP))
        is_there = dict(_look_up(index, [*candidates, *to_check]))
        now = self._clock()
        repeated = list(self._check(to_check, is_there, now))
        stored = {key: describe(chunk) for key, chunk in candidates.items() if is_there[key]}
        self._reported |= {key: _Report(description, now) for key, description in stored.items()}
        removed, self._removed, self._candidates = self._removed, [], {}
        return [*stored.values(), *repeated], removed

    def _check(self, keys: list[RowKey], is_there: dict[RowKey, bool], now: float) -> Iterable[Any]:
        """Move reported chunks to the end, or to the removed ones. Returns the reports to repeat."""
        for key in keys:
            report = self._reported.pop(key)
            if not is_there[key]:
                self._removed.append(report.description)
                continue
            if now - report.reported_at >= REPEAT_SECONDS:
                report = _Report(report.description, now)
                yield report.description
            self._reported[key] = report


def _look_up(index: RowFinder | None, row_keys: list[RowKey]) -> Iterable[tuple[RowKey, bool]]:
    if index is None or not row_keys:
        return []
    return zip(row_keys, index.find_each(words_of(b"".join(row_keys))).is_there.tolist(), strict=True)
