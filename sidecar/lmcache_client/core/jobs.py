"""Jobs to load and store blocks, and the messages of a step between scheduler side and worker sides. Pure.

Imports neither the engine nor torch. Every part of a job names its KV group.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lmcache_client.core.blend_jobs import Blended, BlendStep
from lmcache_client.core.grid import NULL_BLOCK, BlockTables, Grid
from lmcache_client.core.hits import Rows
from lmcache_client.rpc.hello import ClientHello
from lmcache_store.common.units import ceil_div
from lmcache_store.tiers.base import ROW_KEY_BYTES
from lmcache_store.tiers.memory.contracts import Slot


class Offer(NamedTuple):
    """Load that the connector has offered the engine: ``num_tokens`` tokens from token ``start`` on."""

    start: int
    num_tokens: int
    found: tuple[Rows, ...]
    """Places of the rows that the load needs, per group with rows."""


class Piece(NamedTuple):
    """Consecutive blocks of one slot, and their numbers in the engine's KV."""

    group: int
    slot: Slot
    first_block: int
    """Position of the first block in the row."""
    blocks: tuple[int, ...]


class GroupLoad(NamedTuple):
    """Blocks of one KV group to fill from consecutive chunks."""

    group: int
    blocks: tuple[int, ...]
    found: Rows | None = None
    """Places of the chunks' rows; None: the load must be reported as failed."""
    first_block: int = 0
    """Position of the first block in the first row."""
    blocks_per_row: int = 1

    def pieces(self, slots: Iterable[Slot]) -> Iterator[Piece]:
        """Split the load at the edges of rows, up to the last of their ``slots``."""
        start, first_block = 0, self.first_block
        for slot in slots:
            end = start + self.blocks_per_row - first_block
            yield Piece(self.group, slot, first_block, self.blocks[start:end])
            start, first_block = end, 0


@dataclass(frozen=True)
class LoadJob:
    """A load: fill blocks of a request from rows in memory.

    The worker side splits it into pieces, because the engine's scheduler has no time for that.
    """

    request_id: str
    groups: tuple[GroupLoad, ...]
    fails_by_block: bool = True
    """See ``Grid``. Stated in the job, because a rank that is not attached has no grid but must report it."""

    @classmethod
    def from_offer(
        cls, request_id: str, grid: Grid, offer: Offer, num_tokens: int, tables: BlockTables
    ) -> LoadJob:
        """Create a load of the first ``num_tokens`` (> 0) of an offer into the request's blocks.

        Returns a failing job if that is impossible: a shorter load would need other rows, or the engine holds
        no block at a place that the load must fill.
        """
        end, loads = offer.start + num_tokens, []
        for group, found in zip(grid.stored, offer.found, strict=True):
            per_chunk, per_row = grid.blocks_per_chunk(group), grid.blocks_per_row(group)
            needed = grid.needed_blocks(group, offer.start, end)
            chunks = slice(needed.start // per_chunk, ceil_div(needed.stop, per_chunk))
            blocks = tuple(tables[group.group][needed.start : needed.stop])
            if len(blocks) < len(needed) or NULL_BLOCK in blocks:
                return cls.failing(request_id, grid, tables)
            first = needed.start % per_chunk - (per_chunk - per_row)
            loads.append(GroupLoad(group.group, blocks, found.part(chunks), first, per_row))
        if num_tokens != offer.num_tokens and not grid.is_full:
            return cls.failing(request_id, grid, tables)
        return cls(request_id, tuple(loads), grid.fails_by_block)

    @classmethod
    def failing(cls, request_id: str, grid: Grid, tables: BlockTables) -> LoadJob:
        """Create a job that reports all blocks as not loaded, for a load that the engine waits for."""
        loads = tuple(GroupLoad(group, tuple(ids)) for group, ids in enumerate(tables))
        return cls(request_id, loads, grid.fails_by_block)

    @property
    def blocks(self) -> tuple[int, ...]:
        """All blocks in the order of the pieces, with null blocks where the engine holds none."""
        return tuple(itertools.chain.from_iterable(load.blocks for load in self.groups))

    def pieces(self, find: Callable[[Rows], list[Slot]] = lambda rows: rows.slots()) -> list[Piece]:
        """Split the load at the edges of chunks, group by group. ``find`` returns the slots of rows."""
        loads = ((load, load.found) for load in self.groups)
        return [piece for load, rows in loads if rows is not None for piece in load.pieces(find(rows))]


class GroupStore(NamedTuple):
    """Consecutive full chunks of one KV group."""

    group: int
    first_chunk: int
    keys: bytes
    """Row keys, one per chunk."""
    blocks: tuple[int, ...]
    """Blocks of the rows, one row after the other; the same number for each row."""


@dataclass(frozen=True)
class StoreJob:
    """A store: copy full chunks of a request to memory."""

    job_id: int
    request_id: str
    groups: tuple[GroupStore, ...]
    tenant: bytes = b""
    is_transient: bool = False
    """True if the engine may reuse these blocks while the request runs."""

    @property
    def num_rows(self) -> int:
        """Number of rows in all groups."""
        return sum(len(group.keys) for group in self.groups) // ROW_KEY_BYTES


class _Message:
    """Message whose pickle has no fields about blended prompts while they are empty, as in most engines."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value or name not in _BLEND_FIELDS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # sets the other fields to their defaults


_BLEND_FIELDS = {"blend", "blends_placed", "blended", "can_blend"}


@dataclass
class StepMeta(_Message):
    """Message from the scheduler side to every worker side, once per engine step."""

    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    reclaimed: set[int] = field(default_factory=set)
    """Ids of StoreJobs whose blocks the engine may reuse in this step. Rows read later are not committed."""
    held: list[str] = field(default_factory=list)
    """Finished requests whose blocks the engine holds until their stores end."""
    is_idle: bool = False
    """True if this step computes nothing."""
    timed_step: int = 0
    """Number of the step if the workers must report its end; 0: no report."""
    left_behind: set[int] = field(default_factory=set)
    """Like ``reclaimed``, for blocks that windows and states left behind. Every long prompt leaves blocks
    behind, so the workers wait longer for these jobs."""
    blend: BlendStep | None = None
    """Work for blended prompts in this step, or None if the step has no such work."""

    def anon_repr(self) -> str:
        """Describe the message without row keys, because keys of encrypted rows depend on them.

        vLLM logs this text if a step fails (``vllm/logging_utils/dump_input.py``)."""
        loads = [(job.request_id, len(job.blocks)) for job in self.loads]
        stores = [(job.job_id, job.request_id, job.num_rows) for job in self.stores]
        return f"StepMeta(blocks of loads={loads}, rows of stores={stores}, {self.reclaimed=}, {self.held=})"


@dataclass(frozen=True)
class EngineIdentity(_Message):
    """Identity and layout of an engine's KV. Workers determine it, and send it to the scheduler side."""

    hello: ClientHello
    """The worker's first message to the sidecar."""
    hash_tokens: int
    """Tokens of one of the engine's block hashes."""
    num_replicas: int = 1
    """Number of ranks that hold the same KV as this rank, including this rank."""
    is_replica: bool = False
    """True if another rank stores the same KV."""
    can_blend: bool = False
    """True if all ranks can blend prompts."""

    @property
    def grid(self) -> Grid:
        """The grid of the engine's tokens."""
        return Grid(self.hello.chunk_tokens, self.hash_tokens, self.hello.groups)

    @property
    def conflict(self) -> str:
        """Why the engine's KV is private, found by a comparison of its parts; empty: no reason."""
        return ""

    def joined(self, other: EngineIdentity | None) -> EngineIdentity:
        """Return the identities of two ranks in one message. All ranks on one node have the same identity."""
        return self

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the engine."""
        return self.hello.num_columns * self.num_replicas


@dataclass
class WorkerReport(_Message):
    """Message from the worker sides to the scheduler side, at the end of steps with something to report."""

    stores_ended: Counter[int] = field(default_factory=Counter)
    """Job id -> number of ranks that ended the job. A rank that stores nothing ends it at once."""
    failed_loads: set[str] = field(default_factory=set)
    """Ids of requests whose load failed."""
    timed_step: int = 0
    """Number of the timed step that ended; 0: none."""
    identity: EngineIdentity | None = None
    """Identity of the engine, in a worker's first report."""
    blends_placed: Counter[str] = field(default_factory=Counter)
    """Request id -> number of ranks that have placed the stored KV of a prompt to blend."""
    blended: dict[str, Blended] = field(default_factory=dict)
    """Results of the prompts whose slices have ended, by request id."""

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """Merge the reports of two ranks. The engine calls this."""
        if not isinstance(self, type(other)):  # the other report has more fields
            return other.aggregate(self)
        return WorkerReport(
            self.stores_ended + other.stores_ended,
            self.failed_loads | other.failed_loads,
            max(self.timed_step, other.timed_step),
            self.identity.joined(other.identity) if self.identity is not None else other.identity,
            self.blends_placed + other.blends_placed,
            self.blended | other.blended,
        )

    def __bool__(self) -> bool:
        return any(vars(self).values())
