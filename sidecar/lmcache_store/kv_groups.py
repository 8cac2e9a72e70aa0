"""KV groups: layers whose KV is stored and dropped together, and the KV that a hit needs of each kind. Pure.

A chunk is the cache's unit, a fixed number of tokens. A hit of some leading chunks ends at the token ``end``,
where the engine starts to compute. Of each group, the hit needs the KV before ``end`` that attention (or the
recurrence) will read. The rules are those of vLLM's KV cache managers
(``get_num_skipped_tokens`` in ``v1/core/single_type_kv_cache_manager.py``, 0.32)::

    full attention      [0 .................................. end)   all chunks
    sliding window                   [end - window + 1 ...... end)   the last chunks
    chunked attention                  [end // window * window .. end)   the last chunks, or none
    state                                             [end - 1, end)   the last chunk's snapshot

A **row** is what the cache stores of one chunk in one group. It therefore holds only the blocks that a hit
can use (``stored_blocks``). A **column** is one rank's part of a row. In a group without full attention, the
first chunks of a hit may be missing.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_store.common.units import ceil_div


class GroupKind(enum.Enum):
    """Kinds of layers, by the earlier tokens that they read. The values are those of ``kvcache.proto``."""

    FULL_ATTENTION = 1
    SLIDING_WINDOW = 2
    CHUNKED_ATTENTION = 3
    STATE = 4  # one snapshot represents all earlier tokens: Mamba, linear attention


@dataclass(frozen=True)
class KVGroup:
    """Layers whose KV is stored and dropped together."""

    group: int
    block_tokens: int
    chunk_bytes: int
    """Bytes of one column of a chunk's row (``stored_blocks`` blocks). If 0, the group stores nothing, has no
    keys and limits no hit."""
    window_tokens: int = 0
    """Tokens of the sliding window or of one attention chunk; 0 for other kinds. A sliding window includes
    tokens that vLLM retains before the window (``extra_retained_tokens``)."""
    kind: GroupKind = GroupKind.FULL_ATTENTION

    def __str__(self) -> str:
        window = f" of {self.window_tokens} tokens" if self.window_tokens else ""
        return f"{self.kind.name.lower().replace('_', ' ')}{window}, {self.chunk_bytes} bytes per chunk"

    @property
    def is_full(self) -> bool:
        """Whether a hit needs all chunks of this group."""
        return self.kind is GroupKind.FULL_ATTENTION


def first_needed_token(group: KVGroup, end: int) -> int:
    """Return the first token whose KV a hit that ends at ``end`` needs; ``end`` if it needs none."""
    if group.kind is GroupKind.SLIDING_WINDOW:
        return max(0, end - group.window_tokens + 1)
    if group.kind is GroupKind.CHUNKED_ATTENTION:
        return end // group.window_tokens * group.window_tokens
    return max(0, end - 1) if group.kind is GroupKind.STATE else 0


def first_needed_chunk(group: KVGroup, num_chunks: int, chunk_tokens: int) -> int:
    """Return the first chunk that a hit of ``num_chunks`` needs; ``num_chunks`` if it needs none."""
    if not group.chunk_bytes:
        return num_chunks
    return first_needed_token(group, num_chunks * chunk_tokens) // chunk_tokens


def stored_blocks(group: KVGroup, chunk_tokens: int) -> int:
    """Return how many blocks at the end of a chunk its row holds: those that a hit may read."""
    if group.kind is GroupKind.FULL_ATTENTION:
        return chunk_tokens // group.block_tokens
    if group.kind is GroupKind.STATE:
        return 1
    max_tokens = group.window_tokens - 1
    if group.kind is GroupKind.CHUNKED_ATTENTION:
        # This is the largest distance from the start of an attention chunk to the end of a cache chunk in it.
        max_tokens = group.window_tokens - math.gcd(group.window_tokens, chunk_tokens)
    return min(ceil_div(max_tokens, group.block_tokens), chunk_tokens // group.block_tokens)


def longest_hit(
    groups: Sequence[KVGroup],
    chunk_tokens: int,
    residency: Sequence[bytes | bytearray],
    at_least: int,
    at_most: int,
) -> int:
    """Return the longest hit between the bounds, as a number of leading chunks.

    ``residency`` has one byte per chunk for each group, 0 if the chunk is missing. The engine itself has the
    first ``at_least`` chunks as a whole, so they may be missing. The result is ``at_least`` if there is no
    longer hit.
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
            # Every hit that ends between the missing chunk and num_chunks needs that chunk, too. So the hit
            # must end before it.
            if (hole := present.rfind(0, first, num_chunks)) >= 0:
                num_chunks, is_settled = hole, False
    return num_chunks
