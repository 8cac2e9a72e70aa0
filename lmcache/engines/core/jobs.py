"""What is loaded and stored, and the messages of a step between the scheduler side and the worker sides.

Pure: imports neither the engine nor torch. Every part of a job names its KV group.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from lmcache.engines.core.grid import NULL_BLOCK, BlockTables, Grid
from lmcache.rpc.hello import ClientHello
from lmcache.tiers.base import ROW_KEY_BYTES
from lmcache.tiers.memory.contracts import Found, Slot
from lmcache.units import ceil_div


class Offer(NamedTuple):
    """What the engine was told that it can load: ``num_tokens`` from token ``start`` on."""

    start: int
    num_tokens: int
    found: tuple[Found, ...]
    """Per group with rows: where the request's leading chunks are, those at least that are needed."""


class Piece(NamedTuple):
    """Consecutive blocks of one slot and where they are in the engine's KV."""

    group: int
    slot: Slot
    first_block: int
    """Within the row."""
    blocks: tuple[int, ...]


class GroupLoad(NamedTuple):
    """Blocks of one KV group to fill from consecutive chunks."""

    group: int
    blocks: tuple[int, ...]
    found: Found | None = None
    """Where its chunks are; None: nowhere, the load is to be reported as failed."""
    first_block: int = 0
    """Within the first row."""
    blocks_per_row: int = 1

    def pieces(self) -> Iterator[Piece]:
        """Cut it at the edges of rows."""
        start, first_block = 0, self.first_block
        for slot in self.found.slots() if self.found is not None else ():
            end = start + self.blocks_per_row - first_block
            yield Piece(self.group, slot, first_block, self.blocks[start:end])
            start, first_block = end, 0


@dataclass(frozen=True)
class LoadJob:
    """Fill blocks of a request.

    It is cut into pieces where it is copied: the engine's scheduler has no time for it.
    """

    request_id: str
    groups: tuple[GroupLoad, ...]
    fails_by_block: bool = True
    """See ``Grid``. The job says it: a rank that is not attached does not know, and has to report it."""

    @classmethod
    def from_offer(
        cls, request_id: str, grid: Grid, offer: Offer, num_tokens: int, tables: BlockTables
    ) -> LoadJob:
        """Load the first ``num_tokens`` (> 0) of an offer into the request's blocks.

        Fails where that can't be done: another end needs other rows, and a null block holds nothing.
        """
        end, loads = offer.start + num_tokens, []
        for group, found in zip(grid.stored, offer.found, strict=True):
            per_chunk, per_row = grid.blocks_per_chunk(group), grid.blocks_per_row(group)
            needed = grid.needed_blocks(group, offer.start, end)
            chunks = slice(needed.start // per_chunk, ceil_div(needed.stop, per_chunk))
            part = Found(found.rows[chunks], found.generations[chunks])
            blocks = tuple(tables[group.group][needed.start : needed.stop])
            if len(blocks) < len(needed) or NULL_BLOCK in blocks:
                return cls.failing(request_id, grid, tables)
            first = needed.start % per_chunk - (per_chunk - per_row)
            loads.append(GroupLoad(group.group, blocks, part, first, per_row))
        if num_tokens != offer.num_tokens and not grid.is_full:
            return cls.failing(request_id, grid, tables)
        return cls(request_id, tuple(loads), grid.fails_by_block)

    @classmethod
    def failing(cls, request_id: str, grid: Grid, tables: BlockTables) -> LoadJob:
        """Report all the blocks as not loaded: what was promised can't be kept."""
        loads = tuple(GroupLoad(group, tuple(ids)) for group, ids in enumerate(tables))
        return cls(request_id, loads, grid.fails_by_block)

    @property
    def blocks(self) -> tuple[int, ...]:
        """All blocks, in the order of the pieces, and null blocks where nothing is to be filled."""
        return tuple(itertools.chain.from_iterable(load.blocks for load in self.groups))

    def pieces(self) -> list[Piece]:
        """Cut it at the edges of chunks, group after group."""
        return [piece for load in self.groups for piece in load.pieces()]


class GroupStore(NamedTuple):
    """Consecutive full chunks of one KV group."""

    group: int
    first_chunk: int
    keys: bytes
    """Row keys, one per chunk."""
    blocks: tuple[int, ...]
    """As many per row."""


@dataclass(frozen=True)
class StoreJob:
    """Store full chunks of a request."""

    job_id: int
    request_id: str
    groups: tuple[GroupStore, ...]
    tenant: bytes = b""
    is_transient: bool = False
    """The engine may hand out these blocks while the request runs."""

    @property
    def num_rows(self) -> int:
        """In all groups."""
        return sum(len(group.keys) for group in self.groups) // ROW_KEY_BYTES


@dataclass
class StepMeta:
    """From the scheduler side to every worker side, once per engine step."""

    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    reclaimed: set[int] = field(default_factory=set)
    """Ids of StoreJobs whose blocks may be given to others in this step: what they read later is not
    committed."""
    held: list[str] = field(default_factory=list)
    """Requests that finished and whose blocks wait for our stores."""
    is_idle: bool = False
    """Nothing is computed in this step."""
    timed_step: int = 0
    """Not 0: say when the step is over."""
    left_behind: set[int] = field(default_factory=set)
    """As ``reclaimed``, of blocks that windows and states moved on from: any long prompt does so, there is
    more time to end them."""


@dataclass(frozen=True)
class EngineIdentity:
    """Whose bytes these are and how they lie. The workers know it first, the scheduler side needs it."""

    hello: ClientHello
    """As a worker says it."""
    hash_tokens: int
    num_replicas: int = 1
    """Ranks that hold the same KV as this one, itself included."""
    is_replica: bool = False
    """Another one of these stores it."""

    @property
    def grid(self) -> Grid:
        """How the engine's tokens are cut."""
        return Grid(self.hello.chunk_tokens, self.hash_tokens, self.hello.groups)

    @property
    def num_ranks(self) -> int:
        """Of the engine."""
        return self.hello.num_columns * self.num_replicas


@dataclass
class WorkerReport:
    """From the worker sides to the scheduler side, once per engine step when there is something to say."""

    stores_ended: Counter[int] = field(default_factory=Counter)
    """Job id -> ranks that ended it. One that stores nothing has ended it at once."""
    failed_loads: set[str] = field(default_factory=set)
    timed_step: int = 0
    identity: EngineIdentity | None = None

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """Join the reports of two ranks (called by the engine)."""
        return WorkerReport(
            self.stores_ended + other.stores_ended,
            self.failed_loads | other.failed_loads,
            max(self.timed_step, other.timed_step),
            self.identity or other.identity,
        )

    def __bool__(self) -> bool:
        return bool(self.stores_ended or self.failed_loads or self.timed_step or self.identity)
