"""vLLM's KV cache groups: conversion of each kind, refusals, and replicated ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcache_client.errors import UnsupportedError
from lmcache_client.vllm.attach import _lay_out
from lmcache_client.vllm.groups import GroupSpec, num_replicas, read_groups
from lmcache_store.kv_groups import GroupKind, KVGroup


class FullAttentionSpec(SimpleNamespace):
    block_size = 32


class MLAAttentionSpec(FullAttentionSpec):
    model_version = None


class SlidingWindowSpec(FullAttentionSpec):
    pass


class SlidingWindowMLASpec(SlidingWindowSpec):
    pass


class ChunkedLocalAttentionSpec(FullAttentionSpec):
    pass


class MambaSpec(FullAttentionSpec):
    pass


FULL, LATENT = FullAttentionSpec(), MLAAttentionSpec()
WINDOW = SlidingWindowSpec(sliding_window=128, extra_retained_tokens=2)
CHUNKED = ChunkedLocalAttentionSpec(attention_chunk_size=256)
STATE, NO_STATE = MambaSpec(mamba_cache_mode="align"), MambaSpec(mamba_cache_mode="none")


def uniform(**specs):
    return SimpleNamespace(block_size=32, kv_cache_specs=specs)


def config(*specs, **group):
    fields = {"is_eagle_group": False} | group
    groups = [SimpleNamespace(kv_cache_spec=spec, **fields) for spec in specs]
    for number, each in enumerate(groups):
        each.layer_names = [f"layer{number}"]
    return SimpleNamespace(kv_cache_groups=groups)


@pytest.mark.parametrize(
    ("spec", "kind", "window"),
    [
        (FULL, GroupKind.FULL_ATTENTION, 0),
        (uniform(a=FULL, b=FullAttentionSpec()), GroupKind.FULL_ATTENTION, 0),
        (LATENT, GroupKind.FULL_ATTENTION, 0),
        (WINDOW, GroupKind.SLIDING_WINDOW, 130),
        (CHUNKED, GroupKind.CHUNKED_ATTENTION, 256),
        (STATE, GroupKind.STATE, 0),
    ],
)
def test_read_groups_converts_every_kind(spec, kind, window):
    expected = GroupSpec(kind, window, 32, ["layer0"], False)
    assert read_groups(config(spec), can_fail_requests=True) == [expected]
    (drafter,) = read_groups(config(spec, is_eagle_group=True), can_fail_requests=True)
    assert drafter == expected._replace(is_drafter=True)


@pytest.mark.parametrize(
    ("unsupported", "reason"),
    [
        (config(NO_STATE), "--enable-prefix-caching"),
        (config(FULL, SlidingWindowMLASpec(sliding_window=9)), "SlidingWindowMLASpec"),
        (config(MLAAttentionSpec(model_version="deepseek_v4")), "MLAAttentionSpec"),
        (config(uniform(a=FULL, b=WINDOW)), "different kinds"),
        (config(FULL, host_resident=True), "host memory"),
        (config(FULL, enable_kv_transfer=False), "derives"),
    ],
)
def test_read_groups_refuses_unsupported_groups_with_a_reason(unsupported, reason):
    with pytest.raises(UnsupportedError, match=reason):
        read_groups(unsupported, can_fail_requests=True)


@pytest.mark.parametrize("specs", [(WINDOW,), (FULL, WINDOW), (FULL, FULL), (FULL, STATE)])
def test_engine_that_cannot_fail_requests_caches_only_full_attention(specs):
    read_groups(config(LATENT), can_fail_requests=False)
    with pytest.raises(UnsupportedError, match=r"0\.30"):
        read_groups(config(*specs), can_fail_requests=False)


@pytest.mark.parametrize(
    ("spec", "reported", "replicas"),
    [
        *((FULL, None, 1), (FULL, 2, 2), (LATENT, 8, 8), (LATENT, None, 8)),
        (uniform(a=LATENT, b=LATENT), None, 8),
        (uniform(a=LATENT, b=STATE), None, 1),
    ],
)
def test_num_replicas_counts_ranks_with_the_same_kv(spec, reported, replicas):
    engine = config(spec)
    if reported is not None:
        engine.kv_tp_replicas = reported
    assert num_replicas(8, engine) == replicas


def test_layouts_exist_for_stored_groups_with_full_attention_first():
    specs = read_groups(config(WINDOW, FULL, CHUNKED, STATE), can_fail_requests=True)
    kv: dict[str, Any] = {f"layer{number}": torch.zeros(4, 1, 32, 2) for number in range(3)}
    kv["layer3"] = [torch.zeros(4, 5), torch.zeros(4, 3)]  # two tensors per layer
    groups, layouts = _lay_out(specs, 512, kv, 4)
    assert groups == [
        KVGroup(1, 32, 16 * 256),
        KVGroup(0, 32, 5 * 256, 130, GroupKind.SLIDING_WINDOW),
        KVGroup(2, 32, 0, 256, GroupKind.CHUNKED_ATTENTION),
        KVGroup(3, 32, 32, 0, GroupKind.STATE),
    ]
    assert sorted(layouts) == [0, 1, 3]
    assert [pages.shape[1] for pages in layouts[3].pages] == [20, 12]
    with pytest.raises(UnsupportedError, match="nothing"):
        _lay_out(specs[2:3], 512, kv, 4)
