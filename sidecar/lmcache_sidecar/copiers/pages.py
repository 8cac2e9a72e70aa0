"""From blocks of a KV group to addresses, with every bound checked against memory as it really is. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmcache.rpc import kvcache_pb2 as pb

Words = NDArray[np.uint64]


class Opened(NamedTuple):
    """An allocation of a client, as it lies in this process."""

    base: int
    num_bytes: int
    """What the driver says, whatever the client said."""


class Column(NamedTuple):
    """A client's slots, as they lie in this process; offsets are those of the arena's file."""

    offset: int
    num_bytes: int
    slot_bytes: int
    address: int
    """Of the column's first byte."""


class Pages:
    """Where the blocks of one KV group are."""

    def __init__(self, pages: pb.GroupPages, allocations: Sequence[Opened], column: Column) -> None:
        """Raises ValueError when a page would be outside of its allocation, a row larger than its column."""
        self._num_blocks, self._blocks_per_row = pages.num_blocks, pages.blocks_per_row
        self._column = column
        for layer in pages.layers:
            end = layer.offset + (pages.num_blocks - 1) * layer.block_stride + layer.page_bytes
            really = allocations[layer.allocation].num_bytes
            if end > really:
                raise ValueError(
                    f"a layer of group {pages.group} ends at byte {end} of an allocation that has {really}"
                )
        layers = pages.layers
        self._bases = np.array([allocations[at.allocation].base + at.offset for at in layers], np.uint64)
        self._strides = np.array([layer.block_stride for layer in layers], np.uint64)
        self._sizes = np.array([layer.page_bytes for layer in layers], np.uint64)
        self._starts = np.cumsum(self._sizes) - self._sizes  # of each layer within a block of a slot
        self._block_bytes = int(self._sizes.sum())
        self._row_bytes = self._blocks_per_row * self._block_bytes
        if self._row_bytes > column.num_bytes:
            raise ValueError(f"a row of group {pages.group} is larger than its column of the arena")

    def pieces(self, offsets: Words, blocks: NDArray[np.uint32]) -> tuple[Words, Words, Words]:
        """Addresses in the arena and on the GPU, and bytes, of each page: slot after slot, block after block.

        ``offsets``: of the slots ``[n]``; ``blocks``: ``[n, blocks_per_row]``. Raises ValueError when one of
        them is not within the column or the KV: nobody checks addresses later.
        """
        column = self._column
        if blocks.shape != (len(offsets), self._blocks_per_row) or int(blocks.max()) >= self._num_blocks:
            raise ValueError("the blocks are not all blocks of the KV, or not those of whole rows")
        within = offsets - np.uint64(column.offset)
        if (
            int(within.max()) > column.num_bytes - self._row_bytes
            or (within % np.uint64(column.slot_bytes)).any()
        ):
            raise ValueError("a slot is not one of the client's column")
        in_row = np.arange(self._blocks_per_row, dtype=np.uint64) * np.uint64(self._block_bytes)
        slots = within + np.uint64(column.address)
        to = slots[:, None, None] + in_row[None, :, None] + self._starts
        from_ = self._bases + self._strides * blocks.astype(np.uint64)[:, :, None]
        return to.ravel(), from_.ravel(), np.broadcast_to(self._sizes, to.shape).ravel()
