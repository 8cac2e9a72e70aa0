"""What a session knows of its own: answers in parts, leases that could not be ended yet, another arena."""

import hashlib
import itertools
from types import SimpleNamespace

import grpc
import pytest

from lmcache.rpc import kvcache_pb2 as pb
from lmcache.rpc.client import SidecarClient
from lmcache.rpc.errors import SidecarUnavailableError
from lmcache.rpc.session import Copies, Session
from lmcache.tiers.memory.contracts import LookupResult, Slot
from tests.harness.wire import make_hello


class NoAnswer(grpc.RpcError):
    def code(self):
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self):
        return ""


class Channel:
    """Notes the ids that are released, and answers unless it is told not to."""

    def __init__(self):
        self.released = []
        self.is_silent = False
        self.resident = {}  # by group: numbers of keys
        self.num_lookups = 0

    def unary_unary(self, path, request_serializer, response_deserializer):
        def call(request, timeout):
            if self.is_silent:
                raise NoAnswer
            if isinstance(request, pb.ReleaseRequest):
                self.released += request.request_ids
            if isinstance(request, pb.LookupRequest):
                self.num_lookups += 1
                return pb.LookupReply(groups=map(self._found, request.groups))
            return response_deserializer(b"")

        return call

    def _found(self, asked):
        numbers = [int.from_bytes(asked.keys[at : at + 64], "big") for at in range(0, len(asked.keys), 64)]
        leading = list(itertools.takewhile(self.resident.get(asked.group, set()).__contains__, numbers))
        return pb.GroupResult(num_resident=len(leading), num_leased=len(leading))


@pytest.fixture
def client():
    return SidecarClient("/nonexistent/kvcache.sock", make_hello())


def attach(client, channel, column=None):
    copies = Copies(lambda: None)
    session = Session(
        channel,
        b"c" * 16,
        pb.Attached(epoch=1),
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
    channel.is_silent = True
    with pytest.raises(SidecarUnavailableError):
        session.release(["preempted", "other"])
    channel.is_silent = False
    session.lookup("preempted", [(0, b"k" * 64)])
    session.release([])
    assert channel.released == ["other"]


def test_each_group_counts_what_comes_before_its_own_gap(client):
    channel = Channel()
    session = attach(client, channel)
    keys = b"".join(number.to_bytes(64, "big") for number in range(300))
    channel.resident = {0: set(range(300)) - {200}, 1: set(range(300))}
    assert session.lookup("r", [(0, keys), (1, keys)]) == [LookupResult(200, 200), LookupResult(300, 300)]
    assert channel.num_lookups == 3, "a call takes 256 keys of all groups together"
    channel.resident = {0: set(range(100)), 1: set(range(1, 300))}
    assert session.lookup("r", [(0, keys), (1, keys)]) == [LookupResult(100, 100), LookupResult()]
    assert channel.num_lookups == 4, "no group has all keys of the first call"


def test_a_slot_beyond_a_smaller_arena_is_not_held(client):
    column = SimpleNamespace(slots=[None] * 4, holds=lambda slot: ([True] * 4)[slot.row])
    session = attach(client, Channel(), column)
    assert session.holds(Slot(3, 1))
    assert not session.holds(Slot(4, 1))
