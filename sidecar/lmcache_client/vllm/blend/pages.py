"""K and V of single tokens in the engine's pages, whatever the layout of a page.

The layout is learned: the attention layer writes numbers into a scratch page, with the call that writes fresh
K and V. The place of a number is the place of that element. So no layout of an attention backend is named
here. (CPU kernels pack K for their instruction set; GPU backends order heads and tokens differently.)

A page is the bytes of a block in one layer, in physical order, as the cache stores it (``core.layout``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lmcache_client.errors import UnsupportedError

_DTYPES = torch.bfloat16, torch.float16, torch.float32
_BASE = 128
"""Base of the digits that the layer writes: bfloat16 has no larger odd integers than 255."""
_MAX_K_BYTES = 32 << 20
"""Largest size of the K of a long prompt that is read at once."""


class AttentionPages:
    """The pages of one attention layer."""

    def __init__(
        self, layer: Any, pages: torch.Tensor, block_tokens: int, similar: AttentionPages | None = None
    ) -> None:
        """Learn the layout.

        Args:
            layer: vLLM's attention layer, with its KV.
            pages: the bytes of its blocks, uint8 ``[num_blocks, page_bytes]``.
            block_tokens: tokens of a block.
            similar: pages that share the memory for the layout if it is the same.

        Raises:
            UnsupportedError: a page does not hold K and V element by element.
        """
        self.bytes, self.block_tokens = pages, block_tokens
        self._layer, self._dtype = layer, layer.kv_cache.dtype
        if self._dtype not in _DTYPES:
            raise UnsupportedError(
                f"its KV is quantised ({self._dtype}); start vLLM without --kv-cache-dtype to blend"
            )
        heads, size = layer.num_kv_heads, layer.head_size
        self._shapes = (heads, size), (heads, getattr(layer, "head_size_v", size))
        self._places = self._learn()
        if similar is not None and all(map(torch.equal, similar._places, self._places)):
            self._places = similar._places

    def k(self, pages: torch.Tensor) -> torch.Tensor:
        """Return K ``[num_pages * block_tokens, heads, head_size]`` of uint8 ``[num_pages, page_bytes]``."""
        return self._unpack(pages, 0)

    def v(self, pages: torch.Tensor) -> torch.Tensor:
        """Return V, see ``k``."""
        return self._unpack(pages, 1)

    def k_of_blocks(self, blocks: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield K ``[num_tokens, heads, head_size]`` of all tokens of blocks, a few heads at a time.

        It copies no whole pages: an engine has only as much free memory as its own steps need.
        """
        heads, size = self._shapes[0]
        places = self._places[0].view(self.block_tokens, heads, size)
        head_bytes = len(blocks) * self.block_tokens * size * self._dtype.itemsize
        for part in torch.split(places, max(1, _MAX_K_BYTES // head_bytes), 1):
            elements = self.bytes.view(self._dtype)[blocks[:, None], part.flatten()]
            yield elements.view(-1, part.shape[1], size)

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write K and V of tokens to slots, int64 ``[num_tokens]``, as the layer itself does."""
        layer = self._layer
        layer.impl.do_kv_cache_update(layer, k.contiguous(), v.contiguous(), layer.kv_cache, slots)

    def pack(self, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor) -> None:
        """Write K and V of all tokens to uint8 ``[num_pages, page_bytes]``, see ``k``."""
        elements = pages.view(self._dtype)
        for places, part in zip(self._places, (k, v), strict=True):
            elements.index_copy_(1, places, part.reshape(len(pages), -1))

    def _unpack(self, pages: torch.Tensor, part: int) -> torch.Tensor:
        elements = pages.view(self._dtype).index_select(1, self._places[part])
        return elements.view(-1, *self._shapes[part])

    def _learn(self) -> tuple[torch.Tensor, ...]:
        """Return the offset in a page of each element of K, and of V, in order."""
        cache = self._layer.kv_cache
        num_k, num_v = (self.block_tokens * heads * size for heads, size in self._shapes)
        numbers = torch.arange(1, num_k + num_v + 1, device=cache.device)  # 0 is padding
        slots = torch.arange(self.block_tokens, device=cache.device)
        num_elements = self.bytes.shape[1] // cache.element_size()
        found = torch.zeros(num_elements, dtype=torch.long, device=cache.device)
        kernel_blocks = len(cache) // len(self.bytes)
        scale = 1
        while scale <= len(numbers):
            scratch = torch.zeros(num_elements, dtype=self._dtype, device=cache.device)
            # The kernels read the strides, so the scratch page has those of the real pages.
            page = scratch.as_strided((kernel_blocks, *cache.shape[1:]), cache.stride())
            k, v = (numbers // scale % _BASE).to(self._dtype).tensor_split([num_k])
            shaped = (x.view(-1, *shape) for x, shape in zip((k, v), self._shapes, strict=True))
            self._layer.impl.do_kv_cache_update(self._layer, *shaped, page, slots)
            found += scratch.long() * scale
            scale *= _BASE
        places = found.argsort()[-len(numbers) :]
        if len(places) != len(numbers) or not torch.equal(found[places], numbers):
            raise UnsupportedError("its blocks do not hold K and V element by element")
        return places.tensor_split([num_k])
