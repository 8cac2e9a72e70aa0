"""What comes into the sidecar's memory and what leaves it, as far as an engine's requests have to do with it.

For routers that send a request where its prefix is. Nothing is asked: chunks that were stored or loaded are
looked for in the index in shared memory, and those that were told of are looked for again, a few in each
step, so that what the sidecar gave up is told within some steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

import numpy as np

from lmcache.engines.core.hits import Index
from lmcache.engines.core.jobs import StoreJob
from lmcache.engines.core.requests import EngineRequest
from lmcache.tiers.base import ROW_KEY_BYTES, RowKey

CHECKED_PER_STEP = 32
"""Chunks that are looked for again: some 30 us of the scheduler's thread."""


class Chunk(NamedTuple):
    """A chunk of a request."""

    request: EngineRequest
    number: int


class ChunkEvents:
    """See the module. The scheduler's thread calls it.

    A chunk goes by its row of the first KV group that has rows, and is told of by the engine's own hashes.
    """

    def __init__(self) -> None:
        self._storing: dict[int, dict[RowKey, Chunk]] = {}  # by job
        self._seen: dict[RowKey, Chunk] = {}  # perhaps in memory
        # The engine's hashes, the next to look for first: a dict would be searched for its first again.
        self._told: OrderedDict[RowKey, tuple[bytes, ...]] = OrderedDict()
        self._gone: list[tuple[bytes, ...]] = []

    def begin_stores(self, request: EngineRequest, jobs: Iterable[StoreJob], group: int) -> None:
        """Chunks are to be stored; ``group``: the one by whose rows they go."""
        for job in jobs:
            self._storing[job.job_id] = {
                part.keys[at : at + ROW_KEY_BYTES]: Chunk(request, number)
                for part in job.groups
                if part.group == group
                for number, at in enumerate(range(0, len(part.keys), ROW_KEY_BYTES), part.first_chunk)
            }

    def end_store(self, job_id: int) -> None:
        """All ranks ended it; what came of it, the index says."""
        self._seen |= self._storing.pop(job_id, {})

    def note_found(self, request: EngineRequest, row_keys: Iterable[RowKey]) -> None:
        """The leading chunks were in memory just now."""
        self._seen |= {key: Chunk(request, number) for number, key in enumerate(row_keys)}

    def clear(self) -> None:
        """Nothing of what there was is found any more."""
        self._gone += self._told.values()
        for known in (self._storing, self._seen, self._told):
            known.clear()

    def take(self, index: Index | None, hashes_per_chunk: int) -> tuple[list[Chunk], list[tuple[bytes, ...]]]:
        """Return (chunks that came, hashes of each that left) since the last call; without an index nothing
        can be loaded."""
        if index is None:
            self.clear()
        seen = {key: chunk for key, chunk in self._seen.items() if key not in self._told}
        again = list(islice(self._told, CHECKED_PER_STEP))
        is_there = dict(_look(index, [*seen, *again]))
        for key in again:
            hashes = self._told.pop(key)
            if is_there[key]:
                self._told[key] = hashes
            else:
                self._gone.append(hashes)
        stored = {key: chunk for key, chunk in seen.items() if is_there[key]}
        for key, (request, number) in stored.items():
            first, end = number * hashes_per_chunk, (number + 1) * hashes_per_chunk
            self._told[key] = tuple(request.block_hashes[first:end])
        gone, self._gone, self._seen = self._gone, [], {}
        return list(stored.values()), gone


def _look(index: Index | None, row_keys: list[RowKey]) -> Iterable[tuple[RowKey, bool]]:
    if index is None or not row_keys:
        return []
    words = np.frombuffer(b"".join(row_keys), "<u8").reshape(len(row_keys), -1)
    return zip(row_keys, index.find_each(words).is_there.tolist(), strict=True)
