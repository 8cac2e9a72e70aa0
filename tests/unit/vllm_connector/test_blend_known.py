"""Documents that an engine knows: it learns them, and shares their marks through the sidecar."""

import logging
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from lmcache_client.core.requests import Ticket
from lmcache_client.rpc.errors import RpcRefusedError, SidecarError, SidecarUnavailableError
from lmcache_client.vllm.blend import known
from lmcache_client.vllm.blend.known import POLL_SECONDS, REPEAT_SECONDS, KnownDocuments
from lmcache_client.vllm.blend.marks import make_mark, seed_of
from tests.harness.client.blend_rig import document
from tests.harness.sidecar.wire import NAMESPACE

TICKET = Ticket("r", [], NAMESPACE)
PLACE = [range(1, 101)]


def prompt_with(number):
    return [9, *document(number, 100), 5]


def marks_of(*numbers):
    return [make_mark(document(number, 100), 100, seed_of(NAMESPACE, None)) for number in numbers]


class FakeSession:
    """A sidecar that numbers the marks that engines send. ``error``: what its next calls raise."""

    def __init__(self, epoch=1, marks=()):
        self.epoch = epoch
        self.marks = list(marks)
        self.calls = []  # marks and ``since`` of each
        self.error = None

    def share_marks(self, marks, since, timeout=None):
        assert timeout
        self.calls.append((np.frombuffer(marks, "<u8").tolist(), since))
        if self.error is not None:
            raise self.error
        self.marks += self.calls[-1][0]
        return SimpleNamespace(marks=np.array(self.marks[since:], "<u8").tobytes(), since=len(self.marks))


class Engine:
    """The documents that an engine knows. ``serve`` is its lookup thread."""

    def __init__(self, session=None, learns_prompts=False):
        self.now = 0.0
        self.session = session or FakeSession()
        self.known = KnownDocuments(learns_prompts=learns_prompts, clock=lambda: self.now)
        self.tasks = []
        self.known.poll(self)

    def run(self, task):
        self.tasks.append(task)

    def serve(self, num_tasks=1000):
        """Do the queued tasks, without a session or with errors as the lookup thread does."""
        for _ in range(num_tasks):
            if not self.tasks:
                return
            task = self.tasks.pop(0)
            try:
                if self.session is not None:
                    task(self.session)
            except SidecarError:
                pass
        assert not self.tasks or num_tasks < 1000, "the lookup thread would never be idle"

    def learn(self, *numbers, ticket=TICKET):
        for number in numbers:
            self.known.learn(document(number, 100), 100, ticket)

    def poll(self, seconds=POLL_SECONDS):
        self.now += seconds
        self.known.poll(self)
        self.serve()

    def finds(self, number, ticket=TICKET):
        return self.known.find(prompt_with(number), ticket, self) == PLACE


def refusal(code):
    return RpcRefusedError(code, "refused")


FAILURES = [
    SidecarUnavailableError("down"),
    refusal(grpc.StatusCode.RESOURCE_EXHAUSTED),
    refusal(grpc.StatusCode.INVALID_ARGUMENT),
]


def test_learned_document_is_found_without_a_sidecar():
    engine = Engine(session=None)
    engine.learn(1)
    assert engine.finds(1)
    assert not engine.finds(2)
    assert not engine.finds(1, Ticket("r", [], NAMESPACE, "tenant"))
    assert not engine.finds(1, Ticket("r", [], b"m" * 32))
    engine.learn(2, ticket=Ticket("r", [], NAMESPACE, "tenant"))
    assert engine.finds(2, Ticket("r", [], NAMESPACE, "tenant"))
    assert not engine.finds(2)


def test_short_documents_and_those_that_depend_on_more_than_tokens_are_not_learned():
    engine = Engine(learns_prompts=True)
    engine.known.learn(document(1, 63), 63, TICKET)
    with_adapter = Ticket("r", [], NAMESPACE)
    with_adapter.extra_keys = ((0, b"adapter"),)
    engine.learn(2, ticket=with_adapter)
    engine.known.learn_prompt(document(2, 100), 100, with_adapter)
    engine.serve()
    assert engine.session.calls == [([], 0)]
    assert not engine.finds(2)


def test_engines_share_documents_through_the_sidecar():
    session = FakeSession()
    first, second = Engine(session), Engine(session)
    first.learn(1)
    first.serve()
    second.serve()
    assert second.finds(1)
    assert session.marks == marks_of(1)
    second.learn(2)
    second.serve()
    first.poll()
    assert first.finds(2)


def test_learned_document_is_sent_at_once_and_again_only_after_a_while():
    engine = Engine()
    engine.learn(1, 2, 1)
    engine.serve()
    assert engine.session.calls == [(marks_of(1, 2), 0)]
    engine.poll(REPEAT_SECONDS - 1)
    engine.learn(1)
    engine.serve()
    assert engine.session.calls[1:] == [([], 2)]
    engine.now += 1
    engine.learn(2)
    engine.serve()
    assert engine.session.calls[2:] == [(marks_of(2), 2)]


def test_sidecar_is_polled_at_most_once_a_second():
    engine = Engine()
    for _ in range(30):
        engine.now += 0.1
        engine.finds(1)
        engine.serve()
    assert [engine.session.calls[0], len(engine.session.calls)] == [([], 0), 3]


def test_tasks_that_queue_up_make_one_call():
    engine = Engine()
    engine.learn(*range(50))
    engine.poll()
    assert engine.session.calls == [(marks_of(*range(50)), 0)]


def test_documents_of_a_prompt_take_one_task():
    """Each task may take the GIL from the scheduler's thread."""
    engine = Engine()
    engine.serve()
    engine.learn(*range(50))
    assert len(engine.tasks) == 1
    engine.session.error = SidecarUnavailableError("down")
    engine.serve()
    engine.now += POLL_SECONDS
    engine.session.error = None
    engine.learn(50)
    engine.serve()
    assert engine.session.calls[-1] == (marks_of(*range(51)), 0)


@pytest.mark.parametrize("error", FAILURES, ids=str)
def test_marks_of_a_failed_call_are_sent_with_the_next_one(error):
    engine = Engine()
    engine.serve()
    engine.session.error = error
    engine.learn(1)
    engine.serve()
    engine.learn(2)
    session = engine.session
    engine.session = None  # the calls pause
    engine.serve()
    engine.session, session.error = session, None
    engine.poll()
    assert session.calls[1:] == [(marks_of(1), 0), (marks_of(1, 2), 0)]
    engine.poll()
    assert session.calls[3:] == [([], 2)]


def test_new_session_gets_all_documents_again():
    engine = Engine()
    engine.learn(1)
    engine.serve()
    engine.session = FakeSession(epoch=2, marks=marks_of(3))
    engine.learn(2)
    engine.poll()
    assert engine.session.calls == [(marks_of(1, 2), 0)]
    assert engine.finds(3)
    engine.poll()
    assert engine.session.calls[1:] == [([], 3)]


def test_old_sidecar_is_asked_once_in_each_session(caplog):
    caplog.set_level(logging.INFO, known.__name__)
    engine = Engine()
    engine.session.error = refusal(grpc.StatusCode.UNIMPLEMENTED)
    engine.learn(1)
    for _ in range(3):
        engine.poll()
    engine.learn(2)
    engine.poll()
    assert len(engine.session.calls) == 1
    (message,) = caplog.messages
    assert "upgrade" in message
    assert engine.finds(2)
    engine.session = FakeSession(epoch=2)
    engine.poll()
    assert engine.session.calls == [(marks_of(1, 2), 0)]


def test_many_marks_take_several_tasks(monkeypatch):
    monkeypatch.setattr(known, "_MAX_MARKS", 4)
    monkeypatch.setattr(known, "_LOCKED_MARKS", 3)
    theirs = marks_of(*range(100, 120))
    engine = Engine(FakeSession(marks=theirs))
    engine.learn(*range(10))
    engine.tasks = engine.tasks[:1]
    engine.serve(1)
    assert engine.finds(103)
    assert not engine.finds(119)
    assert len(engine.tasks) == 1  # the engine's hints are served before the rest
    engine.serve()
    assert engine.finds(119)
    assert engine.session.marks == theirs + marks_of(*range(10))
    assert [len(marks) for marks, _ in engine.session.calls] == [4, 4, 2]


def test_queues_are_bounded(monkeypatch):
    monkeypatch.setattr(known, "MAX_FINGERPRINTS", 5)
    engine = Engine(session=None)
    engine.learn(*range(9))
    engine.session = FakeSession()
    engine.poll()
    assert engine.session.calls == [(marks_of(*range(4, 9)), 0)]
    engine.poll(REPEAT_SECONDS)
    engine.learn(4, 9)  # 5 is now the document that was least recently sent
    engine.session = FakeSession(epoch=2)
    engine.poll()
    assert engine.session.calls == [(marks_of(6, 7, 8, 4, 9), 0)]


@pytest.mark.parametrize("packed", [b"", b"\0" * 7, b"\0" * 16, b"\xff" * 31, b"\xff" * 800])
def test_marks_of_a_broken_sidecar_do_no_harm(packed):
    engine = Engine()
    engine.session.share_marks = lambda *_, **__: SimpleNamespace(marks=packed, since=0)
    engine.learn(1)
    engine.poll()
    assert engine.finds(1)


def test_new_weights_end_all_that_is_known():
    engine = Engine(FakeSession(marks=marks_of(1)), learns_prompts=True)
    engine.serve()
    engine.learn(2)
    engine.known.learn_prompt(document(3, 100), 100, TICKET)
    session = engine.session
    session.error = SidecarUnavailableError("down")
    engine.serve()
    engine.known.clear()
    session.error = None
    assert not any(map(engine.finds, (1, 2, 3)))
    num_calls = len(session.calls)
    private = Ticket("r", [], b"p" * 32)
    engine.learn(4, ticket=private)
    engine.poll()
    engine.session = FakeSession(epoch=2)
    engine.poll()
    assert engine.finds(4, private)  # by this engine only
    assert [len(session.calls), engine.session.calls] == [num_calls, []]


def test_marks_received_before_new_weights_are_not_added(monkeypatch):
    monkeypatch.setattr(known, "_MAX_MARKS", 1)
    monkeypatch.setattr(known, "_LOCKED_MARKS", 1)
    engine = Engine(FakeSession(marks=marks_of(1, 2, 3)))
    engine.serve(1)
    engine.known.clear()
    engine.serve()
    assert not any(map(engine.finds, (1, 2, 3)))


def test_stored_prompts_are_proposed_if_they_are_learned_and_never_sent():
    for learns_prompts in False, True:
        engine = Engine(learns_prompts=learns_prompts)
        engine.known.learn_prompt(document(1, 100), 100, TICKET)
        engine.learn(2)
        engine.serve()
        assert engine.session.marks == marks_of(2)
        assert engine.finds(1) == learns_prompts
        assert engine.finds(2)


def test_prompts_replace_no_documents(monkeypatch):
    monkeypatch.setattr(known, "MAX_PROMPTS", 3)
    engine = Engine(learns_prompts=True)
    engine.learn(0)
    for number in range(1, 9):
        engine.known.learn_prompt(document(number, 100), 100, TICKET)
    assert [number for number in range(9) if engine.finds(number)] == [0, 6, 7, 8]


def test_lookup_thread_calls_the_sidecar(rig):
    documents = KnownDocuments(learns_prompts=False)
    rig.session.share_marks = FakeSession(marks=marks_of(1)).share_marks
    rig.session.is_down = True
    rig.lookups.run(lambda session: session.lookup("r", []))  # its error ends no thread
    documents.poll(rig.lookups)
    rig.session.epoch, rig.session.is_down = 2, False
    documents.learn(document(2, 100), 100, TICKET)
    rig.drain_lookups()
    for number in 1, 2:
        assert documents.find(prompt_with(number), TICKET, rig.lookups) == PLACE
