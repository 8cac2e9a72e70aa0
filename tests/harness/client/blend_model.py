"""A small transformer that runs in vLLM's forward context, over KV in any physical order.

Its attention is plain arithmetic over the rows of the metadata, so it shows what a pass gives to a kernel.
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.forward_context import get_forward_context

from lmcache_client.vllm.blend import blender as module
from lmcache_client.vllm.blend import ranks
from lmcache_client.vllm.blend.blender import Blender
from tests.harness.client.kv_layouts import ORDERS

HEADS, SIZE, NUM_LAYERS, VOCAB, MAX_LEN = 2, 8, 3, 50, 256
TOKENS, NUM_BLOCKS = 4, 80
"""Tokens of a block, and blocks of a ``Rank``."""


class Impl:
    """The kernel. ``is_packed``: K of a block is transposed, as on some CPUs."""

    scale = SIZE**-0.5

    def __init__(self, is_packed=False):
        self.is_packed = is_packed

    def views(self, cache):
        """K and V ``[blocks, heads, tokens, size]``, as views of the cache."""
        if not self.is_packed:
            return cache.split(SIZE, -1)
        parts = cache.unflatten(-1, (2, SIZE)).permute(3, 0, 1, 2, 4)
        blocks, heads, tokens, size = parts[0].shape
        k = parts[0].as_strided(
            (blocks, heads, tokens, size), (*cache.stride()[:2], 1, tokens), cache.storage_offset()
        )
        v = parts[0].as_strided(
            (blocks, heads, tokens, size),
            (*cache.stride()[:2], size, 1),
            cache.storage_offset() + tokens * size,
        )
        return k, v

    def do_kv_cache_update(self, layer, key, value, cache, slots):
        size = cache.shape[2]
        for view, fresh in zip(self.views(cache), (key, value), strict=True):
            view[slots // size, :, slots % size] = fresh.to(cache.dtype)

    def forward(self, layer, query, key, value, cache, metadata, output):
        starts = metadata.query_start_loc_cpu.tolist()
        views = self.views(cache)
        for row, (begin, end) in enumerate(pairwise(starts)):
            length = int(metadata.seq_lens[row])
            blocks = metadata.block_table_tensor[row].long()
            k, v = (view[blocks].transpose(1, 2).flatten(0, 1)[:length] for view in views)
            places = torch.arange(length - (end - begin), length)
            scores = torch.einsum("qhd,khd->hqk", query[begin:end], k.to(query)) * self.scale
            scores.masked_fill_(torch.arange(length) > places[:, None], -torch.inf)
            output[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.to(query))


class Attention(nn.Module):
    """vLLM's attention layer, as far as the connector uses it."""

    num_kv_heads, head_size, head_size_v = HEADS, SIZE, SIZE

    def __init__(self, cache, is_packed=False):
        super().__init__()
        self.kv_cache, self.impl = cache, Impl(is_packed)

    def get_attn_backend(self):
        return Backend


class Backend:
    """A backend whose metadata is that which all backends get."""

    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name():
        return "TEST"

    @staticmethod
    def get_builder_cls():
        return lambda *args: SimpleNamespace(
            build=lambda common_prefix_len, common_attn_metadata: common_attn_metadata
        )


class Model(nn.Module):
    """Embedding, layers of attention with rotated Q and K, and no output."""

    def __init__(self, layers, on_layer):
        """``on_layer``: the connector's hook before the attention of a layer."""
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        width = HEADS * SIZE
        self.embedding = torch.randn(VOCAB, width, generator=generator)
        self.weights = torch.randn(NUM_LAYERS, 3, width, width, generator=generator) / width**0.5
        self.names, self.on_layer = list(layers), on_layer
        angles = torch.arange(MAX_LEN)[:, None] * 0.3 ** torch.arange(SIZE // 2)
        self.table = torch.cat((angles.cos(), angles.sin()), 1)
        self.blocks = nn.ModuleList()
        for layer in layers.values():
            block = nn.Module()
            block.attn, block.rotary_emb = layer, nn.Module()
            block.rotary_emb.cos_sin_cache = self.table
            vars(block.rotary_emb).update(rotary_dim=SIZE, is_neox_style=True)
            self.blocks.append(block)

    def compute_logits(self):
        raise AssertionError("a pass needs no logits")

    def _rotate(self, x, positions):
        cos, sin = (part[:, None] for part in self.table[positions].chunk(2, -1))
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def forward(self, input_ids, positions):
        hidden = self.embedding[input_ids.long()]
        context = get_forward_context()
        for name, weights in zip(self.names, self.weights, strict=True):
            q, k, v = (torch.tanh(hidden @ weight).unflatten(-1, (HEADS, SIZE)) for weight in weights)
            q, k = self._rotate(q, positions), self._rotate(k, positions)
            layer, output = context.no_compile_layers[name], torch.zeros_like(q)
            layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, context.slot_mapping[name])
            self.on_layer(name)
            layer.impl.forward(layer, q, k, v, layer.kv_cache, context.attn_metadata[name], output=output)
            hidden = hidden + output.flatten(1)


def allocate(order="LBHNC", num_blocks=40, block_tokens=4, dtype=torch.float32):
    """KV ``[blocks, heads, tokens, K and V]`` of each layer, in one allocation with a physical order."""
    sizes = (NUM_LAYERS, num_blocks, HEADS, block_tokens, 2 * SIZE)
    dims = ORDERS[order]
    backing = torch.zeros([sizes[d] for d in dims], dtype=dtype)
    logical = backing.permute([dims.index(d) for d in range(5)])
    return {f"model.layers.{number}.attn": logical[number] for number in range(NUM_LAYERS)}


def configuration(layers, num_blocks, block_tokens, max_tokens=64):
    """vLLM's configuration, and that of its KV cache."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=1, use_sequence_parallel_moe=False),
        compilation_config=SimpleNamespace(static_forward_context=layers, fast_moe_cold_start=False),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max_tokens, max_num_seqs=8),
        model_config=SimpleNamespace(max_model_len=MAX_LEN, get_vocab_size=lambda: VOCAB),
    )
    spec = SimpleNamespace(block_size=block_tokens)
    spec.copy_with_new_block_size = lambda size: SimpleNamespace(block_size=size)
    group = SimpleNamespace(layer_names=list(layers), kv_cache_spec=spec)
    return config, SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=[group])


class Rank:
    """A blender and its model."""

    def __init__(self, order="LBHNC", is_packed=False, change=None, dtype=torch.float32, **limits):
        """``change``: is called with the model before it is tested."""
        caches = allocate(order, NUM_BLOCKS, TOKENS, dtype)
        self.layers = {name: Attention(cache, is_packed) for name, cache in caches.items()}
        self.names_of_pass, self.blender = [], None
        self.model = Model(self.layers, self.on_layer)
        if change is not None:
            change(self.model)
        self.config, kv_config = configuration(self.layers, NUM_BLOCKS, TOKENS, **limits)
        self.blender = Blender.create(self.config, kv_config, caches, 2 * TOKENS)

    def on_layer(self, name):
        self.names_of_pass.append(name)
        if self.blender is not None:
            self.blender.wait_for_layer_load(name)

    def prefill(self, tokens):
        """Compute a prompt alone. Returns the bytes of its blocks."""
        table = torch.arange(1, 1 + -(-len(tokens) // TOKENS))
        self.blender.passes.run(torch.tensor(tokens), torch.arange(len(tokens)), table)
        return {name: pages.bytes[table].clone() for name, pages in self.blender.pages.items()}

    def kv(self, content, count):
        return {
            name: torch.stack((pages.k(content[name])[:count], pages.v(content[name])[:count]))
            for name, pages in self.blender.pages.items()
        }


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(ranks, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    monkeypatch.setattr(module, "_STAGING_BYTES", 1 << 20)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for tensors of this size, other threads only cost time
    yield
    torch.set_num_threads(num_threads)


def difference(kv, other):
    return max(float((kv[name] - other[name]).abs().max()) for name in kv)
