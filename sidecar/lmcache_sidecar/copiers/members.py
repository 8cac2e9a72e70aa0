"""One client of a GPU: its offer, and how far the reader is with the client's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lmcache_client.rpc import kvcache_pb2 as pb


@dataclass(eq=False)
class Member:
    """A client whose KV is in the memory of one GPU."""

    number: int
    """Number that identifies the client in messages to readers; numbers are never reused."""

    pid: int
    column_offset: int
    """Offset of the client's column in the arena's file, in bytes."""

    offer: pb.TransferOffer
    on_turn: Callable[[bool, str], None]
    """Callback for a change of copier: whether the sidecar copies the client's stores now, and the reason."""

    is_asked: bool = False
    """True once the present reader was sent OPEN."""

    is_open: bool = False
    """True while the present reader has the client's memory open."""

    num_moves: int = 0
    """Moves to another reader after a reader failed."""

    row_costs: dict[int, tuple[int, int]] = field(init=False)
    """Bytes and pages of a row, by KV group."""

    def __post_init__(self) -> None:
        self.row_costs = {
            pages.group: (
                pages.blocks_per_row * sum(layer.page_bytes for layer in pages.layers),
                pages.blocks_per_row * len(pages.layers),
            )
            for pages in self.offer.groups
        }

    @property
    def handles(self) -> set[bytes]:
        """CUDA IPC handles of the client's memory."""
        return {allocation.ipc_handle for allocation in self.offer.allocations}
