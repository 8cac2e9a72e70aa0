"""Files with the KV of prompts, saved just before their blocks are freed, to compare KV by numbers.

The KV of answers is left out, because answers differ where KV differs a little.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from testing.engine.kv_digests import layers


def watch(core: Any, folder: Callable[[], str | None]) -> None:
    """Save the KV of each prompt whose request an EngineCore finishes, while ``folder`` returns a folder."""
    scheduler = core.scheduler
    finished = scheduler._connector_finished

    def save_and_finish(request: Any) -> Any:
        if (target := folder()) is not None:
            tables = scheduler.kv_cache_manager.get_block_ids(request.request_id)
            num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            blocks = [tables[group][: num_tokens // tokens] for group, tokens in layers(scheduler)]
            stem = str(Path(target) / request.request_id.split("-")[0])
            core.model_executor.collective_rpc(_save, args=(blocks, stem))
        return finished(request)

    scheduler._connector_finished = save_and_finish


def read(folder: Path, request_id: str) -> list[torch.Tensor]:
    """Return the KV of a finished request's prompt: the content of its full blocks, by layer of each rank."""
    paths = sorted(folder.glob(f"{request_id}.rank*"))
    return [layer for path in paths for layer in torch.load(path)]


def _save(worker: Any, blocks: list[list[int]], stem: str) -> None:
    caches = worker.worker.model_runner.kv_caches
    content = [kv[torch.tensor(ids, dtype=torch.int64)] for kv, ids in zip(caches, blocks, strict=True)]
    torch.save(content, f"{stem}.rank{worker.worker.rank}")
