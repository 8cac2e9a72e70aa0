"""The layout of pages, learned from the layer that writes them."""

import pytest
import torch

from lmcache_client.core.layout import page_views
from lmcache_client.errors import UnsupportedError
from lmcache_client.vllm.blend.pages import AttentionPages
from tests.harness.client.blend_model import HEADS, SIZE, Attention, Impl, allocate
from tests.harness.client.kv_layouts import ORDERS

NUM_BLOCKS, TOKENS = 5, 16
NAME = "model.layers.1.attn"


def pages_of(layer, block_tokens=TOKENS, num_blocks=NUM_BLOCKS, similar=None):
    (view,) = page_views([NAME], {NAME: layer.kv_cache}, num_blocks)
    return AttentionPages(layer, view, block_tokens, similar)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_k_and_v_that_a_layer_writes_are_read_in_any_order(order, dtype):
    layer = Attention(allocate(order, NUM_BLOCKS, TOKENS, dtype)[NAME])
    pages = pages_of(layer)
    k, v = torch.randn(2, 20, HEADS, SIZE).to(dtype)
    slots = torch.arange(20) + 3 * TOKENS - 4  # from the end of block 2 on
    pages.write(k, v, slots)
    content = pages.bytes[2:5]
    assert torch.equal(pages.k(content)[12:32], k)
    assert torch.equal(pages.v(content)[12:32], v)
    assert not pages.bytes[:2].any(), "nothing is written to other blocks"
    copy = torch.zeros_like(content)
    pages.pack(pages.k(content), pages.v(content), copy)
    assert torch.equal(copy, content)


def test_packed_k_is_read():
    layer = Attention(allocate(num_blocks=NUM_BLOCKS, block_tokens=TOKENS)[NAME], is_packed=True)
    pages = pages_of(layer)
    k, v = torch.randn(2, TOKENS, HEADS, SIZE)
    pages.write(k, v, torch.arange(TOKENS) + TOKENS)
    assert torch.equal(layer.kv_cache[1].flatten()[:TOKENS], k[:, 0, 0]), "K is not packed in this test"
    assert torch.equal(pages.k(pages.bytes[1:2]), k)
    assert torch.equal(pages.v(pages.bytes[1:2]), v)
    copy = torch.zeros_like(pages.bytes[1:2])
    pages.pack(k, v, copy)
    assert torch.equal(copy, pages.bytes[1:2])


def test_blocks_of_several_kernel_blocks_are_read():
    cache = allocate("LBNHC", 4 * NUM_BLOCKS, TOKENS // 4)[NAME]
    layer = Attention(cache)
    pages = pages_of(layer)
    k, v = torch.randn(2, TOKENS, HEADS, SIZE)
    pages.write(k, v, torch.arange(TOKENS) + 2 * TOKENS)
    assert torch.equal(pages.k(pages.bytes[2:3]), k)
    assert torch.equal(pages.v(pages.bytes[2:3]), v)


def test_layers_with_one_layout_share_its_memory():
    caches = allocate("BLHNC", NUM_BLOCKS, TOKENS)
    first, second = (pages_of(Attention(caches[f"model.layers.{n}.attn"])) for n in (0, 1))
    assert first._places is not second._places
    similar = pages_of(Attention(caches[NAME]), similar=first)
    assert similar._places is first._places
    packed = pages_of(
        Attention(allocate(num_blocks=NUM_BLOCKS, block_tokens=TOKENS)[NAME], True), similar=first
    )
    assert packed._places is not first._places


class Halved(Impl):
    """A kernel that keeps one number of two, as a quantised cache does."""

    def do_kv_cache_update(self, layer, key, value, cache, slots):
        cache[slots // TOKENS, :, slots % TOKENS] = torch.cat((key, key), -1)


def test_pages_with_other_content_are_refused():
    layer = Attention(allocate(num_blocks=NUM_BLOCKS, block_tokens=TOKENS)[NAME])
    layer.impl = Halved()
    with pytest.raises(UnsupportedError, match="do not hold K and V element by element"):
        pages_of(layer)


def test_quantised_kv_is_refused_with_its_remedy():
    layer = Attention(allocate(num_blocks=NUM_BLOCKS, block_tokens=TOKENS, dtype=torch.float8_e4m3fn)[NAME])
    with pytest.raises(UnsupportedError, match=r"quantised \(torch.float8_e4m3fn\); .* --kv-cache-dtype"):
        pages_of(layer)
