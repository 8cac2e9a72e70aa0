"""What the bytes of vLLM's KV are called, and which KV is not cached."""

from types import SimpleNamespace

import pytest
import torch

from lmcache.engines.core.layout import Layout
from lmcache.engines.errors import UnsupportedError
from lmcache.engines.vllm.layouts import check_stages, check_supported, content_id, num_replicas
from tests.harness.kv_layouts import ORDERS, B, kv_caches


def test_content_ids_tell_apart_what_differs_and_only_that():
    def name(order="LBHNC", dtype=torch.float16, backend="CPU_ATTN", isa="vec", version="0.32.0"):
        return content_id(kv_caches(ORDERS[order], dtype)["layer0"], B, backend, isa, version)

    assert name() == "cpu-vec-1/float16/2x4x8/012"  # golden: changing it orphans what is stored
    assert name("BLHNC") == name("LBHNC"), "slots have their own order of layers and blocks"
    assert name("LBNHC") == "cpu-vec-1/float16/2x4x8/102"
    assert name(dtype=torch.bfloat16) != name()
    assert name(version="0.33.1") == name(), "a known content outlives releases"
    assert name(isa="amx") == "CPU_ATTN-amx@0.32/float16/2x4x8/012"
    assert name(isa="amx", version="0.32.9") == name(isa="amx") != name(isa="amx", version="0.33.0")


class FullAttentionSpec:
    block_size = 32


class MambaSpec(FullAttentionSpec):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    model_version = None


def engine(*specs, policy="recompute", dcp=1, eagle=False, sleep=False):
    groups = [SimpleNamespace(kv_cache_spec=spec, is_eagle_group=eagle) for spec in specs]
    parallel = SimpleNamespace(decode_context_parallel_size=dcp, prefill_context_parallel_size=1)
    transfer = SimpleNamespace(kv_load_failure_policy=policy)
    model = SimpleNamespace(enable_sleep_mode=sleep)
    config = SimpleNamespace(parallel_config=parallel, kv_transfer_config=transfer, model_config=model)
    return config, SimpleNamespace(kv_cache_groups=groups)


def test_plain_full_attention_is_supported():
    check_supported(*engine(FullAttentionSpec()))
    check_supported(*engine(SimpleNamespace(kv_cache_specs={"a": FullAttentionSpec()})))


def test_latents_are_supported_but_those_that_are_compressed():
    check_supported(*engine(MLAAttentionSpec()))
    spec = MLAAttentionSpec()
    spec.model_version = "deepseek_v4"
    with pytest.raises(UnsupportedError, match="MLAAttentionSpec"):
        check_supported(*engine(spec))


@pytest.mark.parametrize(
    ("spec", "said", "replicas"),
    [
        (FullAttentionSpec(), None, 1),
        (FullAttentionSpec(), 2, 2),
        (MLAAttentionSpec(), 8, 8),
        (MLAAttentionSpec(), None, 8),
        (SimpleNamespace(kv_cache_specs={"a": MLAAttentionSpec(), "b": MLAAttentionSpec()}), None, 8),
        (SimpleNamespace(kv_cache_specs={"a": MLAAttentionSpec(), "b": MambaSpec()}), None, 1),
    ],
)
def test_ranks_that_hold_the_same_kv_are_counted_also_where_vllm_does_not_say_it(spec, said, replicas):
    _, config = engine(spec)
    if said is not None:
        config.kv_tp_replicas = said
    assert num_replicas(8, config) == replicas


@pytest.mark.parametrize(
    ("unsupported", "reason"),
    [
        (engine(MambaSpec()), "MambaSpec"),
        (engine(FullAttentionSpec(), MambaSpec()), "2 KV cache groups"),
        (engine(SimpleNamespace(kv_cache_specs={"a": FullAttentionSpec(), "b": MambaSpec()})), "MambaSpec"),
        (engine(FullAttentionSpec(), policy="fail"), "kv_load_failure_policy"),
        (engine(FullAttentionSpec(), dcp=2), "decode_context_parallel_size"),
        (engine(FullAttentionSpec(), eagle=True), "draft"),
        (engine(FullAttentionSpec(), sleep=True), "--enable-sleep-mode"),
    ],
)
def test_everything_else_runs_untouched_with_a_reason(unsupported, reason):
    with pytest.raises(UnsupportedError, match=reason):
        check_supported(*unsupported)


@pytest.mark.parametrize(
    ("pages", "skip_layers", "reason"), [((64, 128), None, "one size"), ((64, 64), ["0"], "skip_layers")]
)
def test_pipeline_stages_that_can_differ_unseen_are_refused(pages, skip_layers, reason):
    kv = Layout(tuple(torch.zeros(2, page, dtype=torch.uint8) for page in pages), 2)

    def config(num_stages, skip_layers):
        return SimpleNamespace(
            parallel_config=SimpleNamespace(pipeline_parallel_size=num_stages),
            cache_config=SimpleNamespace(kv_cache_dtype_skip_layers=skip_layers),
        )

    check_stages(config(1, skip_layers), kv)
    check_stages(config(2, None), Layout(kv.pages[:1], 2))
    with pytest.raises(UnsupportedError, match=reason):
        check_stages(config(2, skip_layers), kv)
