"""Digests of the KV of requests, taken just before their blocks are freed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import xxhash

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
    return [_of_layer(kv, ids) for kv, ids in zip(caches, blocks, strict=True)]


def _of_layer(kv: torch.Tensor, ids: list[int]) -> list[str]:
    """Digests of blocks of one layer. They are copied to the host together: on a GPU each copy waits."""
    content = kv[torch.tensor(ids, dtype=torch.int64, device=kv.device)].contiguous().view(torch.uint8).cpu()
    return [
        xxhash.xxh3_128_hexdigest(content[number].numpy().tobytes())[:16] if block else ""
        for number, block in enumerate(ids)
    ]
