"""From the engine's KV tensors to byte views of whole blocks.

The cache moves whole blocks and never looks inside; what their bytes mean is the engine's to name. The order
of layers and blocks in memory does not matter: slots have their own (``copier``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lmcache.engines.errors import UnsupportedError

KVCaches = Mapping[str, "torch.Tensor | Sequence[torch.Tensor]"]
"""The engine's KV by layer, as it registers it with a connector."""


@dataclass(frozen=True)
class Layout:
    """One rank's KV of one KV group as bytes: per layer uint8 ``[num_blocks, page_bytes]`` over the engine's
    memory. A layer's blocks need not be adjacent: others' pages or padding may lie between them."""

    pages: tuple[torch.Tensor, ...]
    blocks_per_row: int
    """Of a chunk, its last, that its row holds."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this rank, all layers."""
        return sum(pages.shape[1] for pages in self.pages)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of this rank."""
        return self.blocks_per_row * self.block_bytes


def page_views(layers: Sequence[str], kv_caches: KVCaches, num_blocks: int) -> list[torch.Tensor]:
    """View the layers, in their order, as uint8 ``[num_blocks, page_bytes]``; those that share KV count once.

    Raises UnsupportedError when a block is not one run of bytes.
    """
    views: dict[tuple[int, int], torch.Tensor] = {}
    for layer, tensor in [(name, tensor) for name in layers for tensor in tensors_of(kv_caches[name])]:
        blocks = by_block(tensor, num_blocks)
        if not _is_dense(blocks):
            raise UnsupportedError(
                f"a block of {layer} is not one run of bytes (strides {tuple(blocks.stride())})"
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
    """A layer of states may have several tensors."""
    return [kv] if isinstance(kv, torch.Tensor) else kv


def num_bytes(kv_caches: KVCaches) -> int:
    """Return what all of it takes: layers may share memory."""
    storages = [tensor.untyped_storage() for kv in kv_caches.values() for tensor in tensors_of(kv)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def by_block(kv: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Make the engine's blocks dimension 0: a backend may have split each into several kernel blocks."""
    return kv if kv.shape[0] == num_blocks else kv.view(num_blocks, -1, *kv.shape[1:])


def _is_dense(blocks: torch.Tensor) -> bool:
    inner = blocks[0]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(inner.shape, inner.stride(), strict=True))
    return extent == inner.numel()
