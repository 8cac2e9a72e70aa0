"""The test at the start refuses kernels that do not read the KV of a request."""

from types import SimpleNamespace

import pytest

from lmcache_client.errors import UnsupportedError
from lmcache_client.vllm.blend import blender, ranks
from tests.harness.client.blend_model import Attention, Impl, Model, allocate, configuration

NUM_BLOCKS, TOKENS = 80, 4


class OtherBlocks(Impl):
    """A kernel that reads other blocks than those of the request, because it assumes another block size."""

    def forward(self, layer, query, key, value, cache, metadata, output):
        super().forward(layer, query, key, value, cache.new_ones(cache.shape), metadata, output)


def test_kernel_that_reads_other_blocks_is_refused(monkeypatch):
    monkeypatch.setattr(ranks, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    monkeypatch.setattr(blender, "_STAGING_BYTES", 1 << 20)
    caches = allocate("LBHNC", NUM_BLOCKS, TOKENS)
    layers = {name: Attention(cache) for name, cache in caches.items()}
    for layer in layers.values():
        layer.impl = OtherBlocks()
    model = Model(layers, lambda name: None)
    config, kv_config = configuration(layers, NUM_BLOCKS, TOKENS)
    with pytest.raises(UnsupportedError, match="does not read the KV that is before the tokens"):
        blender.Blender.create(config, kv_config, caches, 2 * TOKENS)
    assert len(model.blocks) == len(layers)
