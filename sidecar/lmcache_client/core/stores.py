"""Plans stores: which chunks are stored, from which blocks, and which copies no longer count. Scheduler side.

A row holds the blocks of its chunk that a hit can use. When a step completes a chunk, the engine still has
these blocks: a window leaves them behind in a later step at the earliest. Blocks that it left behind before
(null blocks) are not stored. A state has a snapshot at the edge of a chunk only if a step ended there, or if
the engine hands one over.

**Blocks must belong to the request until their copy has ended.** A full-attention group retains its blocks
while the request runs, and afterwards the engine holds them. Other groups return blocks earlier, and the
engine allocates these blocks again in the same step. So in every step, all allocated blocks are compared with
the blocks that copies still read. Such a copy must end before the step computes, or it is not committed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from lmcache_client.core.grid import NULL_BLOCK, BlockTables, Grid
from lmcache_client.core.jobs import GroupStore, StoreJob
from lmcache_client.core.requests import Computing, RequestState
from lmcache_store.kv_groups import GroupKind, KVGroup

Snapshot = tuple[int, int, int]
"""A state that the engine hands over: (KV group, block, number of tokens that the state covers)."""


@dataclass
class _Job:
    state: RequestState
    num_missing: int
    """Number of ranks that have not ended the job."""
    chunks: slice
    """Chunks that are stored when the job has ended."""
    transient: Set[int]
    """Blocks that the engine may allocate again while the request runs."""


class Stores:
    """The running StoreJobs of one engine."""

    def __init__(self, grid: Grid, num_ranks: int, computing: Computing) -> None:
        self._grid = grid
        self._num_ranks = num_ranks
        self._computing = computing
        self._jobs: dict[int, _Job] = {}
        self._last_id = 0

    @property
    def reads_transient_blocks(self) -> bool:
        """True if ``reclaim_blocks`` must be called with the blocks that a step allocates."""
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
        """Create StoreJobs for the chunks within ``num_computed_tokens`` that are not stored yet.

        ``is_step_end``: the states of the request cover exactly ``num_computed_tokens`` tokens.
        """
        grid, hashes = self._grid, state.request.block_hashes
        first, end = state.num_stored_chunks, grid.num_full_chunks(len(hashes), num_computed_tokens)
        if end <= first or state.ticket.extra_keys is None or not state.is_exact:
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
        # The job with transient blocks comes first, because the engine reuses its blocks first.
        jobs = [self.begin(state, transient, slice(0) if stable else slice(first, end))] if transient else []
        return [*jobs, self.begin(state, stable, slice(first, end))] if stable else jobs

    def plan_tail(self, state: RequestState, table: Sequence[int], num_tokens: int) -> list[StoreJob]:
        """Create a StoreJob for the full blocks after the last chunk within ``num_tokens``, if there are any.

        Only for engines with one group of full attention. The key is made of the last block's hash, so that
        no lookup of whole chunks finds the row.
        """
        (group,), hash_tokens = self._grid.stored, self._grid.hash_tokens
        hashes = state.request.block_hashes[: num_tokens // hash_tokens]
        num_chunks = self._grid.num_full_chunks(len(hashes), num_tokens)
        first, end = num_chunks * self._grid.blocks_per_chunk(group), len(hashes)
        if first == end or len(table) < end or state.ticket.extra_keys is None or not state.is_exact:
            return []
        # A row has as many blocks as a chunk. Nobody reads the last ones.
        blocks = (*table[first:end], *[table[end - 1]] * (first + self._grid.blocks_per_row(group) - end))
        (key,) = state.ticket.row_keys(group.group, [bytes(hashes[-1])], num_chunks)
        return [self.begin(state, [GroupStore(group.group, num_chunks, key, blocks)], slice(0))]

    def reclaim(self, state: RequestState) -> set[int]:
        """Return the ids of the request's jobs, none of which must be committed from now on.

        Compares jobs and not blocks. The request may have restarted with a new table, and it may share blocks
        with other requests that retain them.
        """
        if not state.num_stores:
            return set()
        return {job_id for job_id, job in self._jobs.items() if job.state is state}

    def reclaim_blocks(self, allocated: Set[int]) -> set[int]:
        """Return the ids of jobs that read blocks which this step allocates."""
        return {job_id for job_id, job in self._jobs.items() if not job.transient.isdisjoint(allocated)}

    def note_ended(self, job_id: int, num_ranks: int) -> bool:
        """Record that ``num_ranks`` ranks ended a job. Return True if all have. Ignores unknown jobs."""
        if (job := self._jobs.get(job_id)) is None:
            return False
        job.num_missing -= num_ranks
        if job.num_missing > 0:
            return False
        del self._jobs[job_id]
        job.state.num_stores -= 1
        self._computing.end(job.state, job.chunks)
        return True

    def begin(self, state: RequestState, parts: Sequence[GroupStore], chunks: slice) -> StoreJob:
        """Create a StoreJob. ``chunks``: the request's chunks that are stored when the job has ended."""
        full = {group.group for group in self._grid.stored if group.is_full}
        blocks = itertools.chain.from_iterable(part.blocks for part in parts if part.group not in full)
        transient = frozenset(blocks)
        self._last_id += 1
        self._jobs[self._last_id] = _Job(state, self._num_ranks, chunks, transient)
        state.num_stores += 1
        ticket = state.ticket
        return StoreJob(self._last_id, ticket.request_id, tuple(parts), ticket.tenant, bool(transient))

    def _run(self, group: KVGroup, table: Sequence[int], first: int, end: int) -> tuple[int, tuple[int, ...]]:
        """Return (number of the first chunk, blocks of the rows up to chunk ``end``).

        Starts with chunk ``first``, or with a later one if the engine no longer has all blocks before it.
        """
        per_chunk, per_row = self._grid.blocks_per_chunk(group), self._grid.blocks_per_row(group)
        if per_row == per_chunk:
            blocks = tuple(table[first * per_chunk : end * per_chunk])
        else:
            ends = range((first + 1) * per_chunk, end * per_chunk + 1, per_chunk)
            blocks = tuple(itertools.chain.from_iterable(table[edge - per_row : edge] for edge in ends))
        if NULL_BLOCK not in blocks:
            return first, blocks
        last_null = len(blocks) - 1 - blocks[::-1].index(NULL_BLOCK)
        num_lost = last_null // per_row + 1
        return first + num_lost, blocks[num_lost * per_row :]

    def _snapshots(
        self, group: KVGroup, table: Sequence[int], end: int, snapshots: Iterable[Snapshot], *, is_exact: bool
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield (number of the chunk, its block) for each state at the edge of a chunk up to ``end``."""
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
        """Return the chunks' row keys in the stored group at position ``number``, joined.

        Computes keys that the ticket lacks: it has those of the prompt only, or none yet.
        """
        ticket, grid = state.ticket, self._grid
        keys = ticket.keys[number][chunks.start : chunks.stop] if ticket.keys is not None else []
        first = chunks.start + len(keys)
        if first < chunks.stop:
            hashes = grid.chunk_hashes(state.request.block_hashes, first, chunks.stop)
            keys = keys + ticket.row_keys(grid.stored[number].group, hashes, first)
        return b"".join(keys)
