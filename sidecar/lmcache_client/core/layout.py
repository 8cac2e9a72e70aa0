"""Views of the engine's KV tensors as the bytes of whole blocks.

The cache copies whole blocks and never interprets their bytes. The engine may store layers and blocks in any
order, because the cache stores a block in an order of its own: ``[block][layer][page bytes]`` (see
``copier``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lmcache_client.errors import UnsupportedError

KVCaches = Mapping[str, "torch.Tensor | Sequence[torch.Tensor]"]
"""The engine's KV tensors by layer name, as the engine registers them with a connector."""


@dataclass(frozen=True)
class Layout:
    """One rank's KV of one KV group, as bytes."""

    pages: tuple[torch.Tensor, ...]
    """A view of the engine's memory per layer, uint8 ``[num_blocks, page_bytes]``. A layer's blocks need not
    be adjacent: pages of other layers or padding may lie between them."""
    blocks_per_row: int
    """Number of blocks of each chunk that the cache stores: the last ones. A sliding window needs no more."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this rank, over all layers."""
        return sum(pages.shape[1] for pages in self.pages)

    @property
    def row_bytes(self) -> int:
        """Bytes that the cache stores of one chunk, for this rank."""
        return self.blocks_per_row * self.block_bytes


def page_views(layers: Sequence[str], kv_caches: KVCaches, num_blocks: int) -> list[torch.Tensor]:
    """View the layers, in their order, as uint8 ``[num_blocks, page_bytes]``.

    Layers that share their KV get one view together. Raises UnsupportedError if a block is not one contiguous
    run of bytes.
    """
    views: dict[tuple[int, int], torch.Tensor] = {}
    for layer, tensor in [(name, tensor) for name in layers for tensor in tensors_of(kv_caches[name])]:
        blocks = by_block(tensor, num_blocks)
        if not _is_dense(blocks):
            raise UnsupportedError(
                f"a block of layer {layer} is not contiguous in memory (strides {tuple(blocks.stride())})"
            )
        item = blocks.element_size()
        page_bytes = blocks[0].numel() * item
        view = torch.empty(0, dtype=torch.uint8, device=blocks.device).set_(
            blocks.untyped_storage(),
            blocks.storage_offset() * item,
            (num_blocks, page_bytes),
            (blocks.stride(0) * item, 1),
        )
        views.setdefault((blocks.data_ptr(), blocks.stride(0)), view)
    return list(views.values())


def tensors_of(kv: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return a layer's tensors: a state layer may have several."""
    return [kv] if isinstance(kv, torch.Tensor) else kv


def num_bytes(kv_caches: KVCaches) -> int:
    """Return the bytes of all KV. Memory that layers share counts once."""
    storages = [tensor.untyped_storage() for kv in kv_caches.values() for tensor in tensors_of(kv)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def by_block(kv: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return the KV with the engine's blocks as dimension 0.

    An attention backend with smaller kernel blocks splits each block of the engine into several of them.
    """
    return kv if kv.shape[0] == num_blocks else kv.view(num_blocks, -1, *kv.shape[1:])


def _is_dense(blocks: torch.Tensor) -> bool:
    inner = blocks[0]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(inner.shape, inner.stride(), strict=True))
    return extent == inner.numel()
