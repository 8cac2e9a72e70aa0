"""Translates chunks that came into the sidecar's memory, or left it, to vLLM's KV events."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core import kv_cache_utils

from lmcache.engines.core.events import Chunk
from lmcache.engines.core.grid import Grid

MEDIUM = "CPU"
"""vLLM's name for host memory."""


def stored_event(chunk: Chunk, grid: Grid) -> BlockStored:
    """Create the event for a chunk's blocks in memory, like vLLM's event for blocks in its own memory."""
    request: Any = chunk.request
    group, lora = grid.stored[0], request.lora_request
    first, end = chunk.number * grid.chunk_tokens, (chunk.number + 1) * grid.chunk_tokens
    hashes, step = request.block_hashes, grid.hash_tokens
    before = kv_cache_utils.maybe_convert_block_hash(hashes[first // step - 1]) if first else None
    return BlockStored(
        block_hashes=_converted(hashes[first // step : end // step], grid),
        parent_block_hash=before,
        token_ids=list(request.all_token_ids[first:end]),
        block_size=group.block_tokens,
        lora_id=lora.adapter_id if lora else None,
        medium=MEDIUM,
        lora_name=lora.name if lora else None,
        extra_keys=_extra_keys(request, first, end, group.block_tokens),
        group_idx=group.group,
    )


def removed_event(hashes: tuple[bytes, ...], grid: Grid) -> BlockRemoved:
    """Create the event for the blocks of a chunk that left memory."""
    return BlockRemoved(_converted(hashes, grid), medium=MEDIUM, group_idx=grid.stored[0].group)


def _converted(hashes: Any, grid: Grid) -> list[Any]:
    """Return the hashes of a chunk's blocks in vLLM's form. A block's hash is the last hash in it."""
    step = grid.stored[0].block_tokens // grid.hash_tokens
    return [kv_cache_utils.maybe_convert_block_hash(each) for each in hashes[step - 1 :: step]]


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
