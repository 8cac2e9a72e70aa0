"""Digests of the KV of requests, taken just before their blocks are freed."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import torch

Digests = list[list[str]]
"""A digest of each full block's bytes, by layer of each rank. "" if the block slid out before."""


def watch(
    core: Any, note: Callable[[str, Digests], None], is_wanted: Callable[[], bool] = lambda: True
) -> None:
    """Call ``note`` with the id and the KV of each request of an EngineCore that finishes. The KV is empty if
    ``is_wanted`` returns False.
    """
    scheduler = core.scheduler
    finished = scheduler._connector_finished

    def note_and_finish(request: Any) -> Any:
        tables = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        num_computed = request.num_computed_tokens
        blocks = [tables[group][: num_computed // tokens] for group, tokens in layers(scheduler)]
        by_rank = core.model_executor.collective_rpc(_of_blocks, args=(blocks,)) if is_wanted() else []
        note(request.request_id, list(itertools.chain(*by_rank)))
        return finished(request)

    scheduler._connector_finished = note_and_finish


def layers(scheduler: Any) -> list[tuple[int, int]]:
    """KV group and block size in tokens of each layer, in the order of the model."""
    from vllm.model_executor.models.utils import extract_layer_index

    by_index = {
        extract_layer_index(name): (number, group.kv_cache_spec.block_size)
        for number, group in enumerate(scheduler.kv_cache_config.kv_cache_groups)
        for name in group.layer_names
    }
    return [by_index[index] for index in sorted(by_index)]


def _of_blocks(worker: Any, blocks: list[list[int]]) -> Digests:
    """Digests of these blocks, which are listed by layer."""
    caches = worker.worker.model_runner.kv_caches
    return [
        [_digest(kv[block]) if block else "" for block in ids] for kv, ids in zip(caches, blocks, strict=True)
    ]


def _digest(block: torch.Tensor) -> str:
    return hashlib.sha256(block.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
