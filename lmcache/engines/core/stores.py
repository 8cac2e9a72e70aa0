"""Which chunks are stored, from which blocks, and whose blocks must not be read any more. Scheduler side.

A row holds the blocks of its chunk that a hit can use. When a step completes a chunk, the engine still has
them: a window leaves them behind with a later step at the earliest. What it left behind before (null blocks)
is not stored. A state's snapshot is at a chunk's edge only where a step ended there, or where the engine says
so.

**What is read must be the request's own until the copy ended.** Full attention keeps its blocks while the
request runs, and then they are held. The others give theirs away meanwhile, and the engine hands them out
again in the same step, mostly these first. So every step, all blocks that it hands out are compared with
those that copies still read: such a copy is to end before the step computes, or is not committed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from lmcache.engines.core.grid import NULL_BLOCK, BlockTables, Grid
from lmcache.engines.core.jobs import GroupStore, StoreJob
from lmcache.engines.core.requests import Computing, RequestState
from lmcache.kv_groups import GroupKind, KVGroup

Snapshot = tuple[int, int, int]
"""A state that the engine hands over: (KV group, block, tokens that it holds)."""


@dataclass
class _Job:
    state: RequestState
    num_missing: int
    """Ranks that did not end it."""
    chunks: slice
    """That are stored when it ended."""
    transient: Set[int]
    """Blocks that the engine may hand out while the request runs."""


class Stores:
    """The StoreJobs under way of one engine."""

    def __init__(self, grid: Grid, num_ranks: int, computing: Computing) -> None:
        self._grid = grid
        self._num_ranks = num_ranks
        self._computing = computing
        self._jobs: dict[int, _Job] = {}
        self._last_id = 0

    @property
    def reads_transient_blocks(self) -> bool:
        """Must ``reclaim_blocks`` be told what a step hands out?"""
        return not self._grid.is_full and any(job.transient for job in self._jobs.values())

    def plan(
        self,
        state: RequestState,
        get_tables: Callable[[], BlockTables | None],
        num_computed_tokens: int,
        snapshots: Iterable[Snapshot] = (),
        *,
        is_step_end: bool = True,
    ) -> list[StoreJob]:
        """Store what is complete when so many tokens are computed, and was not stored. ``is_step_end``: a
        state has been computed up to there, and no further."""
        grid, hashes = self._grid, state.request.block_hashes
        first, end = state.num_stored_chunks, grid.num_full_chunks(len(hashes), num_computed_tokens)
        if end <= first or state.ticket.extra_keys is None:
            return []
        tables = get_tables()
        if tables is None or any(
            len(tables[group.group]) < end * grid.blocks_per_chunk(group) for group in grid.stored
        ):
            self._computing.end(state)
            return []
        is_exact = is_step_end and not state.has_drafts and end * grid.chunk_tokens == num_computed_tokens
        stable: list[GroupStore] = []
        transient: list[GroupStore] = []
        for number, group in enumerate(grid.stored):
            table, parts = tables[group.group], stable if group.is_full else transient
            runs: Iterable[tuple[int, tuple[int, ...]]] = [self._run(group, table, first, end)]
            if group.kind is GroupKind.STATE:
                runs = self._snapshots(group, table, end, snapshots, is_exact=is_exact)
            for start, blocks in runs:
                if blocks:
                    chunks = range(start, start + len(blocks) // grid.blocks_per_row(group))
                    parts.append(GroupStore(group.group, start, self._keys(state, number, chunks), blocks))
        state.num_stored_chunks = end
        if not (stable or transient):
            self._computing.end(state, slice(first, end))
        # The transient ones first: their blocks are given away first.
        jobs = [self._begin(state, transient, slice(0) if stable else slice(first, end))] if transient else []
        return [*jobs, self._begin(state, stable, slice(first, end))] if stable else jobs

    def reclaim(self, state: RequestState) -> set[int]:
        """Jobs of a request that must not be committed from now on.

        By job: its table may be that of its next life by now, and its blocks may be others' as well, who keep
        them.
        """
        if not state.num_stores:
            return set()
        return {job_id for job_id, job in self._jobs.items() if job.state is state}

    def reclaim_blocks(self, handed_out: Set[int]) -> set[int]:
        """Jobs that read blocks which this step gives to somebody."""
        return {job_id for job_id, job in self._jobs.items() if not job.transient.isdisjoint(handed_out)}

    def note_ended(self, job_id: int, num_ranks: int) -> bool:
        """So many ranks ended it; whether these were the last. Unknown jobs are ignored."""
        if (job := self._jobs.get(job_id)) is None:
            return False
        job.num_missing -= num_ranks
        if job.num_missing > 0:
            return False
        del self._jobs[job_id]
        job.state.num_stores -= 1
        self._computing.end(job.state, job.chunks)
        return True

    def _begin(self, state: RequestState, parts: Sequence[GroupStore], chunks: slice) -> StoreJob:
        full = {group.group for group in self._grid.stored if group.is_full}
        lent = itertools.chain.from_iterable(part.blocks for part in parts if part.group not in full)
        transient = frozenset(lent)
        self._last_id += 1
        self._jobs[self._last_id] = _Job(state, self._num_ranks, chunks, transient)
        state.num_stores += 1
        ticket = state.ticket
        return StoreJob(self._last_id, ticket.request_id, tuple(parts), ticket.tenant, bool(transient))

    def _run(self, group: KVGroup, table: Sequence[int], first: int, end: int) -> tuple[int, tuple[int, ...]]:
        """Blocks of the rows of chunks ``first`` to ``end``, or of the last ones that the engine still has,
        and the first one's number."""
        per_chunk, per_row = self._grid.blocks_per_chunk(group), self._grid.blocks_per_row(group)
        if per_row == per_chunk:
            blocks = tuple(table[first * per_chunk : end * per_chunk])
        else:
            ends = range((first + 1) * per_chunk, end * per_chunk + 1, per_chunk)
            blocks = tuple(itertools.chain.from_iterable(table[at - per_row : at] for at in ends))
        if NULL_BLOCK not in blocks:
            return first, blocks
        last_null = len(blocks) - 1 - blocks[::-1].index(NULL_BLOCK)
        num_lost = last_null // per_row + 1
        return first + num_lost, blocks[num_lost * per_row :]

    def _snapshots(
        self, group: KVGroup, table: Sequence[int], end: int, snapshots: Iterable[Snapshot], *, is_exact: bool
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        """States at the edges of chunks up to ``end``."""
        chunk_tokens = self._grid.chunk_tokens
        blocks = {
            num_tokens // chunk_tokens - 1: block
            for number, block, num_tokens in snapshots
            if number == group.group and not num_tokens % chunk_tokens
        }
        if is_exact:
            blocks[end - 1] = table[end * self._grid.blocks_per_chunk(group) - 1]
        for chunk, block in sorted(blocks.items()):
            if chunk < end and block != NULL_BLOCK:
                yield chunk, (block,)

    def _keys(self, state: RequestState, number: int, chunks: range) -> bytes:
        """Row keys of chunks in the stored group of that number: they were made for the prompt, and may be
        late."""
        ticket, grid = state.ticket, self._grid
        keys = ticket.keys[number][chunks.start : chunks.stop] if ticket.keys is not None else []
        after = chunks.start + len(keys)
        if after < chunks.stop:
            hashes = grid.chunk_hashes(state.request.block_hashes, after, chunks.stop)
            keys = keys + ticket.row_keys(grid.stored[number].group, hashes, after)
        return b"".join(keys)
