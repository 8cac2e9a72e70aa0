"""What the bytes of a block mean, and how vLLM must be set up for them to be cached.

Two engines can share if a block means the same to both: the same content order (the attention backend's, on
the CPU also the packing of its instruction set), the same order of heads and tokens inside a block, the same
data type and sizes. A *content id* says all of that; the ids of all layers are part of the namespace.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from lmcache.engines.core.layout import Layout, by_block
from lmcache.engines.errors import UnsupportedError

KNOWN_CONTENTS: Mapping[tuple[str, str], str] = {
    # Per block and head: K transposed [head_size, tokens], then V [tokens, head_size].
    ("CPU_ATTN", "vec"): "cpu-vec-1",
}
"""(attention backend, instruction set) -> id of a content order whose bytes a golden test pins.

The id of any other content holds the engine's version: its bytes are shared within one minor release only.
"""


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise UnsupportedError when the engine is set up in a way that can't be cached."""
    zeroes_blocks = getattr(kv_cache_config, "needs_kv_cache_zeroing", False)
    if zeroes_blocks and getattr(vllm_config, "use_v2_model_runner", False):
        # ``GPUModelRunner.update_requests`` in v1/worker/gpu comes before ``handle_preemptions``: a copy may
        # end in between, and would be committed with zeros.
        raise UnsupportedError(
            "vLLM's second model runner zeroes blocks of states, or of KV in several precisions, before it"
            " says whose they were; start vLLM with VLLM_USE_V2_MODEL_RUNNER=0 to cache"
        )
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise UnsupportedError(f"{name} > 1 is not supported yet")
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise UnsupportedError(
            "sleep mode takes KV away without a word to the connector, also under a copy; "
            "start vLLM without --enable-sleep-mode to cache"
        )
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise UnsupportedError(
            'kv_load_failure_policy is not "recompute": a failed load would fail the request; '
            "set it in --kv-transfer-config"
        )


def check_stages(vllm_config: Any, layouts: Collection[Layout]) -> None:
    """Raise UnsupportedError when pipeline stages may differ unseen: each rank sees only its own layers."""
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        return
    if len(layouts) != 1:
        raise UnsupportedError("with pipeline stages only one KV group can be cached yet")
    if len({pages.shape[1] for layout in layouts for pages in layout.pages}) != 1:
        raise UnsupportedError("with pipeline stages all layers must have blocks of one size")
    if getattr(vllm_config.cache_config, "kv_cache_dtype_skip_layers", None):
        raise UnsupportedError("kv_cache_dtype_skip_layers can't be cached with pipeline stages")


def content_id(
    kv: torch.Tensor, num_blocks: int, backend: str, instruction_set: str, engine_version: str
) -> str:
    """Say what the bytes of a block of this layer mean; equal ids mean equal bytes for equal KV.

    ``kv`` is the engine's view ``[blocks, heads, tokens, content]``, in whatever physical order.
    """
    known = KNOWN_CONTENTS.get((backend, instruction_set))
    minor = ".".join(engine_version.split(".")[:2])
    content = known or f"{backend}-{instruction_set}@{minor}"
    blocks = by_block(kv, num_blocks)
    # Physical order of the dimensions inside a block, outermost first; those of size 1 have no order.
    sizes, strides = blocks.shape[1:], blocks.stride()[1:]
    order = sorted((dim for dim, size in enumerate(sizes) if size > 1), key=lambda dim: -strides[dim])
    dtype = str(kv.dtype).removeprefix("torch.")
    return f"{content}/{dtype}/{'x'.join(map(str, sizes))}/{''.join(map(str, order))}"
