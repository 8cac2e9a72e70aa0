"""Configurations of vLLM in which no prompt is blended."""

from types import SimpleNamespace

import pytest
import torch

from lmcache_client.vllm.blend.obstacles import obstacle


class FullAttentionSpec(SimpleNamespace):
    block_size, dtype, sliding_window, attention_chunk_size = 16, torch.bfloat16, None, None


class MLAAttentionSpec(FullAttentionSpec):
    pass


class UniformTypeKVCacheSpecs(SimpleNamespace):
    pass


PLAIN = FullAttentionSpec()


def reason(*specs, has_other_connectors=False, **changes):
    """``changes``: fields of any part of the configuration."""
    parallel = SimpleNamespace(
        pipeline_parallel_size=1,
        tensor_parallel_size=2,
        data_parallel_size=1,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        distributed_executor_backend="mp",
        nnodes_within_dp=1,
    )
    model = SimpleNamespace(is_multimodal_model=False, uses_mrope=False, is_moe=False)
    cache = SimpleNamespace(cache_dtype="auto")
    passes = SimpleNamespace(enable_sp=False)
    config = SimpleNamespace(
        parallel_config=parallel,
        model_config=model,
        cache_config=cache,
        compilation_config=SimpleNamespace(pass_config=passes),
        lora_config=None,
        speculative_config=None,
    )
    for name, value in changes.items():
        (part,) = [part for part in (config, parallel, model, cache, passes) if hasattr(part, name)]
        setattr(part, name, value)
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs or (PLAIN,)]
    kv = SimpleNamespace(kv_cache_groups=groups)
    return obstacle(config, kv, has_other_connectors=has_other_connectors)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"enable_sp": True, "tensor_parallel_size": 1},
        {"cache_dtype": "bfloat16"},
        {"is_moe": True},
        {"data_parallel_size": 2},
    ],
    ids=str,
)
def test_engine_with_full_attention_can_blend(changes):
    assert reason(**changes) is None


@pytest.mark.parametrize(
    ("remedy", "changes"),
    [
        ("--pipeline-parallel-size 1", {"pipeline_parallel_size": 2}),
        ("--decode-context-parallel-size", {"decode_context_parallel_size": 2}),
        ("--prefill-context-parallel-size", {"prefill_context_parallel_size": 2}),
        ('"enable_sp": false', {"enable_sp": True}),
        ("GPUs of a node", {"nnodes_within_dp": 2}),
        ("--data-parallel-size 1", {"data_parallel_size": 2, "is_moe": True}),
        ("--enable-lora", {"lora_config": "any"}),
        ("--speculative-config", {"speculative_config": "any"}),
        ("serve a text model", {"is_multimodal_model": True}),
        ("serve a text model", {"uses_mrope": True}),
        ("--kv-transfer-config", {"has_other_connectors": True}),
        ("--kv-cache-dtype auto", {"cache_dtype": "fp8_e5m2"}),
    ],
    ids=str,
)
def test_refused_configuration_names_the_remedy(remedy, changes):
    assert remedy in (reason(**changes) or "")


@pytest.mark.parametrize(
    ("specs", "why"),
    [
        ((PLAIN, PLAIN), "2 KV groups"),
        ((MLAAttentionSpec(),), "full attention in all layers"),
        ((FullAttentionSpec(sliding_window=128),), "full attention in all layers"),
        ((FullAttentionSpec(attention_chunk_size=128),), "full attention in all layers"),
        ((UniformTypeKVCacheSpecs(kv_cache_specs={"a": PLAIN, "b": PLAIN}),), "differs in size"),
        ((FullAttentionSpec(dtype=torch.float8_e4m3fn),), "--kv-cache-dtype bfloat16"),
    ],
)
def test_kv_of_other_kinds_is_refused(specs, why):
    assert why in (reason(*specs) or "")
