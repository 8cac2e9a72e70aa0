"""The store copier of all clients: for which of them the sidecar copies, and why not for the others."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lmcache_client.cuda.pin_status import PinStatus
from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc import service
from lmcache_sidecar.clients.offers import SlotCopy
from lmcache_sidecar.clients.registry import ChosenCopier, Client
from lmcache_sidecar.clients.validation import precondition
from lmcache_sidecar.copiers import jobs
from lmcache_sidecar.copiers.gpu import GpuCopier
from lmcache_sidecar.copiers.jobs import CopyStats, Job
from lmcache_sidecar.copiers.members import Member
from lmcache_store.tiers.memory.arena import ArenaFile
from lmcache_store.tiers.memory.contracts import Slot
from lmcache_store.tiers.stats import count_reason

CLOSE_SECONDS = 2.0
"""Time for readers to end; a reader that hangs in the driver may never end."""

_MAX_GPUS = 64
"""Limit of GPUs to read: each takes a process, and clients could name any number of GPUs."""


class Mode(enum.Enum):
    """Values of ``--transfer``."""

    AUTO = "Auto"
    CUDA_IPC = "CudaIPC"
    SHARED_MEMORY = "SharedMemory"


class Copying(NamedTuple):
    """A job of copies that were started for one client."""

    gpu: GpuCopier
    client: Client
    job: Job

    async def wait(self) -> list[bool]:
        """Wait for the end of all copies. Returns whether each slot is filled.

        Raises CallRefusedError when the engine has to copy. If the caller disconnects, copies that have not
        begun are dropped.
        """
        try:
            await asyncio.shield(self.job.ended)
        except asyncio.CancelledError:
            self.gpu.drop(self.client.epoch, self.job)
            raise
        if self.job.refusal:
            raise precondition(self.job.refusal, service.REASON_ENGINE_COPIES)
        return self.job.copied


class SidecarCopier:
    """Copies stores from GPUs for the clients that allow it. Without a GPU it refuses, with the reason.

    ``on_change`` is called whenever the copier of a client's stores changes.
    """

    def __init__(self, mode: Mode, arena: ArenaFile, on_change: Callable[[], None] = lambda: None) -> None:
        self.mode = mode
        self.on_change = on_change
        self.stats = CopyStats()
        self._arena = arena
        self._gpus: dict[str, GpuCopier] = {}

    @property
    def num_slots_under_way(self) -> int:
        """Slots that a reader may be writing to."""
        return sum(gpu.num_slots_under_way for gpu in self._gpus.values())

    @property
    def has_readers(self) -> bool:
        """Are there readers of GPUs, which know the arena's present format?"""
        return not all(gpu.is_idle for gpu in self._gpus.values())

    @property
    def pins(self) -> dict[str, PinStatus]:
        """Amount of the arena that each reader has pinned, by the UUID of its GPU."""
        return {uuid: gpu.pins for uuid, gpu in self._gpus.items()}

    def attach(self, client: Client) -> None:
        """Copy for a worker if possible. ``client.transfer`` holds the decision, now and after changes."""
        offer = client.peer.hello.transfer
        if not client.peer.is_worker:
            return
        self._gpus = {uuid: gpu for uuid, gpu in self._gpus.items() if not gpu.is_idle}
        if self.mode is Mode.SHARED_MEMORY:
            refusal = "the sidecar runs with --transfer SharedMemory"
        elif not offer.gpu_uuid:
            refusal = "its KV is in host memory"
        elif not offer.allocations:
            refusal = offer.refusal or "it does not share its GPU memory"
        elif offer.gpu_uuid not in self._gpus and len(self._gpus) == _MAX_GPUS:
            refusal = f"the sidecar reads {_MAX_GPUS} GPUs already"
        else:
            self._attach_to(client, offer)
            return
        count_reason(self.stats.left_to_engines, refusal)
        self._turn(client, False, refusal)

    def _attach_to(self, client: Client, offer: pb.TransferOffer) -> None:
        if offer.gpu_uuid not in self._gpus:
            self._gpus[offer.gpu_uuid] = GpuCopier(offer.gpu_uuid, self._arena, self.stats)
        self._gpus[offer.gpu_uuid].add(
            Member(
                client.epoch,
                client.peer.hello.pid,
                self._arena.column_offset(client.peer.hello.column),
                offer,
                lambda is_ipc, reason: self._turn(client, is_ipc, reason),
            )
        )

    def detach(self, client: Client) -> None:
        """Close the memory of a client whose stream ended."""
        if (gpu := self._gpus.get(client.peer.hello.transfer.gpu_uuid)) is not None:
            gpu.remove(client.epoch)

    def begin(
        self, client: Client, copies: Sequence[SlotCopy], tenant_of: Callable[[Slot], bytes]
    ) -> Copying:
        """Start to fill slots from a client's GPU memory. ``client.transfer.is_ipc`` must be true.

        ``tenant_of``: the tenant of a slot's row; tenants take turns."""
        gpu = self._gpus[client.peer.hello.transfer.gpu_uuid]
        column = client.peer.hello.column
        placed = [
            jobs.PlacedCopy(
                copy.group, self._arena.row_offset(copy.slot.row, column), copy.blocks, tenant_of(copy.slot)
            )
            for copy in copies
        ]
        return Copying(gpu, client, gpu.begin(client.epoch, placed))

    def grow(self) -> None:
        """Report newly populated rows of the arena to all readers."""
        for gpu in self._gpus.values():
            gpu.grow()

    def release_surplus(self) -> bool:
        """End readers that have rows pinned that are not ready any more. Returns True if no reader has."""
        have_released = [gpu.release_surplus() for gpu in self._gpus.values()]  # start all, then compare
        return all(have_released)

    async def close(self) -> None:
        """End all readers, and wait for up to ``CLOSE_SECONDS``."""
        closing = [asyncio.create_task(gpu.close()) for gpu in self._gpus.values()]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_SECONDS)

    def _turn(self, client: Client, is_ipc: bool, reason: str) -> None:
        client.transfer = ChosenCopier(is_ipc, reason if is_ipc else f"the engine copies: {reason}")
        self.on_change()
