"""KV groups: layers whose KV lives and is dropped together, and what a hit needs of each kind. Pure.

A request resumes at ``end``: a token that is the edge of a chunk. What it needs of a group is what attention
(or the recurrence) will read of the tokens before that edge, by the rules of vLLM's KV cache managers
(``get_num_skipped_tokens`` in ``v1/core/single_type_kv_cache_manager.py``, 0.32)::

    full attention      [0 .................................. end)   all chunks
    sliding window                   [end - window + 1 ...... end)   the last chunks
    chunked attention                  [end // window * window .. end)   the last, or none
    state                                             [end - 1, end)   the last chunk's snapshot

So a chunk's row holds only the blocks that a hit can use (``stored_blocks``), and a hit of a group that is
not full may lie behind chunks that are not there.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache.units import ceil_div


class GroupKind(enum.Enum):
    """What is read of the tokens before a point; the values are those of ``kvcache.proto``."""

    FULL_ATTENTION = 1
    SLIDING_WINDOW = 2
    CHUNKED_ATTENTION = 3
    STATE = 4  # one snapshot holds all that was before: Mamba, linear attention


@dataclass(frozen=True)
class KVGroup:
    """Layers whose KV lives and is dropped together."""

    group: int
    block_tokens: int
    chunk_bytes: int
    """Of one column of a chunk's row: ``stored_blocks`` of it. 0: the group stores nothing, has no keys and
    limits no hit."""
    window_tokens: int = 0
    """The window, with what the engine retains beyond it; the length of an attention chunk; else 0."""
    kind: GroupKind = GroupKind.FULL_ATTENTION

    def __str__(self) -> str:
        window = f" of {self.window_tokens} tokens" if self.window_tokens else ""
        return f"{self.kind.name.lower().replace('_', ' ')}{window}, {self.chunk_bytes} bytes per chunk"

    @property
    def is_full(self) -> bool:
        """Does a hit need all chunks?"""
        return self.kind is GroupKind.FULL_ATTENTION


def first_needed_token(group: KVGroup, end: int) -> int:
    """Return the first token whose KV is read by who resumes at ``end``; ``end`` itself: none is."""
    if group.kind is GroupKind.SLIDING_WINDOW:
        return max(0, end - group.window_tokens + 1)
    if group.kind is GroupKind.CHUNKED_ATTENTION:
        return end // group.window_tokens * group.window_tokens
    return max(0, end - 1) if group.kind is GroupKind.STATE else 0


def first_needed_chunk(group: KVGroup, num_chunks: int, chunk_tokens: int) -> int:
    """Return the first chunk that a hit of ``num_chunks`` needs; ``num_chunks``: it needs none."""
    if not group.chunk_bytes:
        return num_chunks
    return first_needed_token(group, num_chunks * chunk_tokens) // chunk_tokens


def stored_blocks(group: KVGroup, chunk_tokens: int) -> int:
    """Return how many of a chunk's blocks, its last, its row holds: those that some hit reads."""
    if group.kind is GroupKind.FULL_ATTENTION:
        return chunk_tokens // group.block_tokens
    if group.kind is GroupKind.STATE:
        return 1
    most = group.window_tokens - 1
    if group.kind is GroupKind.CHUNKED_ATTENTION:  # before an edge lie these, or fewer, of an attention chunk
        most = group.window_tokens - math.gcd(group.window_tokens, chunk_tokens)
    return min(ceil_div(most, group.block_tokens), chunk_tokens // group.block_tokens)


def longest_hit(
    groups: Sequence[KVGroup],
    chunk_tokens: int,
    residency: Sequence[bytes | bytearray],
    at_least: int,
    at_most: int,
) -> int:
    """Return the largest number of leading chunks, between the bounds, at whose end a request can resume.

    ``residency``: one byte per chunk and group, 0: not there. Chunks before ``at_least`` need not be there:
    the engine has them (an engine whose own hit ends inside a chunk needs that chunk). ``at_least``: none.
    """
    pairs = [(group, present) for group, present in zip(groups, residency, strict=True) if group.chunk_bytes]
    num_chunks = max(at_least, min([at_most, *(len(present) for _, present in pairs)]))
    for group, present in pairs:
        if group.is_full and (hole := present.find(0, at_least, num_chunks)) >= 0:
            num_chunks = hole
    windows = [(group, present) for group, present in pairs if not group.is_full]
    is_settled = False
    while not is_settled:
        is_settled = True
        for group, present in windows:
            first = max(at_least, first_needed_chunk(group, num_chunks, chunk_tokens))
            # Who resumes after a hole, but not later than here, needs what is missing there.
            if (hole := present.rfind(0, first, num_chunks)) >= 0:
                num_chunks, is_settled = hole, False
    return num_chunks
