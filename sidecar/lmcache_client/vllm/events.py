"""Translates chunks that came into the sidecar's memory, or left it, to vLLM's KV events."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core import kv_cache_utils

from lmcache_client.core.events import Chunk
from lmcache_client.core.grid import Grid

MEDIUM = "CPU"
"""vLLM's name for host memory."""


class ChunkDescription(NamedTuple):
    """The content of the events about a chunk. It needs about 2 KiB, as an event would need 10 KiB."""

    block_hashes: tuple[Any, ...]
    parent_block_hash: Any
    token_ids: array[int]
    lora_id: int | None
    lora_name: str | None
    extra_keys: Any


def describe(chunk: Chunk, grid: Grid) -> ChunkDescription:
    """Return what vLLM's own events would say about a chunk's blocks."""
    request: Any = chunk.request
    group, lora = grid.stored[0], request.lora_request
    first, end = chunk.number * grid.chunk_tokens, (chunk.number + 1) * grid.chunk_tokens
    hashes, step = request.block_hashes, grid.hash_tokens
    before = kv_cache_utils.maybe_convert_block_hash(hashes[first // step - 1]) if first else None
    hashes_per_block = group.block_tokens // step  # a block's hash is the last hash in it
    return ChunkDescription(
        block_hashes=tuple(
            kv_cache_utils.maybe_convert_block_hash(block_hash)
            for block_hash in hashes[first // step : end // step][hashes_per_block - 1 :: hashes_per_block]
        ),
        parent_block_hash=before,
        token_ids=array("I", request.all_token_ids[first:end]),
        lora_id=lora.adapter_id if lora else None,
        lora_name=lora.name if lora else None,
        extra_keys=_extra_keys(request, first, end, group.block_tokens),
    )


def stored_event(chunk: ChunkDescription, grid: Grid) -> BlockStored:
    """Create the event for a chunk's blocks in memory, like vLLM's event for blocks in its own memory."""
    group = grid.stored[0]
    return BlockStored(
        block_hashes=list(chunk.block_hashes),
        parent_block_hash=chunk.parent_block_hash,
        token_ids=chunk.token_ids.tolist(),
        block_size=group.block_tokens,
        lora_id=chunk.lora_id,
        medium=MEDIUM,
        lora_name=chunk.lora_name,
        extra_keys=chunk.extra_keys,
        group_idx=group.group,
    )


def removed_event(chunk: ChunkDescription, grid: Grid) -> BlockRemoved:
    """Create the event for the blocks of a chunk that left memory."""
    return BlockRemoved(list(chunk.block_hashes), medium=MEDIUM, group_idx=grid.stored[0].group)


def _extra_keys(request: Any, first: int, end: int, block_tokens: int) -> Any:
    """Return the extra keys with which vLLM hashed the blocks, an entry per block."""
    extra_keys, medium = [], 0
    for start in range(first, end, block_tokens):
        keys, medium = kv_cache_utils.generate_block_hash_extra_keys(
            request, start, start + block_tokens, medium
        )
        extra_keys.append(keys)
    # Since vLLM 0.30, extra keys are tagged in hashes but not in events.
    return getattr(kv_cache_utils, "to_event_extra_keys", list)(extra_keys)
