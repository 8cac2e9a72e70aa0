"""CopyBlocks: which slots a client may copy, how long they are held, and when the engine must copy."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc import service
from lmcache_client.rpc.hello import Allocation, GroupPages, LayerPages, TransferOffer
from lmcache_sidecar.clients.registry import ChosenCopier
from lmcache_sidecar.clients.validation import CallRefusedError
from lmcache_sidecar.copiers import copier
from lmcache_sidecar.copiers.jobs import Job
from lmcache_store.kv_groups import KVGroup
from tests.harness.loops import in_a_loop
from tests.harness.sidecar.world import new_uuid, world

__all__ = ["world"]

UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"
OFFER = TransferOffer(
    UUID, (Allocation(b"h" * 64, 1 << 20),), (GroupPages(0, 9, 1, (LayerPages(0, 0, 4096, 4096),)),)
)


class FakeGpu:
    """A GPU whose copies end when the test ends them."""

    def __init__(self, uuid, arena, stats) -> None:
        self.jobs: list[Job] = []
        self.dropped: list[Job] = []
        self.num_slots_under_way = 0
        self.is_idle = False

    def add(self, member) -> None:
        member.on_turn(True, "the reader works")

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
        job.refusal = "" if is_copied else "the reader died"
        for index in range(job.num_left):
            job.note_end(index, is_copied=is_copied)


@pytest.fixture
def engine(world, monkeypatch):
    monkeypatch.setattr(copier, "GpuCopier", FakeGpu)
    world.arena.row_offset = lambda row, column: row * 4096
    client = world.attach(new_uuid(), transfer=OFFER)
    assert client.transfer == ChosenCopier(True, "the reader works")
    (gpu,) = world.sessions.copier._gpus.values()
    return SimpleNamespace(client=client, gpu=gpu, world=world, memory=world.sessions.store.memory)


def request(engine, slots: bytes, client=None) -> pb.CopyBlocksRequest:
    client = client or engine.client
    blocks = np.zeros(len(slots) // service.SLOT_BYTES, "<u4").tobytes()
    return pb.CopyBlocksRequest(
        epoch=client.epoch,
        client_uuid=client.peer.uuid,
        groups=[pb.GroupCopies(group=0, slots=slots, blocks=blocks)],
    )


async def begin_copy(engine, *numbers: int):
    """Reserve slots, and begin their copy. Returns slots and call."""
    slots = engine.world.reserve(engine.client, *numbers).slots
    call = asyncio.create_task(engine.world.sessions.copy_blocks(request(engine, slots)))
    await asyncio.sleep(0)
    return slots, call


def end_engine(engine) -> None:
    engine.world.sessions.clients.detach(engine.client)
    engine.world.die(engine.client.peer.uuid)
    engine.world.pass_time(10.0)


@in_a_loop
async def test_slots_are_held_until_their_copy_ends(engine):
    slots, call = await begin_copy(engine, 1, 2)
    assert len(engine.memory._held) == 2
    with pytest.raises(CallRefusedError, match=r"nothing was committed: a copy .* is under way"):
        engine.world.commit(engine.client, slots)
    with pytest.raises(CallRefusedError, match=r"nothing was copied: a copy .* is under way"):
        await engine.world.sessions.copy_blocks(request(engine, slots))
    engine.gpu.end()
    assert list((await call).copied) == [True, True]
    assert not engine.memory._held
    engine.world.commit(engine.client, slots)


@in_a_loop
async def test_cancelled_copy_holds_its_slots_until_it_ends(engine):
    slots, call = await begin_copy(engine, 1)
    call.cancel()  # as at the deadline of the call
    with pytest.raises(asyncio.CancelledError):
        await call
    assert engine.gpu.dropped == engine.gpu.jobs, "copies that have not started must not start"
    engine.world.abort(engine.client, slots)
    assert (len(engine.memory._held), engine.memory.num_used) == (1, 1)
    engine.gpu.end()
    await asyncio.sleep(0)
    assert (len(engine.memory._held), engine.memory.num_used) == (0, 0)


@in_a_loop
async def test_failed_copy_must_be_done_by_the_engine(engine):
    slots, call = await begin_copy(engine, 1)
    engine.gpu.end(is_copied=False)
    with pytest.raises(CallRefusedError, match="the reader died") as caught:
        await call
    assert caught.value.reason == service.REASON_ENGINE_COPIES
    engine.world.commit(engine.client, slots)  # the engine has copied the slot itself


def test_invalid_copy_is_refused_and_holds_no_slot(engine):
    async def refusal_of(message: pb.CopyBlocksRequest) -> CallRefusedError:
        with pytest.raises(CallRefusedError) as caught:
            await engine.world.sessions.copy_blocks(message)
        return caught.value

    slots = engine.world.reserve(engine.client, 1).slots
    other_client = engine.world.attach(new_uuid(), transfer=OFFER)
    stolen = request(engine, slots, other_client)
    assert "not reserved by this client" in asyncio.run(refusal_of(stolen)).message
    stale = request(engine, slots)
    stale.epoch += 1
    assert asyncio.run(refusal_of(stale)).reason == service.REASON_ATTACH_AGAIN
    assert "out of range" in asyncio.run(refusal_of(request(engine, service.pack_slots([(99, 1)])))).message
    engine.client.transfer = ChosenCopier(False, "the engine copies: no GPU")
    error = asyncio.run(refusal_of(request(engine, slots)))
    assert (error.message, error.reason) == ("the engine copies: no GPU", service.REASON_ENGINE_COPIES)
    assert not engine.memory._held


def test_copy_with_the_row_size_of_another_group_is_refused(engine):
    """The copy would overwrite committed KV of other slots."""
    groups = (KVGroup(0, 16, 3 * 4096), KVGroup(1, 16, 4096))
    pages = [
        GroupPages(group, 9, 1, (LayerPages(0, 0, size, size),)) for group, size in ((0, 12288), (1, 4096))
    ]
    offer = TransferOffer(UUID, OFFER.allocations, tuple(pages))

    end_engine(engine)
    engine.gpu.is_idle = True
    client = engine.world.attach(new_uuid(), engine_uuid=b"o" * 16, groups=groups, transfer=offer)
    message = request(engine, engine.world.reserve(client, 1, group=1).slots, client)
    with pytest.raises(CallRefusedError, match=r"nothing was copied: .* is not reserved for 12288 bytes"):
        asyncio.run(asyncio.wait_for(engine.world.sessions.copy_blocks(message), 60))
    assert not engine.world.sessions.store.memory._held


def test_call_without_slots_is_refused(engine):
    """The call must not wait forever for the end of an empty list of copies."""
    for message in (request(engine, b""), pb.CopyBlocksRequest(epoch=engine.client.epoch)):
        message.client_uuid = engine.client.peer.uuid
        with pytest.raises(CallRefusedError, match="names no slot"):
            asyncio.run(asyncio.wait_for(engine.world.sessions.copy_blocks(message), 60))


def test_number_of_read_gpus_is_limited(engine):
    """Each GPU needs a process, and any client can name any GPU."""
    for number in range(copier._MAX_GPUS):
        uuid = f"{UUID[:-4]}{number:04x}"
        client = engine.world.attach(new_uuid(), transfer=replace(OFFER, gpu_uuid=uuid))
    assert client.transfer == ChosenCopier(False, "the engine copies: the sidecar reads 64 GPUs already")
    engine.gpu.is_idle = True
    assert engine.world.attach(new_uuid(), transfer=replace(OFFER, gpu_uuid=uuid)).transfer.is_ipc


def test_arena_keeps_its_geometry_until_the_readers_of_gpus_have_ended(engine):
    end_engine(engine)
    with pytest.raises(CallRefusedError, match="may still write to the arena"):
        engine.world.attach(new_uuid(), engine_uuid=b"x" * 16, num_columns=2)
    engine.gpu.is_idle = True
    engine.world.attach(new_uuid(), engine_uuid=b"x" * 16, num_columns=2)
