"""What a session knows of its own: answers in parts, leases that could not be ended yet, another arena."""

import hashlib
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from lmcache.cuda.pin_status import PinStatus
from lmcache.rpc import kvcache_pb2 as pb
from lmcache.rpc import service
from lmcache.rpc.attachment import Attachment
from lmcache.rpc.client import SidecarClient
from lmcache.rpc.errors import EngineCopiesError, SidecarUnavailableError
from lmcache.rpc.session import BlockCopy, Copies, Session
from lmcache.tiers.memory.contracts import LookupResult, Slot
from tests.harness.wire import make_hello


class NoAnswer(grpc.RpcError):
    def code(self):
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self):
        return ""


class EngineCopies(grpc.RpcError):
    def code(self):
        return grpc.StatusCode.FAILED_PRECONDITION

    def details(self):
        return "the GPU is not visible here"

    def trailing_metadata(self):
        return ((service.REASON_METADATA, service.REASON_ENGINE_COPIES),)


class Channel:
    """Notes the ids that are released, and answers unless it is told not to."""

    def __init__(self):
        self.released = []
        self.error = None
        self.asked = []  # (group, number of keys) of the last lookup
        self.copies = []

    def unary_unary(self, path, request_serializer, response_deserializer):
        def call(request, timeout):
            if self.error is not None:
                raise self.error
            if isinstance(request, pb.CopyBlocksRequest):
                self.copies.append(request)
                num_slots = sum(len(copies.slots) // service.SLOT_BYTES for copies in request.groups)
                return pb.CopyBlocksReply(copied=[True] * num_slots)
            if isinstance(request, pb.ReleaseRequest):
                self.released += request.request_ids
            if isinstance(request, pb.LookupRequest):
                self.asked = [(part.group, len(part.keys) // 64) for part in request.groups]
                number = self.asked[0][1]
                return pb.LookupReply(num_resident=number, num_leased=number, num_pending=1, probing=True)
            return response_deserializer(b"")

        return call


@pytest.fixture
def client():
    return SidecarClient("/nonexistent/kvcache.sock", make_hello())


def attach(client, channel, column=None, store_copier=pb.COPIER_ENGINE):
    copies = Copies(lambda: None)
    session = Session(
        channel,
        b"c" * 16,
        pb.Attached(epoch=1, store_copier=store_copier),
        column,
        None,
        copies,
        on_stale=lambda _: None,
        pending_releases=client._pending_releases,
    )
    client._attached(session)
    return session


def test_what_is_released_while_detached_is_sent_after_the_next_attach(client):
    client.release_later("r")
    client.release_later("é")
    channel = Channel()
    session = attach(client, channel)
    assert set(channel.released) == {"r", hashlib.sha256("é".encode()).hexdigest()}
    session.release([])
    assert len(channel.released) == 2, "once is enough"


def test_a_late_release_does_not_end_a_lease_that_was_taken_again(client):
    """A preempted request is looked up once more under its id; its old release may still be owed."""
    channel = Channel()
    session = attach(client, channel)
    channel.error = NoAnswer()
    with pytest.raises(SidecarUnavailableError):
        session.release(["preempted", "other"])
    channel.error = None
    session.lookup("preempted", [(0, b"k" * 64)])
    session.release([])
    assert channel.released == ["other"]


def test_a_lookup_is_one_call_of_as_many_chunks_as_all_groups_may_have(client):
    channel = Channel()
    session = attach(client, channel)
    keys = bytes(64) * 3000
    assert session.lookup("r", [(0, keys), (1, keys)]) == LookupResult(2048, 2048, 1, True)
    assert channel.asked == [(0, 2048), (1, 2048)]


def test_a_slot_beyond_a_smaller_arena_is_not_held(client):
    column = SimpleNamespace(slots=[None] * 4, holds=lambda slot: ([True] * 4)[slot.row])
    session = attach(client, Channel(), column)
    assert session.holds(Slot(3, 1))
    assert not session.holds(Slot(4, 1))


def test_many_slots_of_several_groups_are_copied_in_bounded_calls(client):
    channel = Channel()
    session = attach(client, channel, store_copier=pb.COPIER_SIDECAR)
    assert session.store_copier.is_sidecar
    copies = [BlockCopy(row // 200, Slot(row, 7), (row, row + 1)) for row in range(300)]
    assert session.copy_blocks(copies) == [True] * 300
    sent = [groups for request in channel.copies for groups in request.groups]
    assert [(groups.group, len(groups.slots) // 16) for groups in sent] == [(0, 200), (1, 56), (1, 44)]
    assert service.unpack_slots(b"".join(groups.slots for groups in sent)) == [copy.slot for copy in copies]
    blocks = np.frombuffer(b"".join(groups.blocks for groups in sent), "<u4").reshape(-1, 2)
    assert blocks.tolist() == [list(copy.blocks) for copy in copies]


def test_a_sidecar_that_can_t_read_the_gpu_leaves_copying_to_the_engine(client):
    channel = Channel()
    session = attach(client, channel, store_copier=pb.COPIER_SIDECAR)
    channel.error = EngineCopies()
    with pytest.raises(EngineCopiesError, match="not visible here"):
        session.copy_blocks([BlockCopy(0, Slot(1, 1), (1,))])
    assert session.store_copier.is_sidecar, "the stream says when that changes"


def test_a_copy_without_an_answer_is_no_reason_for_a_new_epoch(client):
    """The sidecar keeps slots whose copy is under way from everybody, also when they are aborted."""
    channel = Channel()
    session = attach(client, channel, store_copier=pb.COPIER_SIDECAR)
    channel.error = NoAnswer()
    with pytest.raises(SidecarUnavailableError):
        session.copy_blocks([BlockCopy(0, Slot(1, 1), (1,))])
    assert session.store_copier.is_sidecar


@pytest.mark.parametrize("takes_pinned", [True, False], ids=["this sidecar", "an older one"])
def test_pins_are_reported_only_to_a_sidecar_that_understands_them(takes_pinned):
    """An older sidecar ends the stream at a message that it does not know."""
    stream = Attachment("", pb.Hello(), Copies(lambda: None), set())
    requests = stream._requests()
    assert next(requests).WhichOneof("message") == "hello"
    stream._takes_pinned = takes_pinned
    stream.report_pins(PinStatus(5, 2, "ü" * 300))
    if takes_pinned:
        assert next(requests).pinned == pb.Pinned(pinned_bytes=5, num_failures=2, problem="ü" * 256)
    stream.cancel()
    assert not list(requests)
