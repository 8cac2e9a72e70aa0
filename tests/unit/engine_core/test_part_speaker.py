"""The rank of each part that calls its sidecar for the scheduler side, which is on another node."""

import itertools
import pickle
import threading
from typing import Any

import numpy as np
import pytest

from lmcache_client.core.parts import End, Hint, Lease, PartAnswer, PartedStep
from lmcache_store import keys
from lmcache_store.kv_groups import GroupKind, KVGroup
from lmcache_store.tiers.memory.contracts import Slot
from tests.harness.client.parted_rig import PartedRig
from tests.harness.client.scheduler_rig import GRID, hashes, make_request
from tests.harness.client.session_double import SessionDouble
from tests.harness.client.worker_rig import IDENTITY, SALT, WorkerRig, parted_identity
from tests.harness.sidecar.wire import NAMESPACE

CHUNKS = b"a".ljust(32) + b"b".ljust(32)


class SpeakerRig(WorkerRig):
    """A speaker whose calls to the sidecar are recorded in ``calls``, and wait while ``gate`` is closed."""

    def __init__(self, *groups):
        groups = groups or IDENTITY.hello.groups
        super().__init__(parted_identity(1, groups=groups, is_speaker=True))
        self.calls, self.gate, self.is_in_call = [], threading.Event(), threading.Event()
        self.gate.set()
        lookup, release = self.session.lookup, self.session.release

        def record(request_id, group_keys, *, hint=False, **fields):
            self.is_in_call.set()
            assert self.gate.wait(60)
            self.calls.append(("hint" if hint else "lease", request_id, len(group_keys[0][1]) // 64))
            return lookup(request_id, group_keys, hint=hint, **fields)

        def record_release(request_ids, **fields):
            self.calls.append(("release", *request_ids))
            return release(request_ids, **fields)

        session: Any = self.session
        session.lookup, session.release = record, record_release

    def drain(self):
        done = threading.Event()
        self.worker._speaker._queue.put(done.set)
        assert done.wait(60)

    def send(self, *relays, drain=True):
        self.worker.start_loads(pickle.loads(pickle.dumps(PartedStep(relays=list(relays)))))
        if drain:
            self.drain()

    def answers(self):
        """The answers of part 1 in the step's report, by request."""
        report = self.worker.take_report(PartedStep())
        return {name: answer[1] for name, answer in getattr(report, "answers", {}).items()}


class SpeakingPart:
    """Part 1 of a ``PartedRig``, with a real speaker."""

    number = 1

    def __init__(self, speaker):
        self.speaker = speaker

    def take(self, relays):
        self.speaker.send(*relays)
        return self.speaker.answers()


@pytest.fixture
def speaker():
    rig = SpeakerRig()
    yield rig
    rig.gate.set()
    rig.finish()


def hint(number=1, *, request_id="r", namespace=NAMESPACE, chunks=(CHUNKS,), **fields):
    return Hint(request_id, number, namespace, chunks, **fields)


def answer(number, *bits, expected=0, is_probing=False):
    return PartAnswer(
        number, tuple(np.packbits(np.array(group, bool)).tobytes() for group in bits), expected, is_probing
    )


def test_sidecar_asks_again_for_rows_that_were_handed_over(speaker):
    speaker.send(hint(num_handed_over=2))
    assert speaker.session.num_handed_over == 2


def test_hint_is_answered_in_the_same_step_and_again_after_the_sidecar(speaker):
    speaker.store_in_part(names=(b"a", b"c"))
    speaker.gate.clear()
    speaker.session.num_pending = 1
    speaker.send(hint(5), drain=False)
    assert speaker.is_in_call.wait(60)
    assert speaker.answers() == {"r": answer(5, [1, 0], expected=1, is_probing=True)}
    assert speaker.answers() == {}, "nothing is new"
    speaker.gate.set()
    speaker.drain()
    assert speaker.answers() == {"r": answer(5, [1, 0], expected=2)}
    assert speaker.answers() == {}


def test_hint_is_repeated_without_its_keys(speaker):
    speaker.session.is_probing = True
    speaker.send(hint(1))
    assert speaker.answers() == {"r": answer(1, [0, 0], is_probing=True)}
    speaker.session.is_probing = False
    speaker.store_in_part()  # as if the sidecar had promoted the rows
    speaker.send(hint(2, chunks=()))
    assert speaker.answers() == {"r": answer(2, [1, 1], expected=2)}, "nothing is left to promote"
    speaker.session.rows.clear()
    speaker.send(hint(3, chunks=()))
    assert speaker.answers() == {"r": answer(3, [0, 0])}
    assert speaker.calls == [("hint", "r", 2), ("hint", "r", 2)], "all rows were in memory at the second hint"


def test_long_hint_comes_in_pieces(speaker):
    speaker.store_in_part()
    speaker.gate.clear()
    speaker.send(hint(1, chunks=(b"c".ljust(32) + CHUNKS[:32],)), drain=False)
    assert speaker.is_in_call.wait(60)
    speaker.send(hint(2, chunks=(CHUNKS[32:],), first_chunk=2), drain=False)
    assert speaker.answers() == {"r": answer(2, [0, 1, 1], is_probing=True)}
    speaker.gate.set()
    speaker.drain()
    speaker.session.num_pending = 3
    assert speaker.answers() == {}, "the sidecar did not know of all chunks"
    speaker.drain()
    assert speaker.answers() == {"r": answer(2, [0, 1, 1], expected=3)}
    assert [number for _, _, number in speaker.calls] == [2, 3]


def test_hint_of_the_same_answer_is_answered(speaker):
    for number in (1, 2):
        speaker.send(hint(number))
        assert speaker.answers() == {"r": answer(number, [0, 0])}


def test_sidecar_gets_the_names_of_the_part_and_the_facts_of_the_request(speaker):
    lookups = []

    def lookup(*args, **fields):
        lookups.append((args, fields))
        raise ValueError

    speaker.session.lookup = lookup
    speaker.send(hint(salt_hash=SALT, tokens_per_second=7.0, private_reason="reset"))
    (((request_id, groups), fields),) = lookups
    name = keys.part_namespace(NAMESPACE, 1)
    assert (request_id, groups) == ("r", [(0, name + CHUNKS[:32] + name + CHUNKS[32:])])
    assert fields["tenant"] == keys.tenant("salt", name)
    assert (fields["prefill_tokens_per_second"], fields["private_reason"]) == (7.0, "reset")
    assert fields["hint"]
    assert fields["is_relayed"], "the sidecar would count the request"
    assert speaker.answers() == {"r": answer(1, [0, 0])}, "a failed call is an answer"


def test_request_has_a_lease_from_its_load_to_its_end(speaker):
    speaker.store_in_part()
    speaker.send(hint(), Lease("r", 1))
    assert speaker.session.leased == {"r"}
    assert speaker.calls == [("lease", "r", 1), ("hint", "r", 2)], "part 0 marks all rows as used, too"
    speaker.send(End("r"), End("r"))
    assert speaker.calls[2:] == [("release", "r")]


def test_request_without_a_load_marks_its_rows_as_used(speaker):
    """The engine itself has its chunks. Otherwise each part would evict other rows than part 0."""
    speaker.store_in_part(names=(b"a", b"c"))
    speaker.send(hint())
    speaker.calls.clear()
    speaker.send(End("r"))
    assert speaker.calls == [("hint", "r", 1)], "a hint of a missing row would promote it"


def test_restarted_request_gives_up_its_lease(speaker):
    speaker.store_in_part()
    speaker.send(hint(), Lease("r", 2), End("r"), hint(2, namespace=b"r" * 32), Lease("r", 1))
    assert speaker.calls == [("lease", "r", 2), ("release", "r"), ("hint", "r", 2), ("lease", "r", 1)]
    assert speaker.answers() == {"r": answer(2, [0, 0])}


@pytest.mark.parametrize("num_lost", [0, 40])
def test_many_requests_hit_rows_that_a_part_promotes(speaker, num_lost):
    """Hints of many requests are repeated rarely, so the part reports by itself that rows arrived.

    ``num_lost``: oldest requests, whose rows never arrive.
    """
    rig = PartedRig()
    rig.now, rig.parts = 1.0, [SpeakingPart(speaker)]
    rig.session.memory_only = True
    speaker.session.num_pending = 3
    requests = [make_request(200, f"{n}", block_hashes=hashes(200, f"{n} ")) for n in range(100)]
    for request in requests:
        rig.stored(3, name=f"{request.request_id} ")
        rig.arrive(request)
    part = keys.part_namespace(NAMESPACE, 1)
    names = [GRID.chunk_hashes(request.block_hashes, 0, 3) for request in requests]
    rows = [part + key for chunk_hashes in names[num_lost:] for key in keys.chunk_keys(chunk_hashes)]
    speaker.session.committed.append(Slot(0, 1))
    for first in range(0, len(rows), 4):
        rig.turn()
        assert {rig.match(request)[0] for request in requests[num_lost:]} <= {None, 192}
        rig.now += 0.01
        speaker.session.rows |= dict.fromkeys(rows[first : first + 4], Slot(0, 1))
    rig.turn()
    assert [rig.match(request) for request in requests[num_lost:]] == [(192, True)] * (100 - num_lost)
    assert len(rig.relays) < 200
    rig.scheduler.go_offline()


def test_hint_of_a_request_that_ends_in_the_same_step_is_answered(speaker):
    """Else a silent part would stay silent while each request is computed at once."""
    ended = PartAnswer(1, (), 0, is_probing=False)
    speaker.send(hint(1), End("r"))
    assert speaker.answers() == {"r": ended}
    speaker.send(hint(1, request_id="other"), End("other"), hint(2), End("r"), hint(3))
    assert speaker.answers() == {"other": ended, "r": answer(3, [0, 0])}
    speaker.send(End("r"))
    assert speaker.answers() == {}, "it was answered before"


def test_calls_of_unknown_requests_are_ignored(speaker):
    speaker.store_in_part()
    speaker.send(Lease("r", 1), End("r"), hint(3, chunks=()), hint(4, first_chunk=2))
    assert speaker.answers() == {}
    assert speaker.calls == []


def test_requests_that_wait_in_thousands_are_hinted_once_and_leased(speaker):
    rig = PartedRig()
    rig.parts = [SpeakingPart(speaker)]
    rig.session.memory_only = True
    rig.stored(3)
    speaker.session.num_pending = 3
    requests = [make_request(200, f"{number}") for number in range(3000)]
    for request in requests:
        rig.scheduler.on_new_request(request)
    while rig.lookups._hinted:
        rig.turn()
    rig.now += 2.0  # the requests waited in the engine's queue
    assert rig.match(requests[0]) == (None, False)
    for chunk_key in keys.chunk_keys(GRID.chunk_hashes(hashes(192), 0, 3)):
        slot = speaker.session.rows[keys.part_namespace(NAMESPACE, 1) + chunk_key] = Slot(0, 1)
        speaker.session.committed.append(slot)
    for _ in range(2):
        rig.turn()
    assert [rig.begin(request) for request in requests[:100]] == [192] * 100
    rig.turn()
    assert speaker.session.leased == {f"{number}" for number in range(100)}
    hints = [relay for relay in rig.relays if isinstance(relay, Hint)]
    assert sum(bool(hint.chunk_keys) for hint in hints) == 3000
    assert len(hints) == 3001
    rig.scheduler.go_offline()


@pytest.mark.parametrize("fault", ["down", "lost"])
def test_part_whose_sidecar_is_silent_or_lost_is_answered(speaker, monkeypatch, fault):
    speaker.store_in_part(names=(b"a", b"c"))
    with monkeypatch.context() as patch:
        if fault == "down":
            patch.setattr(speaker.session, "is_down", True)
        else:
            patch.setattr(type(speaker.session), "session", None)
        for number in (1, 2):
            speaker.send(hint(number), Lease("r", 1), End("r"))
            speaker.send(hint(number))
            num_resident = 1 if fault == "down" else 0
            assert speaker.answers() == {"r": answer(number, [num_resident, 0], expected=num_resident)}
    speaker.session.epoch += 1
    speaker.session.num_pending = 1
    speaker.send(hint(3, chunks=()))
    assert speaker.answers() == {"r": answer(3, [1, 0], expected=2)}


WINDOWED = KVGroup(0, 32, 4096), KVGroup(1, 32, 4096, 64, GroupKind.SLIDING_WINDOW)


def test_answer_names_the_rows_of_each_group():
    rig = SpeakerRig(*WINDOWED)
    rig.copier.row_bytes[1] = 4096
    rig.store_in_part(groups={0: (1, 2, 3, 4)})
    rig.jobs = 0
    job = rig.job(names=(b"b",), groups={1: (5, 6)})
    rig.worker.start_stores(PartedStep(stores=[job]))
    rig.collect_until(lambda *_: not rig.worker._stores)
    rig.session.num_pending = -1  # the double takes every group for full attention
    chunks = CHUNKS, b"1 a".ljust(32) + b"1 b".ljust(32)
    rig.send(hint(chunks=chunks))
    assert rig.answers() == {"r": answer(1, [1, 1], [0, 1], expected=2)}
    rig.send(hint(2, chunks=(chunks[0], chunks[1][:32] + b"c".ljust(32))))
    assert rig.answers() == {"r": answer(2, [1, 1], [0, 0])}
    rig.finish()


@pytest.mark.parametrize(
    "hooks", list(itertools.permutations(["handle_preemptions", "start_loads", "start_stores", "collect"]))
)
def test_calls_of_a_step_are_made_once_by_its_first_hook(hooks):
    rig = SpeakerRig()
    steps = PartedStep(relays=[hint()]), PartedStep(), PartedStep(relays=[Lease("r", 1), End("r")])
    for step in map(pickle.loads, map(pickle.dumps, steps)):
        for _ in range(2):
            for hook in hooks:
                getattr(rig.worker, hook)(step)
        rig.drain()
    assert rig.calls == [("hint", "r", 2), ("lease", "r", 1), ("release", "r")]
    rig.finish()


def test_ranks_that_do_not_speak_make_no_calls(monkeypatch):
    rig = WorkerRig(parted_identity(1))
    for name in ("lookup", "release"):
        monkeypatch.setattr(rig.session, name, None)
    rig.worker.start_loads(PartedStep(relays=[hint(), Lease("r", 1), End("r")]))
    assert rig.worker.take_report(PartedStep()) is None
    rig.finish()


def test_speaker_leaves_the_client_to_the_worker(monkeypatch):
    closed = []
    monkeypatch.setattr(SessionDouble, "close", lambda session: closed.append(session))
    rig = SpeakerRig()
    thread = rig.worker._speaker._thread
    rig.send(hint())
    rig.worker.go_offline()
    thread.join(60)
    assert not thread.is_alive()
    assert not closed, "copies may still be running"
    rig.worker.start_loads(PartedStep(relays=[hint(2)]))
    assert rig.answers() == {}
    rig.worker.close()
    assert closed == [rig.session]


def test_offline_rank_ends_its_leases(speaker):
    speaker.store_in_part()
    speaker.send(hint(), Lease("r", 2))
    assert speaker.session.leased == {"r"}
    thread = speaker.worker._speaker._thread
    speaker.worker.go_offline()
    thread.join(60)
    assert speaker.session.leased == set()
