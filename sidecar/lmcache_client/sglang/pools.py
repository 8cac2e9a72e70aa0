"""Copies pages of SGLang's host pools from and to the arena.

SGLang moves KV between the GPU and pools in host memory. It gives a storage backend these pools, and indices
of pages in them. A page holds the KV of ``page_size`` tokens in all layers; a page of a state pool holds one
snapshot. A slot of the arena holds a page's bytes in the order of ``get_data_page(flat=True)``.

Most pools lay out their pages regularly in memory. Such pages are copied directly, by the copier that vLLM's
connector uses. Pages of other pools are copied by the pool's own functions, which need a second copy.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lmcache_client.core.copier import Bytes, CpuCopier, Fence, RowLoad
from lmcache_client.core.layout import Layout
from lmcache_client.errors import UnsupportedError

logger = logging.getLogger(__name__)


class PoolCopier(CpuCopier):
    """Copies whole pages. A block is a page, by its number in the pool."""

    def __init__(self, pools: Mapping[int, Any], num_threads: int) -> None:
        """``pools``: SGLang's host pools by KV group. Raises UnsupportedError for a pool without pages."""
        layouts = {group: layout_of(pool) for group, pool in pools.items()}
        super().__init__({group: layout for group, layout in layouts.items() if layout}, num_threads)
        self._flat = {group: FlatPages(pools[group]) for group, layout in layouts.items() if not layout}
        sizes = {group: pages.page_bytes for group, pages in self._flat.items()}
        self.row_bytes = {**self.row_bytes, **sizes}

    def load(self, rows: Sequence[RowLoad], fence: Fence) -> None:
        """See ``EngineCopier``."""
        super().load([row for row in rows if row.group not in self._flat], fence)
        for row in rows:
            if (flat := self._flat.get(row.group)) is not None:
                flat.load(row.slot, row.blocks[0])

    def store(self, group: int, slot: Bytes, blocks: Sequence[int], fence: Fence) -> None:
        """See ``EngineCopier``."""
        if (flat := self._flat.get(group)) is None:
            super().store(group, slot, blocks, fence)
        else:
            flat.store(slot, blocks[0])


class FlatPages:
    """Pages of a pool that only the pool's own functions can copy."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        page = pool.get_dummy_flat_data_page()
        self._dtype = page.dtype
        self.page_bytes = page.numel() * page.element_size()

    def load(self, slot: Bytes, page: int) -> None:
        """Fill a page from a slot."""
        content = torch.from_numpy(slot[: self.page_bytes]).view(self._dtype)
        self._pool.set_from_flat_data_page(page * self._pool.page_size, content)

    def store(self, slot: Bytes, page: int) -> None:
        """Fill a slot from a page."""
        content = self._pool.get_data_page(page * self._pool.page_size, flat=True)
        torch.from_numpy(slot[: self.page_bytes]).copy_(content.contiguous().view(torch.uint8).view(-1))


def layout_of(pool: Any) -> Layout | None:
    """Describe where the pages of a pool are; None if they are not laid out regularly.

    Raises UnsupportedError if the pool has no pages that a storage backend can copy.
    """
    if getattr(pool, "stores_page_envelope", False):  # pages of such a pool move
        return None
    try:
        first = pool.get_data_page(0, flat=False)
        second = pool.get_data_page(pool.page_size, flat=False)
    except (NotImplementedError, ValueError) as error:
        reason = f"the pool {type(pool).__name__} with layout {pool.layout} has no pages to copy: {error}"
        raise UnsupportedError(reason) from error
    memory = first.untyped_storage()
    stride = second.data_ptr() - first.data_ptr()
    is_view = memory.data_ptr() == second.untyped_storage().data_ptr() and stride > 0
    if not is_view or first.device.type != "cpu":
        return None
    num_pages = pool.size // pool.page_size
    pages = (pool.get_data_page(page * pool.page_size, flat=False) for page in range(num_pages))
    if any(page.data_ptr() != first.data_ptr() + number * stride for number, page in enumerate(pages)):
        return None
    run_bytes, offsets = _runs(first)
    start = first.storage_offset() * first.element_size()
    if start + max(offsets) + (num_pages - 1) * stride + run_bytes > memory.nbytes():
        return None
    runs = (
        torch.empty(0, dtype=torch.uint8).set_(memory, start + offset, (num_pages, run_bytes), (stride, 1))
        for offset in offsets
    )
    return Layout(tuple(runs), blocks_per_row=1)


def _runs(page: torch.Tensor) -> tuple[int, list[int]]:
    """Return (bytes of each contiguous run of a page, offsets of all runs in the order of their elements)."""
    run, num_outer = 1, page.dim()
    for size, stride in zip(reversed(page.shape), reversed(page.stride()), strict=True):
        if size != 1 and stride != run:
            break
        run, num_outer = run * size, num_outer - 1
    item, outer = page.element_size(), range(num_outer)
    places = itertools.product(*(range(page.shape[dim]) for dim in outer))
    offsets = [
        sum(index * page.stride(dim) for dim, index in zip(outer, place, strict=True)) for place in places
    ]
    return run * item, [offset * item for offset in offsets]
