"""Arithmetic between a request's tokens, hashes, chunks and the blocks of each KV group. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lmcache_store.common.units import ceil_div
from lmcache_store.kv_groups import KVGroup, first_needed_token, stored_blocks

BlockTables = Sequence[Sequence[int]]
"""Ids of a request's blocks in the engine's KV, from the request's start: one list per KV group."""

NULL_BLOCK = 0
"""Id in a block table where the engine holds no block, for example because a window left it behind. Never
read or written."""


@dataclass(frozen=True)
class Grid:
    """Three divisions of a request's tokens:

    - **hashes**: the engine's chained block hashes
    - **blocks**: of a size per KV group; hits in the engine's own cache end at their edges
    - **chunks**: the unit of stores

    Every edge of a chunk is an edge of a block and of a hash. If all groups have full attention, a load may
    begin and end inside a chunk. Otherwise it ends at the edge of a chunk, where the rows of all groups have
    what later tokens need.
    """

    chunk_tokens: int
    """Tokens of a chunk, a multiple of all other sizes."""
    hash_tokens: int
    """Tokens of one of the engine's block hashes."""
    groups: tuple[KVGroup, ...]
    """All KV groups of the engine; ``KVGroup.group`` is a group's position in the block tables."""

    @cached_property
    def stored(self) -> tuple[KVGroup, ...]:
        """Groups that store rows."""
        return tuple(group for group in self.groups if group.chunk_bytes)

    @cached_property
    def is_full(self) -> bool:
        """True if all groups have full attention, which retains all tokens."""
        return all(group.is_full for group in self.groups)

    @property
    def fails_by_block(self) -> bool:
        """True if the engine recomputes only the failed blocks of a load, and later ones.

        With several KV groups or a window, the engine restarts the whole request.
        """
        return len(self.groups) == 1 and self.is_full

    @cached_property
    def step_tokens(self) -> int:
        """Tokens between two edges that the blocks of all groups share. Loads begin at such an edge."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    def blocks_per_chunk(self, group: KVGroup) -> int:
        """Return the number of blocks in a full chunk."""
        return self.chunk_tokens // group.block_tokens

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks of all groups hold this many tokens, if no window drops any."""
        return sum(ceil_div(num_tokens, group.block_tokens) for group in self.groups)

    def blocks_per_row(self, group: KVGroup) -> int:
        """Return how many blocks a row holds: the last ones of its chunk."""
        return stored_blocks(group, self.chunk_tokens)

    def num_full_chunks(self, num_hashes: int, num_tokens: int) -> int:
        """Return the number of leading chunks within ``num_tokens`` that have all their hashes."""
        return min(num_hashes * self.hash_tokens, num_tokens) // self.chunk_tokens

    def num_loadable_chunks(self, num_hashes: int, num_tokens: int) -> int:
        """Return the number of leading chunks that can be loaded, at least in part.

        One token is always left to compute.
        """
        return self.num_full_chunks(num_hashes, num_tokens if self.is_full else num_tokens - 1)

    def chunk_hashes(self, block_hashes: Sequence[bytes], first: int, end: int) -> list[bytes]:
        """Return the hash of each chunk from ``first`` to ``end``: that of its last block."""
        step = self.chunk_tokens // self.hash_tokens
        return list(map(bytes, block_hashes[(first + 1) * step - 1 : end * step : step]))

    def first_hashes(self, block_hashes: Sequence[bytes]) -> list[bytes]:
        """Return the hashes of the blocks in the first chunk, without the last."""
        return list(block_hashes[: self.chunk_tokens // self.hash_tokens - 1])

    def loadable_tokens(self, num_computed_tokens: int, num_tokens: int, num_chunks: int) -> int:
        """Return how many tokens a load of ``num_chunks`` leading chunks adds to ``num_computed_tokens``.

        At least one of the ``num_tokens`` tokens is left to compute, because the engine samples from it.
        """
        end = self._loadable_end(num_tokens, num_chunks)
        return 0 if num_computed_tokens % self.step_tokens else max(0, end - num_computed_tokens)

    def num_held_chunks(self, num_computed_tokens: int, num_tokens: int, num_chunks: int) -> int:
        """Return of how many of the ``num_chunks`` leading chunks the engine already has all loadable KV."""
        is_all = num_computed_tokens >= self._loadable_end(num_tokens, num_chunks)
        return num_chunks if is_all else num_computed_tokens // self.chunk_tokens

    def _loadable_end(self, num_tokens: int, num_chunks: int) -> int:
        edge = self.step_tokens if self.is_full else self.chunk_tokens
        return min(num_chunks * self.chunk_tokens, (num_tokens - 1) // edge * edge)

    def needed_blocks(self, group: KVGroup, start: int, end: int) -> range:
        """Return the blocks to fill so that a request with KV up to ``start`` can resume at token ``end``."""
        first = max(first_needed_token(group, end), start)
        return range(first // group.block_tokens, end // group.block_tokens)
