"""Configurations of vLLM in which no prompt is blended. The self-test of ``blender`` decides about models."""

from __future__ import annotations

from typing import Any

from lmcache_client.vllm.attach import can_wait
from lmcache_client.vllm.groups import layer_specs
from lmcache_client.vllm.places import max_parts

_UNQUANTISED = ("auto", "float16", "bfloat16", "half", "float", "float32")
_WINDOWS = ("sliding_window", "attention_chunk_size")


def obstacle(vllm_config: Any, kv_cache_config: Any, *, has_other_connectors: bool) -> str | None:
    """Return why prompts can't be blended, and what to change; None: the configuration allows it.

    ``has_other_connectors``: the connector is part of a MultiConnector. The result is the same on all ranks
    of an engine.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    reasons = {
        "pipeline stages hold only some layers; start vLLM with --pipeline-parallel-size 1": (
            parallel.pipeline_parallel_size > 1
        ),
        "context parallelism splits the KV of a prompt; start vLLM without"
        " --decode-context-parallel-size and --prefill-context-parallel-size": any(
            getattr(parallel, f"{phase}_context_parallel_size", 1) > 1 for phase in ("decode", "prefill")
        ),
        "the engine spans several nodes; lower --tensor-parallel-size to the GPUs of a node": (
            max_parts(parallel) > 1
        ),
        "data-parallel ranks of a mixture-of-experts model compute together; start vLLM with"
        " --data-parallel-size 1": not can_wait(vllm_config),
        "LoRA adapters change the KV of documents; start vLLM without --enable-lora": (
            vllm_config.lora_config is not None
        ),
        "sequence parallelism needs passes of multiples of the ranks; start vLLM with"
        ' --compilation-config {"pass_config": {"enable_sp": false}}': _splits_sequences(vllm_config),
        "speculative decoding needs KV of its drafts; start vLLM without --speculative-config": (
            vllm_config.speculative_config is not None
        ),
        "the positions of a multimodal model are not those of its tokens; serve a text model": (
            model.is_multimodal_model or model.uses_mrope
        ),
        "other connectors of a MultiConnector would store approximate KV; make LMCacheClusterConnector the"
        " only one in --kv-transfer-config": has_other_connectors,
        "the KV is quantised, so K can't be rotated; start vLLM with --kv-cache-dtype auto": (
            vllm_config.cache_config.cache_dtype not in _UNQUANTISED
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), None) or _kv_obstacle(
        kv_cache_config
    )


def _splits_sequences(vllm_config: Any) -> bool:
    """Return True if the compiled model splits the tokens of a pass over the ranks: vLLM 0.29, not 0.32."""
    passes = getattr(vllm_config.compilation_config, "pass_config", None)
    return vllm_config.parallel_config.tensor_parallel_size > 1 and bool(getattr(passes, "enable_sp", False))


def _kv_obstacle(kv_cache_config: Any) -> str | None:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"the model has {len(groups)} KV groups; serve a model with full attention in all layers"
    specs = layer_specs(groups[0].kv_cache_spec)
    kinds = {type(spec).__name__ for spec in specs}
    if kinds != {"FullAttentionSpec"} or any(
        getattr(spec, name, None) for spec in specs for name in _WINDOWS
    ):
        return (
            "windows, latent KV and states can't be blended; serve a model with full attention in all layers"
        )
    if len(specs) > 1:
        return "the layers' KV differs in size; serve a model whose layers have equal KV"
    if specs[0].dtype.itemsize < 2:
        return "the checkpoint asks for quantised KV; start vLLM with --kv-cache-dtype bfloat16"
    return None
