"""Translate blocks of a KV group into addresses, and check all bounds against the opened memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_store.common.nontemporal import Words


class Opened(NamedTuple):
    """An allocation of a client, as mapped in this process."""

    base: int
    num_bytes: int
    """Size that the driver reports; the client's own figure is not trusted."""


class Column(NamedTuple):
    """A client's slots, as mapped in this process. Offsets are those of the arena's file, in bytes."""

    offset: int
    num_bytes: int
    slot_bytes: int
    address: int
    """Address of the column's first byte."""


class Pages:
    """Addresses of the blocks of one KV group."""

    def __init__(self, pages: pb.GroupPages, allocations: Sequence[Opened], column: Column) -> None:
        """Raises ValueError if a page lies outside its allocation, or a row is larger than its column."""
        self._num_blocks, self._blocks_per_row = pages.num_blocks, pages.blocks_per_row
        self._column = column
        for layer in pages.layers:
            end = layer.offset + (pages.num_blocks - 1) * layer.block_stride + layer.page_bytes
            num_bytes = allocations[layer.allocation].num_bytes
            if end > num_bytes:
                raise ValueError(
                    f"a layer of group {pages.group} ends at byte {end} of an allocation of {num_bytes}"
                )
        layers = pages.layers
        self._bases = np.array([allocations[p.allocation].base + p.offset for p in layers], np.uint64)
        self._strides = np.array([layer.block_stride for layer in layers], np.uint64)
        self._sizes = np.array([layer.page_bytes for layer in layers], np.uint64)
        self._starts = np.cumsum(self._sizes) - self._sizes  # of each layer within a block of a slot
        self._block_bytes = int(self._sizes.sum())
        self._row_bytes = self._blocks_per_row * self._block_bytes
        if self._row_bytes > column.num_bytes:
            raise ValueError(f"a row of group {pages.group} is larger than its column of the arena")

    def pieces(self, offsets: Words, blocks: NDArray[np.uint32]) -> tuple[Words, Words, Words]:
        """Return the pages to copy, slot by slot and block by block: target and source addresses, and sizes.

        ``offsets`` are those of the slots ``[n]``; ``blocks`` is ``[n, blocks_per_row]``. Raises ValueError
        if a slot is outside the column, or a block outside the KV: later code does not check addresses.
        """
        column = self._column
        if blocks.shape != (len(offsets), self._blocks_per_row) or int(blocks.max()) >= self._num_blocks:
            raise ValueError("a block does not exist in the KV, or the blocks do not form whole rows")
        within = offsets - np.uint64(column.offset)
        if (
            int(within.max()) > column.num_bytes - self._row_bytes
            or (within % np.uint64(column.slot_bytes)).any()
        ):
            raise ValueError("a slot is outside the client's column")
        in_row = np.arange(self._blocks_per_row, dtype=np.uint64) * np.uint64(self._block_bytes)
        slots = within + np.uint64(column.address)
        to = slots[:, None, None] + in_row[None, :, None] + self._starts
        from_ = self._bases + self._strides * blocks.astype(np.uint64)[:, :, None]
        return to.ravel(), from_.ravel(), np.broadcast_to(self._sizes, to.shape).ravel()
