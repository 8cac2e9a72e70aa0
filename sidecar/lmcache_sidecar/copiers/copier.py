"""The store copier of all clients: which of them the sidecar copies for, and why not for the others."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lmcache.cuda.pin_status import PinStatus
from lmcache.rpc import kvcache_pb2 as pb
from lmcache.rpc import service
from lmcache.tiers.memory.arena import ArenaFile
from lmcache.tiers.stats import count_reason
from lmcache_sidecar.clients.offers import SlotCopy
from lmcache_sidecar.clients.registry import Client, Transfer
from lmcache_sidecar.clients.validation import precondition
from lmcache_sidecar.copiers import jobs
from lmcache_sidecar.copiers.gpu import Gpu, Member
from lmcache_sidecar.copiers.jobs import CopyStats, Job

CLOSE_SECONDS = 2.0
"""For readers to be gone; one that hangs in the driver may never be."""


_MAX_GPUS = 64
"""A process each: no more of these than GPUs that a node may have, whatever clients say."""


class Mode(enum.Enum):
    """``--transfer``."""

    AUTO = "Auto"
    CUDA_IPC = "CudaIPC"
    SHARED_MEMORY = "SharedMemory"


class Copying(NamedTuple):
    """Copies that were begun."""

    gpu: Gpu
    client: Client
    job: Job

    async def wait(self) -> list[bool]:
        """Wait for the end of all of them; is each slot filled? Raises RefusedError when the engine has to
        copy. A caller that goes away takes back what is not under way yet.
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
    """See the module. It works without any GPU, too: then it refuses, with the reason.

    ``on_change`` is called whenever somebody else copies a client's stores from now on.
    """

    def __init__(self, mode: Mode, arena: ArenaFile, on_change: Callable[[], None] = lambda: None) -> None:
        self.mode = mode
        self.on_change = on_change
        self.stats = CopyStats()
        self._arena = arena
        self._gpus: dict[str, Gpu] = {}

    @property
    def num_slots_under_way(self) -> int:
        """Slots that a reader may be writing to."""
        return sum(one.num_slots_under_way for one in self._gpus.values())

    @property
    def pins(self) -> dict[str, PinStatus]:
        """How much of the arena each reader has pinned, by the UUID of its GPU."""
        return {uuid: one.pins for uuid, one in self._gpus.items()}

    def attach(self, client: Client) -> None:
        """Copy for the client if it can be; ``client.transfer`` says so, now and later."""
        offer = client.peer.hello.transfer
        if not client.peer.is_worker:
            return
        self._gpus = {uuid: one for uuid, one in self._gpus.items() if not one.is_idle}
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
            self._gpus[offer.gpu_uuid] = Gpu(offer.gpu_uuid, self._arena, self.stats)
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
        """The client's stream ended: close its memory at once."""
        if (one := self._gpus.get(client.peer.hello.transfer.gpu_uuid)) is not None:
            one.remove(client.epoch)

    def begin(self, client: Client, copies: Sequence[SlotCopy]) -> Copying:
        """Fill slots from the memory of a client whose ``transfer`` says that the sidecar copies."""
        one = self._gpus[client.peer.hello.transfer.gpu_uuid]
        column = client.peer.hello.column
        placed = [
            jobs.SlotCopy(copy.group, self._arena.row_offset(copy.slot.row, column), copy.blocks)
            for copy in copies
        ]
        return Copying(one, client, one.begin(client.epoch, placed))

    def grow(self) -> None:
        """More rows of the arena are populated."""
        for one in self._gpus.values():
            one.grow()

    def let_go(self) -> bool:
        """End the readers that have rows pinned that are not ready any more; True: none has."""
        have_let_go = [one.let_go() for one in self._gpus.values()]  # all begin to
        return all(have_let_go)

    async def close(self) -> None:
        """End all readers."""
        closing = [asyncio.create_task(one.close()) for one in self._gpus.values()]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_SECONDS)

    def _turn(self, client: Client, is_ipc: bool, reason: str) -> None:
        client.transfer = Transfer(is_ipc, reason if is_ipc else f"the engine copies: {reason}")
        self.on_change()
