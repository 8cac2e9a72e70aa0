"""Lists everything that makes KV comparable. The namespace is a hash of this listing."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmcache_client.core import files
from lmcache_client.errors import UnnamedError
from lmcache_store.keys import Listed

_FILE_FORMATS = {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "bitsandbytes", "mistral"}
"""Values of ``load_format`` that read the safetensors files of the model's folder."""

GroupContents = tuple[Sequence["str | int"], Sequence[tuple[str, str]]]
"""A KV group: its kind and sizes, and (name, content id) of this rank's layers in their order of bytes."""


def weights_fingerprint(vllm_config: Any, began: float) -> str:
    """Hash the weights that the engine loaded since ``began`` (Unix time). May read all of them.

    Raises UnnamedError if the weights can't be identified.
    """
    load_format = str(vllm_config.load_config.load_format)
    if load_format == "dummy":
        raise UnnamedError("load format dummy loads random weights")
    if load_format not in _FILE_FORMATS:
        raise UnnamedError(
            f"load format {load_format} does not read the safetensors files of the model's folder, "
            "by which the cache identifies weights"
        )
    return files.fingerprint(model_dir(vllm_config), began)


def model_dir(vllm_config: Any) -> Path:
    """Return the directory of the model's files, which may not exist."""
    model = vllm_config.model_config
    # A branch may point to another commit by now. The configuration has the commit that was loaded.
    revision = getattr(model.hf_config, "_commit_hash", None) or model.revision
    return files.model_dir(model.model, revision, vllm_config.load_config.download_dir)


def private_reason(vllm_config: Any, has_fixed_hash_seed: bool) -> str:
    """Return why chunk keys are valid only in this engine process; empty if other processes can share them.

    Of vLLM's hash algorithms only ``sha256_cbor`` is accepted. ``sha256`` hashes pickles, which depend on the
    identity of equal strings. xxhash does not resist deliberate collisions.
    """
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm != "sha256_cbor":
        return (
            f"block hashes by {algorithm} can't be reproduced in other processes: "
            "start vLLM with --prefix-caching-hash-algo sha256_cbor"
        )
    if "PYTHONHASHSEED" not in os.environ and not has_fixed_hash_seed:
        return "block hashes have a random seed: set PYTHONHASHSEED=0"
    return ""


def listing(
    vllm_config: Any,
    weights: str | None,
    groups: Sequence[GroupContents],
    shards: int,
    grid_tokens: tuple[int, int],
) -> dict[str, Listed]:
    """List everything that makes the bytes of chunks comparable, except the engine's version (``layouts``).

    All ranks must create the same listing. So with pipeline stages, it names the stages and not their layers.

    Args:
        vllm_config: configuration of the engine.
        weights: fingerprint of the weights; None if they can't be identified.
        groups: KV groups in the order of the engine's block tables.
        shards: number of parts into which tensor parallelism splits a layer's KV.
        grid_tokens: tokens of a chunk, and of a block hash.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    cuts = stages(vllm_config)
    return {
        "weights": weights,
        "config": files.effective_config(model.hf_config.to_dict(), model.max_model_len),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_dtype": str(cache.cache_dtype),
        "kv_dtype_skip_layers": list(map(str, getattr(cache, "kv_cache_dtype_skip_layers", None) or ())),
        "slot": "block, layer",  # the order of bytes in a slot, see ``core.copier``
        "groups": [
            [fields, sorted({content for _, content in layers}) if cuts else list(map(list, layers))]
            for fields, layers in groups
        ],
        "states": [os.environ.get("VLLM_SSM_CONV_STATE_LAYOUT")]
        + [str(getattr(cache, name, None)) for name in ("mamba_cache_dtype", "mamba_ssm_cache_dtype")],
        "stages": cuts,
        "draft_model": _draft_model(vllm_config),
        "media": _media_options(model),
        "grid": list(grid_tokens),
        "tensor_parallel": shards,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "hash": cache.prefix_caching_hash_algo,
        "hash_seed": os.environ.get("PYTHONHASHSEED"),
    }


def stages(vllm_config: Any) -> list[list[int]]:
    """Return the first and last layer of each pipeline stage; empty if there is only one stage."""
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    if num_stages == 1:
        return []
    from vllm.distributed.utils import get_pp_indices

    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    return [list(map(int, get_pp_indices(num_layers, stage, num_stages))) for stage in range(num_stages)]


def _draft_model(vllm_config: Any) -> list[str]:
    """Identify the model that drafts tokens, whose layers may be part of the KV groups."""
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if speculative is None or draft is None or draft.model == vllm_config.model_config.model:
        return []
    return [str(speculative.method), str(draft.model), str(draft.revision)]


def _media_options(model: Any) -> str:
    """Return the options for processing media. The media themselves are in ``extra_keys``."""
    options = getattr(model, "multimodal_config", None)
    names = ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate")
    return json.dumps([getattr(options, name, None) for name in names], sort_keys=True, default=str)
