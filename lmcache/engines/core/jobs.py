"""What to load and what to store: arithmetic over tokens, blocks and chunks, and the messages of a step.

Pure: imports neither the engine nor torch. Three grids lie over a request's tokens: **blocks** (the engine
allocates them, its local hits end on them), **hashes** (the engine's chained block hashes) and **chunks**
(what is stored). The edges of chunks are edges of blocks and hashes, but not the reverse: a load may begin
and end inside a chunk.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lmcache import keys
from lmcache.tiers.base import KEY_BYTES
from lmcache.tiers.memory.contracts import Found, Slot
from lmcache.units import ceil_div

GROUP = 0
"""Number of the one KV group that is cached so far."""

STALL_SECONDS = 0.05
"""Rows that are on their way and do not come for so long are waited for no longer, unless computing them
takes longer."""

FIRST_ROW_SECONDS = 0.2
"""The first one may take longer: nothing is known of its tier yet."""

IDLE_WAIT_SECONDS = 0.0005
"""When there is nothing to do but to wait: an engine in its caller's process would spin for the GIL."""


@dataclass(frozen=True)
class Grid:
    """Sizes in tokens; ``chunk_tokens`` is a multiple of the two others."""

    chunk_tokens: int
    block_tokens: int
    hash_tokens: int

    @classmethod
    def fit(cls, chunk_tokens: int, block_tokens: int, hash_tokens: int) -> Grid:
        """Take the smallest multiple of ``chunk_tokens`` that the engine's sizes divide."""
        return cls(math.lcm(chunk_tokens, block_tokens, hash_tokens), block_tokens, hash_tokens)

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks of one full chunk."""
        return self.chunk_tokens // self.block_tokens

    def num_full_chunks(self, num_hashes: int, num_tokens: int) -> int:
        """Leading chunks that have a name (all their hashes) and lie within ``num_tokens``."""
        return min(num_hashes * self.hash_tokens, num_tokens) // self.chunk_tokens

    def chunk_hashes(self, block_hashes: Sequence[bytes], first: int, end: int) -> list[bytes]:
        """Per chunk from ``first`` to ``end``: its last block's hash, which folds in all tokens before."""
        step = self.chunk_tokens // self.hash_tokens
        return list(map(bytes, block_hashes[(first + 1) * step - 1 : end * step : step]))


def loadable_tokens(grid: Grid, num_computed_tokens: int, num_tokens: int, num_leased: int) -> int:
    """Return what a load could add to ``num_computed_tokens`` when ``num_leased`` leading chunks can be read.

    It ends on an edge of a block and leaves at least one of the ``num_tokens`` tokens to compute: the engine
    samples from the last one.
    """
    whole_blocks = (num_tokens - 1) // grid.block_tokens * grid.block_tokens
    end = min(num_leased * grid.chunk_tokens, whole_blocks)
    return 0 if num_computed_tokens % grid.block_tokens else max(0, end - num_computed_tokens)


class Offer(NamedTuple):
    """What the engine was told that it can load: ``num_tokens`` from token ``start`` on."""

    start: int
    num_tokens: int
    found: Found  # the request's leading chunks


class Piece(NamedTuple):
    """Consecutive blocks of one slot and where they go."""

    slot: Slot
    first_block: int  # within the chunk
    blocks: tuple[int, ...]  # ids in the engine's KV


class Arrivals:
    """How fast rows come up, seen by all requests of the engine that wait for some."""

    _WEIGHT = 0.3

    def __init__(self) -> None:
        self.at = 0.0  # of the last ones
        self.seconds_per_row = 0.0  # 0: not known yet

    def note(self, num_rows: int, began_at: float, now: float) -> None:
        """Rows came since the last ones, or since somebody began to wait; just now: that tells no pace."""
        seconds = (now - max(self.at, began_at)) / num_rows
        known = self.seconds_per_row
        if seconds > 0:
            self.seconds_per_row = known + self._WEIGHT * (seconds - known) if known else seconds
        self.at = now


class Patience:
    """How long one request waits for rows on their way up: as long as they come, and come faster than its
    engine would compute them.

    Silence is borne for as long as computing what is missing would take, within bounds: it may be the
    machine's, which is as busy for who computes.
    """

    def __init__(self, num_found: int, now: float, num_steps: int) -> None:
        self._began_at = self._looked_at = now
        self._num_found = num_found
        self._num_steps = num_steps
        self._has_some = False
        self._is_excused = False

    def is_over(
        self,
        num_found: int,
        num_missing: int,
        now: float,
        arrivals: Arrivals,
        chunk_seconds: float,
        num_steps: int,
    ) -> bool:
        """``num_found``: rows here now; ``num_missing``: that may come yet; ``chunk_seconds``: what computing
        one takes (0.0: not known); ``num_steps``: in which the engine computed something, so far."""
        is_unseen = num_steps != self._num_steps and now - self._looked_at >= STALL_SECONDS
        self._looked_at, self._num_steps = now, num_steps
        # During a long step nobody looked at what came, and it took the processor from who brings it: once,
        # such a time says nothing.
        is_excused = is_unseen and not self._is_excused
        if num_found > self._num_found:
            arrivals.note(num_found - self._num_found, now if is_excused else self._began_at, now)
            self._num_found, self._has_some = num_found, True
        if is_excused:
            self._is_excused, self._began_at = True, now
            return False
        pace, missing_seconds = arrivals.seconds_per_row, num_missing * chunk_seconds
        if self._has_some and 0 < chunk_seconds < pace and now - self._began_at >= missing_seconds:
            return True
        has_begun = self._has_some or arrivals.at >= self._began_at
        stall = max(STALL_SECONDS, 4 * pace, min(missing_seconds, FIRST_ROW_SECONDS))
        return now - max(self._began_at, arrivals.at) >= (stall if has_begun else FIRST_ROW_SECONDS)


Marks = tuple[tuple[int, bytes], ...]
"""What chunks depend on beside their tokens, LoRA and media: (first chunk, fingerprint), ascending."""


@dataclass(frozen=True)
class KeyContext:
    """What a request adds to the engine's block hashes to make chunk keys."""

    marks: Marks = ()
    cache_salt: str = ""
    tenant: bytes = b""
    namespace: bytes = b""  # the engine's, or since its last reset another one

    def chunk_keys(self, hashes: Sequence[bytes], first_chunk: int = 0) -> bytes:
        """Join the keys of chunks from ``first_chunk`` on, which are named by the hashes of their last
        blocks.
        """
        joined, done, fingerprint = [], 0, b""
        for edge, following in (*self.marks, (first_chunk + len(hashes), b"")):
            end = min(max(done, edge - first_chunk), len(hashes))
            joined.append(keys.chunk_keys(hashes[done:end], fingerprint, self.cache_salt, GROUP))
            done, fingerprint = end, following
        return b"".join(joined)

    def row_keys(self, hashes: Sequence[bytes], first_chunk: int = 0) -> bytes:
        """As the sidecar knows them: each behind its namespace."""
        names, size = self.chunk_keys(hashes, first_chunk), KEY_BYTES
        return b"".join([self.namespace + names[at : at + size] for at in range(0, len(names), size)])


@dataclass(frozen=True)
class LoadJob:
    """Fill blocks of a request from consecutive chunks. Without chunks: report it as failed.

    It is cut into pieces where it is copied: the engine's scheduler has no time for it.
    """

    request_id: str
    blocks: tuple[int, ...]  # ids in the engine's KV
    found: Found | None = None  # its chunks
    first_block: int = 0  # within the first chunk
    blocks_per_chunk: int = 1

    @classmethod
    def from_offer(
        cls, request_id: str, grid: Grid, offer: Offer, num_tokens: int, blocks: Sequence[int]
    ) -> LoadJob:
        """Load the first ``num_tokens`` (> 0) of an offer; ``blocks`` are the request's from its start."""
        first, end = offer.start // grid.block_tokens, (offer.start + num_tokens) // grid.block_tokens
        chunks = slice(first // grid.blocks_per_chunk, ceil_div(end, grid.blocks_per_chunk))
        found = Found(offer.found.rows[chunks], offer.found.generations[chunks])
        in_chunk = first % grid.blocks_per_chunk
        return cls(request_id, tuple(blocks[first:end]), found, in_chunk, grid.blocks_per_chunk)

    def pieces(self) -> Iterator[Piece]:
        """Cut it at the edges of chunks."""
        start, first_block = 0, self.first_block
        for slot in self.found.slots() if self.found is not None else ():
            end = start + self.blocks_per_chunk - first_block
            yield Piece(slot, first_block, self.blocks[start:end])
            start, first_block = end, 0


@dataclass(frozen=True)
class StoreJob:
    """Store consecutive full chunks of a request."""

    job_id: int
    request_id: str
    first_chunk: int
    hashes: tuple[bytes, ...]  # of each chunk's last block
    blocks: tuple[int, ...]  # blocks_per_chunk ids per chunk
    context: KeyContext


@dataclass
class StepMeta:
    """From the scheduler half to every worker half, once per engine step."""

    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)  # their blocks are given away in this step
    held: list[str] = field(default_factory=list)  # finished; their blocks wait for our stores
    is_idle: bool = False  # nothing is computed in this step
    timed_step: int = 0  # not 0: say when the step is over


@dataclass(frozen=True)
class EngineIdentity:
    """Whose bytes these are and how they lie. The workers know it first, the scheduler half needs it."""

    namespace: bytes
    private_reason: str
    grid: Grid
    chunk_bytes: int  # of the largest column
    num_columns: int
    model: str


@dataclass
class WorkerReport:
    """From the worker halves to the scheduler half, once per engine step when there is something to say."""

    stores_ended: Counter[int] = field(default_factory=Counter)  # job id -> ranks
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


class PrefillRate:
    """Tokens per second of the engine's prefill, from timed steps. Steps may overlap (async scheduling)."""

    MIN_STEP_TOKENS = 256
    """Smaller steps are dominated by fixed costs."""

    _WEIGHT = 0.3

    def __init__(self) -> None:
        self.tokens_per_second = 0.0  # 0: not known yet
        self._steps: dict[int, tuple[int, float]] = {}  # step -> (tokens, time it was scheduled)
        self._num_steps = 0
        self._last_end = 0.0

    def begin(self, num_tokens: int, now: float) -> int:
        """Time a step of ``num_tokens``; returns its number, 0 when it is too small to tell something."""
        if num_tokens < self.MIN_STEP_TOKENS:
            return 0
        self._num_steps += 1
        self._steps[self._num_steps] = (num_tokens, now)
        return self._num_steps

    def end(self, step: int, now: float) -> None:
        """The step is over; unknown numbers are ignored."""
        num_tokens, began = self._steps.pop(step, (0, now))
        seconds = now - max(began, self._last_end)
        self._last_end = now
        if seconds > 0 and num_tokens:
            rate = num_tokens / seconds
            known = self.tokens_per_second
            self.tokens_per_second = rate if not known else known + self._WEIGHT * (rate - known)
