"""Identity of a client, which it sends to the sidecar first. Pure; ``attachment`` makes the message."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lmcache_store.kv_groups import KVGroup


class Role(enum.Enum):
    """Role of a client in its engine; the values are those of ``kvcache.proto``."""

    SCHEDULER = 1  # looks up and releases, maps nothing
    WORKER = 2  # one rank: reserves, copies, commits


@dataclass(frozen=True)
class Allocation:
    """One allocation of device memory. All fields in this module are those of ``kvcache.proto``."""

    ipc_handle: bytes
    """The driver's IPC handle, 64 bytes."""
    num_bytes: int
    """Bytes of the allocation, from its base."""


@dataclass(frozen=True)
class LayerPages:
    """Place of one layer's pages: the page of block ``n`` begins at ``offset + n * block_stride``."""

    allocation: int
    """Position of the allocation in the offer's list."""
    offset: int
    page_bytes: int
    block_stride: int


@dataclass(frozen=True)
class GroupPages:
    """Place of the blocks of one KV group."""

    group: int
    num_blocks: int
    blocks_per_row: int
    """Number of blocks that a row of this group holds."""
    layers: tuple[LayerPages, ...]
    """Layers in the order in which a slot holds the pages of a block."""


@dataclass(frozen=True)
class TransferOffer:
    """Place of a worker's KV, for the sidecar to read."""

    gpu_uuid: str = ""
    """UUID of the GPU, ``GPU-...`` or ``MIG-...``; empty: the KV is in host memory."""
    allocations: tuple[Allocation, ...] = ()
    """Allocations that hold the KV; empty if they can't be shared."""
    groups: tuple[GroupPages, ...] = ()
    """Places of each group that stores rows."""
    refusal: str = ""
    """Reason why the memory can't be shared."""


@dataclass(frozen=True)
class ClientHello:
    """Identity of a client, the same for all its sessions."""

    role: Role
    engine_uuid: bytes
    """16 bytes, the same in all processes of one engine instance."""
    namespace: bytes
    """Namespace of the engine's keys, 32 bytes, see sidecar/lmcache_store/keys.py."""
    chunk_tokens: int
    groups: tuple[KVGroup, ...]
    num_columns: int = 1
    """Number of ranks whose KV differs."""
    column: int = 0
    """Column of this rank; 0 for the scheduler."""
    private_reason: str = ""
    """Why keys are valid in this engine process only; its KV is then only in the memory tier. Else empty."""
    model: str = ""
    transfer: TransferOffer = TransferOffer()
    """A worker's KV that the sidecar may read."""
    kv_bytes: int = 0
    """Bytes of a worker's own KV cache; 0: unknown."""
    numa_nodes: tuple[int, ...] = ()
    """NUMA node of the GPU of each column; empty: unknown."""
    computes_on_cpu: bool = False
    """False: on a GPU, or unknown."""


@dataclass(frozen=True)
class PartedHello(ClientHello):
    """Identity of a client of an engine whose ranks span several nodes. Others send no ``num_parts``."""

    num_parts: int = 2
    """Nodes of the engine. All have the same number of ranks, and each has a sidecar."""
