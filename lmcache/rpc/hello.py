"""Who a client is: what it tells the sidecar first. Pure; ``attachment`` puts it on the wire."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from lmcache.kv_groups import KVGroup


class Role(enum.Enum):
    """What a client does; the values are those of ``kvcache.proto``."""

    SCHEDULER = 1  # looks up and releases, maps nothing
    WORKER = 2  # one rank: reserves, copies, commits


class Allocation(NamedTuple):
    """One allocation of device memory; the fields are those of ``kvcache.proto``, here and below."""

    ipc_handle: bytes
    """64 bytes, as the driver gave them."""
    num_bytes: int
    """From the allocation's base on."""


class LayerPages(NamedTuple):
    """Where one layer's pages are: block ``n``'s begins at ``offset + n * block_stride``."""

    allocation: int
    """Its position among the offer's allocations."""
    offset: int
    page_bytes: int
    block_stride: int


class GroupPages(NamedTuple):
    """Where the blocks of one KV group are."""

    group: int
    num_blocks: int
    blocks_per_row: int
    """That a stored row of this group holds."""
    layers: tuple[LayerPages, ...]
    """In the order in which a slot holds the pages of a block."""


@dataclass(frozen=True)
class TransferOffer:
    """Where a worker's KV lies, for the sidecar to read."""

    gpu_uuid: str = ""
    """``GPU-...`` or ``MIG-...``; empty: the KV is in host memory."""
    allocations: tuple[Allocation, ...] = ()
    """None: the memory can't be shared."""
    groups: tuple[GroupPages, ...] = ()
    """Each group that stores something."""
    refusal: str = ""
    """Why the memory can't be shared."""


@dataclass(frozen=True)
class ClientHello:
    """Who the client is; the same for all its sessions."""

    role: Role
    engine_uuid: bytes
    """16 bytes, the same in all processes of one engine instance."""
    namespace: bytes
    """32 bytes, see lmcache/keys.py."""
    chunk_tokens: int
    groups: tuple[KVGroup, ...]
    num_columns: int = 1
    """Ranks whose KV differs."""
    column: int = 0
    """This rank's; 0 for the scheduler."""
    private_reason: str = ""
    """Not empty: keys mean nothing outside this engine process; memory tier only."""
    model: str = ""
    transfer: TransferOffer = TransferOffer()
    """A worker's; what the sidecar may read of the KV."""
    kv_bytes: int = 0
    """Of a worker's own KV cache; 0: not said."""
