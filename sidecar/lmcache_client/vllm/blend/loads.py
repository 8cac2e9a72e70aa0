"""Places stored KV of documents in a request's blocks: rows are copied to staging blocks, then moved."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Protocol

import torch

from lmcache_client.core.blend_jobs import Blended, BlendJob, Segment
from lmcache_client.core.copier import STAGING_GROUP, EngineCopier, Fence
from lmcache_client.core.jobs import GroupLoad, LoadJob
from lmcache_client.core.layout import Layout
from lmcache_client.core.transfers import EngineTransfer, LoadTransfer
from lmcache_client.rpc.session import SidecarSession
from lmcache_store.common.units import ceil_div


class Placer(Protocol):
    """The part of ``Blender`` that writes staged KV to a request's blocks."""

    staging: Layout
    """See ``Blender``."""

    def place(self, job: BlendJob, begin: int, end: int, start: int, slot: int) -> None:
        """See ``Blender``."""


class BlendTransfer(EngineTransfer):
    """A running BlendJob: its stored KV is placed on the loader thread. Other fields are the engine thread's.

    Tokens whose KV can't be placed, for any reason, are computed instead.
    """

    def __init__(
        self, job: BlendJob, placer: Placer, chunk_tokens: int, fence: Fence, staging_lock: threading.Lock
    ) -> None:
        """``fence``: the engine's work that may still use the request's blocks."""
        super().__init__(job.request_id)
        self.job = job
        self._placer, self._chunk_tokens, self._fence = placer, chunk_tokens, fence
        self._staging_lock = staging_lock
        self._block_tokens = chunk_tokens // placer.staging.blocks_per_row
        self.is_placed = torch.zeros(job.end, dtype=torch.bool)
        """Tokens whose KV is in the request's blocks."""
        self.stored_at = torch.zeros(job.end, dtype=torch.int64)
        """Positions in their documents at which these tokens were computed."""
        self.is_over = False
        """True if the request needs no more work of this rank. The engine's thread sets it."""
        self.result: Blended | None = None
        """Result of the slices; None: the request's blocks are not blended."""

    @property
    def bad_blocks(self) -> tuple[int, ...]:
        """Blocks that hold no valid KV: none if the prompt is blended, else those that may not be exact."""
        if self.result is not None:
            return ()
        job = self.job
        exact = slice(job.begin, max(job.begin, job.documents))
        positions = torch.arange(exact.start, exact.stop)
        is_exact = self.is_placed[exact] & (self.stored_at[exact] == positions)
        num_exact = int(is_exact.long().cumprod(0).sum())
        return job.blocks[(job.begin + num_exact) // self._block_tokens :]

    def run(self, session: SidecarSession, copier: EngineCopier) -> None:
        """See ``EngineTransfer``."""
        with torch.inference_mode():
            for segment, rows in self._batches():
                if self.is_over:
                    return
                with self._staging_lock:
                    self._place(segment, rows.start, self._load(segment, rows, session, copier))

    def _batches(self) -> Iterator[tuple[Segment, range]]:
        """Split the segments' rows at the size of the staging blocks."""
        staging = self._placer.staging
        size = len(staging.pages[0]) // staging.blocks_per_row
        for segment in self.job.segments:
            first = (segment.begin - segment.start) // self._chunk_tokens
            end = ceil_div(segment.end - segment.start, self._chunk_tokens)
            yield from ((segment, range(row, min(row + size, end))) for row in range(first, end, size))

    def _load(self, segment: Segment, rows: range, session: SidecarSession, copier: EngineCopier) -> int:
        """Copy rows to the staging blocks. Return how many leading ones are right.

        The copies wait for the fence, so afterwards the request's blocks may be overwritten.
        """
        per_row = self._placer.staging.blocks_per_row
        blocks, found = tuple(range(len(rows) * per_row)), segment.found.part(slice(rows.start, rows.stop))
        group = GroupLoad(STAGING_GROUP, blocks, found, 0, per_row)
        load = LoadTransfer(LoadJob(self.request_id, (group,)), self._fence)
        load.run(session, copier)
        return len(rows) - ceil_div(len(load.bad_blocks), per_row)

    def _place(self, segment: Segment, first_row: int, num_rows: int) -> None:
        """Write the tokens of staged rows, the first of which is the segment's row ``first_row``."""
        first = segment.start + first_row * self._chunk_tokens
        begin, end = max(segment.begin, first), min(segment.end, first + num_rows * self._chunk_tokens)
        if begin < end:
            self._placer.place(self.job, begin, end, segment.start, begin - first)
            self.is_placed[begin:end] = True
            self.stored_at[begin:end] = torch.arange(begin - segment.start, end - segment.start)
