"""Digests of requests' KV, taken at the last moment that their blocks are their own."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import torch

Digests = list[list[str]]
"""Per layer of each rank: a digest of each full block's bytes; "": it slid out before."""


def watch(
    core: Any, note: Callable[[str, Digests], None], is_wanted: Callable[[], bool] = lambda: True
) -> None:
    """Have ``note`` called with the id and the KV of each request of an EngineCore that finishes; without
    the KV where it is not wanted.
    """
    scheduler = core.scheduler
    finished = scheduler._connector_finished

    def watched(request: Any) -> Any:
        tables = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        num_computed = request.num_computed_tokens
        blocks = [tables[group][: num_computed // tokens] for group, tokens in layers(scheduler)]
        by_rank = core.model_executor.collective_rpc(_of_blocks, args=(blocks,)) if is_wanted() else []
        note(request.request_id, list(itertools.chain(*by_rank)))
        return finished(request)

    scheduler._connector_finished = watched


def layers(scheduler: Any) -> list[tuple[int, int]]:
    """Of each layer, in the model's order: its KV group, and the tokens of its blocks."""
    from vllm.model_executor.models.utils import extract_layer_index

    found = {
        extract_layer_index(name): (number, group.kv_cache_spec.block_size)
        for number, group in enumerate(scheduler.kv_cache_config.kv_cache_groups)
        for name in group.layer_names
    }
    return [found[index] for index in sorted(found)]


def _of_blocks(worker: Any, blocks: list[list[int]]) -> Digests:
    """``blocks`` per layer."""
    caches = worker.worker.model_runner.kv_caches
    return [
        [_digest(kv[block]) if block else "" for block in ids] for kv, ids in zip(caches, blocks, strict=True)
    ]


def _digest(block: torch.Tensor) -> str:
    return hashlib.sha256(block.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
