"""CopyBlocks: whose slots, until when they are nobody else's, and who is told to copy for itself."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from lmcache_sidecar.clients.registry import Transfer
from lmcache_sidecar.clients.validation import RefusedError
from lmcache_sidecar.copiers import copier
from lmcache_sidecar.copiers.jobs import Job

from lmcache.kv_groups import KVGroup
from lmcache.rpc import kvcache_pb2 as pb
from lmcache.rpc import service
from lmcache.rpc.hello import Allocation, GroupPages, LayerPages, TransferOffer
from tests.harness.world import new_uuid, world

__all__ = ["world"]

UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"
OFFER = TransferOffer(
    UUID, (Allocation(b"h" * 64, 1 << 20),), (GroupPages(0, 9, 1, (LayerPages(0, 0, 4096, 4096),)),)
)


class FakeGpu:
    """Copies end when the test says so."""

    def __init__(self, uuid, arena, stats) -> None:
        self.jobs: list[Job] = []
        self.dropped: list[Job] = []
        self.num_slots_under_way = 0
        self.is_idle = False

    def add(self, member) -> None:
        member.on_turn(True, "it reads")

    def remove(self, number) -> None:
        pass

    def begin(self, number, copies) -> Job:
        job = Job(len(copies), [False] * len(copies), asyncio.get_running_loop().create_future())
        self.jobs.append(job)
        return job

    def drop(self, number, job) -> None:
        self.dropped.append(job)

    def end(self, *, is_copied: bool = True) -> None:
        (job,) = self.jobs
        job.refusal = "" if is_copied else "it died"
        for at in range(job.num_left):
            job.note_end(at, is_copied=is_copied)


@pytest.fixture
def engine(world, monkeypatch):
    monkeypatch.setattr(copier, "Gpu", FakeGpu)
    world.arena.row_offset = lambda row, column: row * 4096
    client = world.attach(new_uuid(), transfer=OFFER)
    assert client.transfer == Transfer(True, "it reads")
    (gpu,) = world.sessions.copier._gpus.values()
    return SimpleNamespace(client=client, gpu=gpu, world=world, memory=world.sessions.store.memory)


def request(engine, slots: bytes) -> pb.CopyBlocksRequest:
    blocks = np.zeros(len(slots) // service.SLOT_BYTES, "<u4").tobytes()
    return pb.CopyBlocksRequest(
        epoch=engine.client.epoch,
        client_uuid=engine.client.peer.uuid,
        groups=[pb.GroupCopies(group=0, slots=slots, blocks=blocks)],
    )


def test_slots_are_held_until_their_copy_ended(engine):
    async def run() -> None:
        slots = engine.world.reserve(engine.client, 1, 2).slots
        call = asyncio.create_task(engine.world.sessions.copy_blocks(request(engine, slots)))
        await asyncio.sleep(0)
        assert engine.memory.num_held == 2
        with pytest.raises(RefusedError, match=r"nothing was committed: a copy .* is under way"):
            engine.world.commit(engine.client, slots)
        with pytest.raises(RefusedError, match=r"nothing was copied: a copy .* is under way"):
            await engine.world.sessions.copy_blocks(request(engine, slots))
        engine.gpu.end()
        assert list((await call).copied) == [True, True]
        assert engine.memory.num_held == 0
        engine.world.commit(engine.client, slots)

    asyncio.run(run())


def test_who_does_not_wait_for_the_end_leaves_its_slots_to_nobody(engine):
    async def run() -> None:
        slots = engine.world.reserve(engine.client, 1).slots
        call = asyncio.create_task(engine.world.sessions.copy_blocks(request(engine, slots)))
        await asyncio.sleep(0)
        call.cancel()  # as by the deadline of the call
        with pytest.raises(asyncio.CancelledError):
            await call
        assert engine.gpu.dropped == engine.gpu.jobs, "what is not under way yet is not begun"
        engine.world.abort(engine.client, slots)
        assert (engine.memory.num_held, engine.memory.num_used) == (1, 1)
        engine.gpu.end()
        await asyncio.sleep(0)
        assert (engine.memory.num_held, engine.memory.num_used) == (0, 0)

    asyncio.run(run())


def test_a_copy_that_failed_is_the_engine_s_to_do(engine):
    async def run() -> None:
        slots = engine.world.reserve(engine.client, 1).slots
        call = asyncio.create_task(engine.world.sessions.copy_blocks(request(engine, slots)))
        await asyncio.sleep(0)
        engine.gpu.end(is_copied=False)
        with pytest.raises(RefusedError, match="it died") as caught:
            await call
        assert caught.value.reason == service.REASON_ENGINE_COPIES
        engine.world.commit(engine.client, slots)  # the engine has copied meanwhile

    asyncio.run(run())


def test_what_can_t_be_copied_is_refused_and_nothing_is_held(engine):
    async def refused(message: pb.CopyBlocksRequest) -> RefusedError:
        with pytest.raises(RefusedError) as caught:
            await engine.world.sessions.copy_blocks(message)
        return caught.value

    slots = engine.world.reserve(engine.client, 1).slots
    other = engine.world.attach(new_uuid(), transfer=OFFER)
    stolen = request(engine, slots)
    stolen.epoch, stolen.client_uuid = other.epoch, other.peer.uuid
    assert "not reserved by this client" in asyncio.run(refused(stolen)).message
    stale = request(engine, slots)
    stale.epoch += 1
    assert asyncio.run(refused(stale)).reason == service.REASON_ATTACH_AGAIN
    assert "out of range" in asyncio.run(refused(request(engine, service.pack_slots([(99, 1)])))).message
    engine.client.transfer = Transfer(False, "the engine copies: no GPU")
    error = asyncio.run(refused(request(engine, slots)))
    assert (error.message, error.reason) == ("the engine copies: no GPU", service.REASON_ENGINE_COPIES)
    assert engine.memory.num_held == 0


def test_a_row_of_another_group_does_not_reach_into_the_neighbour_s_slots(engine):
    """It would be written over KV that others have committed."""
    groups = (KVGroup(0, 16, 3 * 4096), KVGroup(1, 16, 4096))
    pages = [
        GroupPages(group, 9, 1, (LayerPages(0, 0, size, size),)) for group, size in ((0, 12288), (1, 4096))
    ]
    offer = TransferOffer(UUID, OFFER.allocations, tuple(pages))
    other = {"engine_uuid": b"o" * 16, "groups": groups, "transfer": offer}
    engine.world.sessions.clients.detach(engine.client)
    engine.world.die(engine.client.peer.uuid)
    engine.world.pass_time(10.0)
    client = engine.world.attach(new_uuid(), **other)
    reserved = engine.world.reserve(client, 1, group=1)
    blocks = np.zeros(1, "<u4").tobytes()
    message = pb.CopyBlocksRequest(
        epoch=client.epoch,
        client_uuid=client.peer.uuid,
        groups=[pb.GroupCopies(group=0, slots=reserved.slots, blocks=blocks)],
    )
    with pytest.raises(RefusedError, match=r"nothing was copied: .* is not reserved for 12288 bytes"):
        asyncio.run(asyncio.wait_for(engine.world.sessions.copy_blocks(message), 60))
    assert engine.world.sessions.store.memory.num_held == 0


def test_a_call_for_nothing_has_an_answer(engine):
    """And does not wait for the end of no copies for ever."""
    for message in (request(engine, b""), pb.CopyBlocksRequest(epoch=engine.client.epoch)):
        message.client_uuid = engine.client.peer.uuid
        with pytest.raises(RefusedError, match="names no slot"):
            asyncio.run(asyncio.wait_for(engine.world.sessions.copy_blocks(message), 60))


def test_more_gpus_than_a_node_has_are_not_read(engine):
    """Each costs a process, and any client can name one."""
    for number in range(copier._MAX_GPUS):
        uuid = f"{UUID[:-4]}{number:04x}"
        client = engine.world.attach(new_uuid(), transfer=replace(OFFER, gpu_uuid=uuid))
    assert client.transfer == Transfer(False, "the engine copies: the sidecar reads 64 GPUs already")
    engine.gpu.is_idle = True
    assert engine.world.attach(new_uuid(), transfer=replace(OFFER, gpu_uuid=uuid)).transfer.is_ipc


def test_the_arena_gets_no_other_format_under_a_copy(engine):
    engine.gpu.num_slots_under_way = 1
    engine.world.sessions.clients.detach(engine.client)
    engine.world.die(engine.client.peer.uuid)
    engine.world.pass_time(10.0)
    with pytest.raises(RefusedError, match="may still be writing to the arena"):
        engine.world.attach(new_uuid(), engine_uuid=b"x" * 16, num_columns=2)
    engine.gpu.num_slots_under_way = 0
    engine.world.attach(new_uuid(), engine_uuid=b"x" * 16, num_columns=2)
