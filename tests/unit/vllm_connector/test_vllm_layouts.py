"""Content ids of vLLM's KV bytes, and refusals of unsupported KV."""

from types import SimpleNamespace

import pytest
import torch

from lmcache_client.core.layout import Layout
from lmcache_client.errors import UnsupportedError
from lmcache_client.vllm.layouts import check_stages, check_supported, content_id
from tests.harness.client.kv_layouts import ORDERS, B, kv_caches


def test_content_id_changes_only_with_the_bytes():
    def name(order="LBHNC", dtype=torch.float16, backend="CPU_ATTN", isa="vec", version="0.32.0"):
        return content_id(kv_caches(ORDERS[order], dtype)["layer0"], B, backend, isa, version)

    assert name() == "cpu-vec-1/float16/2x4x8/012"  # golden: a change makes all stored rows unusable
    assert name("BLHNC") == name("LBHNC"), "slots have a fixed order of layers and blocks"
    assert name("LBNHC") == "cpu-vec-1/float16/2x4x8/102"
    assert name(dtype=torch.bfloat16) != name()
    assert name(version="0.33.1") == name(), "a known content id must be stable over releases"
    assert name(isa="amx") == "CPU_ATTN-amx@0.32/float16/2x4x8/012"
    assert name(isa="amx", version="0.32.9") == name(isa="amx") != name(isa="amx", version="0.33.0")


def engine(policy="recompute", dcp=1, sleep=False, zeroing=False, runner=1, experts=False, elastic=False):
    parallel = SimpleNamespace(decode_context_parallel_size=dcp, prefill_context_parallel_size=1)
    parallel.nnodes_within_dp, parallel.data_parallel_size, parallel.enable_elastic_ep = 1, 1, elastic
    parallel.distributed_executor_backend = "uni"
    transfer = SimpleNamespace(kv_load_failure_policy=policy)
    model = SimpleNamespace(enable_sleep_mode=sleep)
    config = SimpleNamespace(parallel_config=parallel, kv_transfer_config=transfer, model_config=model)
    config.use_v2_model_runner = runner == 2
    config.aux_output_config = SimpleNamespace(enable_return_routed_experts=experts)
    return config, SimpleNamespace(needs_kv_cache_zeroing=zeroing)


@pytest.mark.parametrize(
    ("unsupported", "reason"),
    [
        (engine(policy="fail"), "kv_load_failure_policy"),
        (engine(dcp=2), "decode_context_parallel_size"),
        (engine(sleep=True), "--enable-sleep-mode"),
        (engine(experts=True), "--enable-return-routed-experts"),
        (engine(elastic=True), "without --enable-elastic-ep"),
        (engine(zeroing=True, runner=2), "VLLM_USE_V2_MODEL_RUNNER=0"),
    ],
)
def test_only_unsupported_engine_is_refused_with_a_reason(unsupported, reason):
    for supported in (engine(), engine(runner=2), engine(zeroing=True)):
        check_supported(*supported)
    with pytest.raises(UnsupportedError, match=reason):
        check_supported(*unsupported)


@pytest.mark.parametrize(
    ("pages", "skip_layers", "reason"), [((64, 128), None, "one size"), ((64, 64), ["0"], "skip_layers")]
)
def test_pipeline_stages_that_may_differ_are_refused(pages, skip_layers, reason):
    kv = Layout(tuple(torch.zeros(2, page, dtype=torch.uint8) for page in pages), 2)

    def config(num_stages, skip_layers):
        return SimpleNamespace(
            parallel_config=SimpleNamespace(pipeline_parallel_size=num_stages),
            cache_config=SimpleNamespace(kv_cache_dtype_skip_layers=skip_layers),
        )

    check_stages(config(1, skip_layers), [kv])
    check_stages(config(2, None), [Layout(kv.pages[:1], 2)])
    with pytest.raises(UnsupportedError, match="one KV group"):
        check_stages(config(2, None), [Layout(kv.pages[:1], 2)] * 2)
    with pytest.raises(UnsupportedError, match=reason):
        check_stages(config(2, skip_layers), [kv])
