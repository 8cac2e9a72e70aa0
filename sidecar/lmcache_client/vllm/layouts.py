"""The meaning of a block's bytes, and the configurations of vLLM that can be cached.

Two engines can share KV if these properties of a block are the same in both:

- the order of its content: that of the attention backend, and on a CPU the packing of its instruction set
- the order of heads and tokens
- the data type and the sizes

A *content id* contains all of them. The ids of all layers are part of the namespace.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from lmcache_client.core.layout import Layout, by_block
from lmcache_client.errors import UnsupportedError
from lmcache_client.vllm.places import max_parts

KNOWN_CONTENTS: Mapping[tuple[str, str], str] = {
    # Per block and head: K transposed [head_size, tokens], then V [tokens, head_size].
    ("CPU_ATTN", "vec"): "cpu-vec-1"
}
"""(attention backend, instruction set) -> id of a content order that a golden test verifies.

Ids of other content include the engine's minor version, so that only engines of that version share it.
"""


def check_supported(vllm_config: Any, kv_cache_config: Any, world_nodes: int = 1) -> None:
    """Raise UnsupportedError if the engine can't be cached. Its ranks run on ``world_nodes`` nodes."""
    zeroes_blocks = getattr(kv_cache_config, "needs_kv_cache_zeroing", False)
    if zeroes_blocks and getattr(vllm_config, "use_v2_model_runner", False):
        # ``GPUModelRunner.update_requests`` in v1/worker/gpu runs before ``handle_preemptions``. A copy that
        # ends in between would be committed with zeros.
        raise UnsupportedError(
            "vLLM's V2 model runner zeroes blocks of states, or of KV in several precisions, while they may"
            " still be copied; start vLLM with VLLM_USE_V2_MODEL_RUNNER=0 to cache"
        )
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise UnsupportedError(f"{name} > 1 is not supported yet")
    # Ray and torchrun place ranks on nodes of which the configuration does not know.
    num_nodes = max(parallel.nnodes_within_dp, math.ceil(world_nodes / parallel.data_parallel_size))
    if num_nodes > max_parts(parallel):
        raise UnsupportedError(
            f"a data-parallel rank spans {num_nodes} nodes, which the cache supports only with vLLM's own"
            " launcher; start vLLM on each node with --nnodes and --distributed-executor-backend mp, or lower"
            " tensor x pipeline parallel size to the GPUs of a node"
        )
    if parallel.enable_elastic_ep:
        raise UnsupportedError(
            "elastic expert parallelism changes ranks while the engine runs;"
            " start vLLM without --enable-elastic-ep to cache"
        )
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise UnsupportedError(
            "sleep mode frees KV without notice to the connector, even during a copy; "
            "start vLLM without --enable-sleep-mode to cache"
        )
    # vLLM 0.29 and 0.30 refuse this setting with any connector.
    if getattr(getattr(vllm_config, "aux_output_config", None), "enable_return_routed_experts", False):
        raise UnsupportedError(
            "vLLM knows only the experts of tokens that it computes, and returns others for loaded tokens;"
            " start vLLM without --enable-return-routed-experts to cache"
        )
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise UnsupportedError(
            'kv_load_failure_policy is not "recompute", so a failed load would fail its request; '
            "set it in --kv-transfer-config"
        )


def check_stages(vllm_config: Any, layouts: Collection[Layout]) -> None:
    """Raise UnsupportedError if pipeline stages may differ: a rank sees only its own stage's layers."""
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
    """Return the content id of a layer: layers with equal ids have equal bytes for equal KV.

    ``kv``: the engine's view ``[blocks, heads, tokens, content]``, in any physical order.
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
