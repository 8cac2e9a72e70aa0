"""How a request's tokens are cut: arithmetic over tokens, hashes, chunks and each KV group's blocks. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lmcache.kv_groups import KVGroup, first_needed_token, stored_blocks

BlockTables = Sequence[Sequence[int]]
"""A request's blocks from its start, as ids in the engine's KV: a list per KV group of the engine."""

NULL_BLOCK = 0
"""Stands in a block table where the engine holds nothing: what a window left behind. Neither read nor
written."""


@dataclass(frozen=True)
class Grid:
    """Three cuts of a request's tokens: the engine's chained **hashes**; **blocks**, which each KV group has
    of its own size and the engine's local hits end on; **chunks**, which are stored.

    The edges of chunks are edges of all others, but not the reverse: with full attention alone a load may
    begin and end inside a chunk. Else it ends with one, where the rows of all groups have what is needed.
    """

    chunk_tokens: int
    """A multiple of all other sizes."""
    hash_tokens: int
    """Tokens of one of the engine's block hashes."""
    groups: tuple[KVGroup, ...]
    """Of the engine; ``KVGroup.group`` is a group's place in its block tables."""

    @cached_property
    def stored(self) -> tuple[KVGroup, ...]:
        """The groups that have rows."""
        return tuple(group for group in self.groups if group.chunk_bytes)

    @cached_property
    def is_full(self) -> bool:
        """Do all groups keep all tokens?"""
        return all(group.is_full for group in self.groups)

    @property
    def fails_by_block(self) -> bool:
        """Does the engine take back single blocks of a failed load, and keep what is before? With several KV
        groups, or a window, it begins the request again."""
        return len(self.groups) == 1 and self.is_full

    @cached_property
    def step_tokens(self) -> int:
        """Edges of the blocks of all groups: what is loaded begins on one."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    def blocks_per_chunk(self, group: KVGroup) -> int:
        """Blocks of one full chunk."""
        return self.chunk_tokens // group.block_tokens

    def blocks_per_row(self, group: KVGroup) -> int:
        """Of these, how many its row holds: the last."""
        return stored_blocks(group, self.chunk_tokens)

    def num_full_chunks(self, num_hashes: int, num_tokens: int) -> int:
        """Leading chunks that have a key (all their hashes) and lie within ``num_tokens``."""
        return min(num_hashes * self.hash_tokens, num_tokens) // self.chunk_tokens

    def num_loadable_chunks(self, num_hashes: int, num_tokens: int) -> int:
        """Leading chunks that can be loaded, at least in part: one token is left to compute."""
        return self.num_full_chunks(num_hashes, num_tokens if self.is_full else num_tokens - 1)

    def chunk_hashes(self, block_hashes: Sequence[bytes], first: int, end: int) -> list[bytes]:
        """Per chunk from ``first`` to ``end``: its last block's hash, which folds in all tokens before."""
        step = self.chunk_tokens // self.hash_tokens
        return list(map(bytes, block_hashes[(first + 1) * step - 1 : end * step : step]))

    def loadable_tokens(self, num_computed_tokens: int, num_tokens: int, num_chunks: int) -> int:
        """Return what a load could add to ``num_computed_tokens`` when so many leading chunks can be read.

        At least one of the ``num_tokens`` tokens is left to compute: the engine samples from the last one.
        """
        end = self._loadable_end(num_tokens, num_chunks)
        return 0 if num_computed_tokens % self.step_tokens else max(0, end - num_computed_tokens)

    def num_held_chunks(self, num_computed_tokens: int, num_tokens: int, num_chunks: int) -> int:
        """Return of how many leading ones of so many chunks the engine has all that could be loaded."""
        is_all = num_computed_tokens >= self._loadable_end(num_tokens, num_chunks)
        return num_chunks if is_all else num_computed_tokens // self.chunk_tokens

    def _loadable_end(self, num_tokens: int, num_chunks: int) -> int:
        edge = self.step_tokens if self.is_full else self.chunk_tokens
        return min(num_chunks * self.chunk_tokens, (num_tokens - 1) // edge * edge)

    def needed_blocks(self, group: KVGroup, start: int, end: int) -> range:
        """Blocks to fill for a request to resume at token ``end``; it has all that is before ``start``."""
        first = max(first_needed_token(group, end), start)
        return range(first // group.block_tokens, end // group.block_tokens)
