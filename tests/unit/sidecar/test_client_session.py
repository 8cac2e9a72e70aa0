"""The client's session: split calls, pending releases, a smaller arena, and refused copies."""

import hashlib
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from lmcache_client import off_notice
from lmcache_client.cuda.pin_status import PinStatus
from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc import service
from lmcache_client.rpc.attachment import Attachment, hello_message
from lmcache_client.rpc.client import SidecarClient
from lmcache_client.rpc.errors import EngineCopiesError, RpcRefusedError, SidecarUnavailableError
from lmcache_client.rpc.hints import AnswerReader
from lmcache_client.rpc.open_copies import OpenCopies
from lmcache_client.rpc.session import BlockCopy, SidecarSession
from lmcache_sidecar.clients.validation import parse_hello
from lmcache_store.hints import HintAction, HintDecision, HintKind, HintOutcome, Hints
from lmcache_store.tiers.memory.contracts import LookupResult, Slot
from tests.harness.sidecar.wire import make_hello
from tests.harness.tiers.remote_objects import pattern


class CallError(grpc.RpcError):
    """The end of a call with a status and, optionally, the reason that the sidecar adds."""

    def __init__(self, code, details="", reason=""):
        self.code, self.details = (lambda: code), (lambda: details)
        metadata: Any = ((service.REASON_METADATA, reason),)
        self.trailing_metadata = lambda: metadata


NO_ANSWER = CallError(grpc.StatusCode.DEADLINE_EXCEEDED)
REFUSAL = CallError(grpc.StatusCode.FAILED_PRECONDITION, "not visible here", service.REASON_ENGINE_COPIES)


class Channel:
    """A gRPC channel that records released ids, lookups and copies, and returns an error if one is set."""

    def __init__(self):
        self.released = []
        self.error = None
        self.looked_up = []  # (group, number of keys) of the last lookup
        self.copies = []
        self.marks = bytearray()  # of all calls
        self.hints = []  # requests of all calls
        self.decisions = []  # answer to hints

    def unary_unary(self, path, request_serializer, response_deserializer):
        def call(request, timeout):
            if self.error is not None:
                raise self.error
            if isinstance(request, pb.CopyBlocksRequest):
                self.copies.append(request)
                num_slots = sum(len(copies.slots) // service.SLOT_BYTES for copies in request.groups)
                return pb.CopyBlocksReply(copied=[True] * num_slots)
            if isinstance(request, pb.ShareMarksRequest):
                self.marks += request.marks
                start = 8 * request.since
                page = bytes(self.marks[start : start + 8 * service.MAX_MARKS_PER_CALL])
                return pb.ShareMarksReply(marks=page, since=request.since + len(page) // 8)
            if isinstance(request, pb.ApplyHintsRequest | pb.ReadHintsRequest):
                self.hints.append(request)
                return pb.ApplyHintsReply(decisions=self.decisions)
            if isinstance(request, pb.ReleaseRequest):
                self.released += request.request_ids
            if isinstance(request, pb.LookupRequest):
                self.looked_up = [(part.group, len(part.keys) // 64) for part in request.groups]
                num_keys = self.looked_up[0][1]
                return pb.LookupReply(num_resident=num_keys, num_leased=num_keys, num_pending=1, probing=True)
            return response_deserializer(b"")

        return call


@pytest.fixture
def client():
    return SidecarClient("/nonexistent/kvcache.sock", make_hello())


def attach(client, channel, column=None, store_copier=pb.COPIER_ENGINE):
    copies = OpenCopies(lambda: None)
    session = SidecarSession(
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


def test_release_while_detached_is_sent_after_the_next_attach(client):
    client.release_later("r")
    client.release_later("é")
    channel = Channel()
    session = attach(client, channel)
    assert set(channel.released) == {"r", hashlib.sha256("é".encode()).hexdigest()}
    session.release([])
    assert len(channel.released) == 2, "a release must be sent only once"


def test_pending_release_does_not_end_a_renewed_lease(client):
    """The scheduler looks up a preempted request again with the same id.

    Its old release may still be pending.
    """
    channel = Channel()
    session = attach(client, channel)
    channel.error = NO_ANSWER
    with pytest.raises(SidecarUnavailableError):
        session.release(["preempted", "other"])
    channel.error = None
    session.lookup("preempted", [(0, b"k" * 64)])
    session.release([])
    assert channel.released == ["other"]


def test_lookup_limits_the_chunks_of_all_groups_in_a_call(client):
    channel = Channel()
    session = attach(client, channel)
    keys = bytes(64) * 3000
    assert session.lookup("r", [(0, keys), (1, keys)]) == LookupResult(2048, 2048, 1, True)
    assert channel.looked_up == [(0, 2048), (1, 2048)]


def test_slot_outside_a_smaller_arena_is_not_held(client):
    column = SimpleNamespace(slots=[None] * 4, holds=lambda slot: ([True] * 4)[slot.row])
    session = attach(client, Channel(), column)
    assert session.holds(Slot(3, 1))
    assert not session.holds(Slot(4, 1))


def test_copy_of_long_rows_fits_into_messages(client):
    """A row has 8,192 blocks if a chunk has as many tokens, and a block has one."""
    channel = Channel()
    session = attach(client, channel, store_copier=pb.COPIER_SIDECAR)
    copies = [BlockCopy(0, Slot(row, 7), range(8192)) for row in range(256)]
    assert session.copy_blocks(copies) == [True] * 256
    assert max(request.ByteSize() for request in channel.copies) < service.MAX_MESSAGE_BYTES


def test_copy_of_many_slots_is_split_into_bounded_calls(client):
    channel = Channel()
    session = attach(client, channel, store_copier=pb.COPIER_SIDECAR)
    assert session.store_copier.is_sidecar
    copies = [BlockCopy(row // 200, Slot(row, 7), (row, row + 1)) for row in range(300)]
    assert session.copy_blocks(copies) == [True] * 300
    sent_groups = [groups for request in channel.copies for groups in request.groups]
    assert [(groups.group, len(groups.slots) // 16) for groups in sent_groups] == [(0, 200), (1, 56), (1, 44)]
    assert service.unpack_slots(b"".join(groups.slots for groups in sent_groups)) == [
        copy.slot for copy in copies
    ]
    blocks = np.frombuffer(b"".join(groups.blocks for groups in sent_groups), "<u4").reshape(-1, 2)
    assert blocks.tolist() == [list(copy.blocks) for copy in copies]


@pytest.mark.parametrize(
    ("error", "raised"), [(REFUSAL, EngineCopiesError), (NO_ANSWER, SidecarUnavailableError)]
)
def test_copy_that_was_refused_or_not_answered_keeps_the_session(client, error, raised):
    """Only a message of the stream makes the engine copy all further slots."""
    channel = Channel()
    session = attach(client, channel, store_copier=pb.COPIER_SIDECAR)
    channel.error = error
    with pytest.raises(raised, match=error.details() or None):
        session.copy_blocks([BlockCopy(0, Slot(1, 1), (1,))])
    assert session.store_copier.is_sidecar


def test_pins_are_reported_once_the_sidecar_has_answered():
    stream = Attachment("", pb.Hello(), OpenCopies(lambda: None), set())
    requests = stream._requests()
    assert next(requests).WhichOneof("message") == "hello"
    stream._epoch, stream._drained = 1, True
    stream.report_pins(PinStatus(5, 2, "ü" * 300))
    assert next(requests).pinned == pb.Pinned(pinned_bytes=5, num_failures=2, problem="ü" * 256)
    stream.cancel()
    assert not list(requests)


def test_messages_about_released_extents_keep_their_wire_format():
    released = pb.AttachRequest(extents_released=pb.ExtentsReleased(round=7))
    assert released.SerializeToString() == b"\x22\x02\x08\x07"


def test_hello_with_long_texts_is_accepted():
    """Reasons contain paths. A refused Hello would leave the engine without a cache."""
    hello = make_hello(model="/models/" + "m" * 600, private_reason="the file " + "ü" * 600)
    peer = parse_hello(hello_message(hello, b"u" * 16))
    assert peer.hello.private_reason.startswith("the file ü")
    assert peer.hello.model.startswith("/models/m")


class Pauses:
    """The closing event of a client: each pause between two attempts only moves the clock."""

    def __init__(self, seconds: float) -> None:
        self.now, self._end = 100.0, 100.0 + seconds

    def is_set(self) -> bool:
        return self.now >= self._end

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_cache_that_is_off_is_reported_every_ten_minutes(caplog, monkeypatch):
    caplog.set_level("INFO")
    pauses = Pauses(1250)
    notice = off_notice.OffNotice("lmcache.socket in --kv-transfer-config", lambda: pauses.now)
    client = SidecarClient("/nonexistent/kvcache.sock", make_hello(), notice=notice)
    monkeypatch.setattr(client, "_closing", pauses)
    client._run()
    assert [(record.levelname, record.message) for record in caplog.records] == 3 * [
        (
            "WARNING",
            "LMCache Cluster is OFF, the engine runs without its cache: no socket at /nonexistent/"
            "kvcache.sock: is the sidecar up and its directory mounted?"
            " (see lmcache.socket in --kv-transfer-config)",
        )
    ]
    caplog.clear()
    monkeypatch.setattr(client, "_closing", Pauses(1))
    client._attached(SimpleNamespace(epoch=7))
    client._detached("the sidecar ended the session")
    client._attached(SimpleNamespace(epoch=8))
    client._detached("the sidecar ended the session")
    attached, off, *again = [record.message for record in caplog.records]
    assert attached == "LMCache Cluster is on. Attached to the sidecar at /nonexistent/kvcache.sock, epoch 7"
    assert "is OFF" in off
    assert len(again) == 2, "a reason is reported again after an attach"


@pytest.mark.parametrize("num_sent", [0, 1, 3, 6, 7])
@pytest.mark.parametrize("num_known", [0, 2, 3, 9])
def test_marks_are_sent_and_received_in_pages(client, monkeypatch, num_sent, num_known):
    monkeypatch.setattr(service, "MAX_MARKS_PER_CALL", 3)
    known, sent = pattern(8 * num_known), pattern(8 * num_sent)[::-1]
    channel = Channel()
    channel.marks += known
    session = attach(client, channel)
    shared = session.share_marks(sent, 0)
    assert (shared.marks, shared.since) == (known + sent, num_known + num_sent)
    assert session.share_marks(b"", shared.since) == (b"", shared.since)


def test_sidecar_that_answers_without_end_is_not_asked_without_end(client, monkeypatch):
    monkeypatch.setattr(service, "MAX_MARKS_PER_CALL", 1)
    monkeypatch.setattr(service, "MAX_MARKS", 4)
    channel = Channel()
    channel.marks += bytes(8 * 100)
    assert attach(client, channel).share_marks(b"", 0) == (bytes(8 * 4), 4)


def test_older_sidecar_refuses_marks(client):
    channel = Channel()
    session = attach(client, channel)
    channel.error = CallError(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    with pytest.raises(RpcRefusedError, match="Method not found") as caught:
        session.share_marks(b"", 0)
    assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
    assert not session.is_over


DECISIONS = [
    pb.HintDecision(action_id="a", outcome=pb.HINT_CLIPPED, reason="25 %", num_tokens=512, ttl_seconds=60.0),
    pb.HintDecision(action_id="b", outcome=pb.HINT_ACCEPTED),
    pb.HintDecision(action_id="c", outcome=99, reason="a later version"),
]
PARSED = [
    HintDecision("a", HintOutcome.CLIPPED, "25 %", 512, 60.0),
    HintDecision("b", HintOutcome.ACCEPTED),
    HintDecision("c", HintOutcome.DEFERRED, "a later version"),
]


def test_hints_are_sent_with_the_keys_of_a_lookup(client):
    channel = Channel()
    channel.decisions = DECISIONS
    session = attach(client, channel)
    actions = HintAction("a", HintKind.RETAIN, 0, 512, 60.0, -7), HintAction("b", HintKind.RELEASE, 256)
    refusal = HintDecision("c", HintOutcome.REFUSED, "x" * 600)
    hints = Hints("session 7", actions, (refusal,))
    keys = bytes(64) * 3000
    assert session.apply_hints("é", [(0, keys), (2, keys)], b"t", hints, "0a") == PARSED
    (sent,) = channel.hints
    assert [(part.group, len(part.keys) // 64) for part in sent.groups] == [(0, 2048), (2, 2048)]
    assert sent.request_id == hashlib.sha256("é".encode()).hexdigest()
    assert (sent.tenant, sent.message_id, sent.answer_id) == (b"t", "session 7", "0a")
    first, second = sent.actions
    assert (first.kind, first.end_token, first.ttl_seconds, first.priority) == (pb.RETAIN, 512, 60.0, -7)
    assert (second.action_id, second.kind, second.begin_token) == ("b", pb.RELEASE, 256)
    assert [(each.action_id, each.outcome, len(each.reason)) for each in sent.refusals] == [
        ("c", pb.HINT_REFUSED, 512)
    ]


def test_answer_to_hints_is_read_without_attaching(monkeypatch):
    channel = Channel()
    channel.decisions, channel.close = DECISIONS, lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(grpc, "insecure_channel", lambda *_, **__: channel)
    with AnswerReader("/nonexistent/kvcache.sock") as reader:
        assert reader.read("0a") == PARSED
        assert [sent.answer_id for sent in channel.hints] == ["0a"]
        channel.error = CallError(grpc.StatusCode.NOT_FOUND)
        assert reader.read("0a") is None
        channel.error = CallError(grpc.StatusCode.UNIMPLEMENTED)
        with pytest.raises(RpcRefusedError):
            reader.read("0a")
        channel.error = NO_ANSWER
        with pytest.raises(SidecarUnavailableError):
            reader.read("0a")


def test_socket_without_a_sidecar_is_unavailable(tmp_path):
    with AnswerReader(str(tmp_path / "kvcache.sock")) as reader, pytest.raises(SidecarUnavailableError):
        reader.read("0a", timeout=60)
