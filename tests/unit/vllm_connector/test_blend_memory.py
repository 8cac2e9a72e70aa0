"""Memory that blending needs next to the engine's own: it does not grow with all the KV of a long prompt."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmcache_client.blend.attention import largest_weights
from lmcache_client.core.blend_jobs import BlendJob
from lmcache_client.core.layout import page_views
from lmcache_client.vllm.blend import pages as module
from lmcache_client.vllm.blend import ranks
from lmcache_client.vllm.blend.pages import AttentionPages
from lmcache_client.vllm.blend.prompt import PromptPasses
from tests.harness.client.blend_model import HEADS, SIZE, Attention, allocate

TOKENS, NUM_BLOCKS = 4, 40
LENGTH = (NUM_BLOCKS - 8) * TOKENS
HEAD_BYTES = LENGTH * SIZE * 4


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor that is created."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            storages = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if torch.is_tensor(x)}
            if result.untyped_storage().data_ptr() not in storages:  # it is no view
                self.num_bytes = max(self.num_bytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("order", ["LBHNC", "BLNHC"])
def test_attention_is_measured_without_a_copy_of_all_kv(monkeypatch, order):
    monkeypatch.setattr(ranks, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    monkeypatch.setattr(module, "_MAX_K_BYTES", HEAD_BYTES)
    caches = allocate(order, NUM_BLOCKS, TOKENS)
    layers = {name: Attention(cache.normal_()) for name, cache in caches.items()}
    pages = {
        name: AttentionPages(layer, page_views([name], caches, NUM_BLOCKS)[0], TOKENS)
        for name, layer in layers.items()
    }
    queries = {name: torch.randn(1, 2 * HEADS, SIZE) for name in layers}
    largest = LargestTensor()

    def run(tokens, positions, table, observer, num_observed):
        assert num_observed == 1
        with largest:
            for name, q in queries.items():
                observer(name, q)

    passes = SimpleNamespace(
        run=run, fitting=lambda positions, budget: (len(positions),) * 2, block_tokens=TOKENS, device="cpu"
    )
    table = torch.randperm(NUM_BLOCKS)[: LENGTH // TOKENS]
    job = BlendJob(
        "r", (0,) * LENGTH, tuple(table.tolist()), 0, 0, LENGTH - 1, LENGTH - 1, (), "attended", 0.1
    )
    placed, stored_at = torch.ones(LENGTH - 1, dtype=torch.bool), torch.zeros(LENGTH - 1, dtype=torch.int64)
    prompt = PromptPasses(job, placed, stored_at, passes, layers, pages)
    weights = torch.zeros(len(layers), LENGTH - 1)
    slices = prompt.observe(weights, 0)
    assert next(slices) == 0
    assert slices.send(1) == 1
    assert 0 < largest.num_bytes <= HEAD_BYTES
    for number, name in enumerate(layers):
        k = pages[name].k(pages[name].bytes[table])
        expected = largest_weights(
            queries[name], k, torch.ones(1, LENGTH, dtype=torch.bool), layers[name].impl.scale
        )
        assert torch.allclose(weights[number], expected[:-1], atol=1e-6)
