"""What comes into the sidecar's memory and leaves it, in vLLM's own KV events, for vLLM's own publisher."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core import kv_cache_utils

from lmcache.engines.core.events import Chunk
from lmcache.engines.core.grid import Grid

MEDIUM = "CPU"
"""vLLM's word for host memory."""


def stored_event(chunk: Chunk, grid: Grid) -> BlockStored:
    """The blocks of a chunk that is in memory now, as vLLM says it of blocks in its own."""
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
    """The blocks of a chunk that left."""
    return BlockRemoved(_converted(hashes, grid), medium=MEDIUM, group_idx=grid.stored[0].group)


def _converted(hashes: Any, grid: Grid) -> list[Any]:
    """A block's hash is its last one."""
    step = grid.stored[0].block_tokens // grid.hash_tokens
    return [kv_cache_utils.maybe_convert_block_hash(each) for each in hashes[step - 1 :: step]]


def _extra_keys(request: Any, first: int, end: int, block_tokens: int) -> Any:
    """As vLLM hashed them, an entry per block."""
    found, medium = [], 0
    for start in range(first, end, block_tokens):
        keys, medium = kv_cache_utils.generate_block_hash_extra_keys(
            request, start, start + block_tokens, medium
        )
        found.append(keys)
    # Since vLLM 0.30 the hashes have tagged ones, and the events don't.
    return getattr(kv_cache_utils, "to_event_extra_keys", list)(found)
