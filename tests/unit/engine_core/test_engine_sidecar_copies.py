"""Stores that the sidecar copies: their start, their results, and the fallback to the engine."""

import threading

import grpc
import pytest

from lmcache_client.core import transfers
from lmcache_client.rpc.errors import EngineCopiesError, SidecarUnavailableError
from lmcache_client.rpc.session import StoreCopier
from tests.harness.client.worker_rig import WorkerRig


class SidecarCopies:
    """Replaces the sidecar, and copies the rig's KV into the requested slots."""

    def __init__(self, rig):
        self._rig = rig
        self.calls = []
        self.gate = threading.Event()
        self.gate.set()
        self.in_copy = threading.Event()
        self.fault = lambda number: None  # raises an error, or returns a different answer
        rig.session.store_copier = StoreCopier(True, "")
        rig.session.copy_blocks = self.copy_blocks

    def copy_blocks(self, copies):
        assert self._rig.session.is_copying
        assert self._rig.copier.waits, "the copy must wait for the engine's work"
        self.calls.append([copy.slot for copy in copies])
        self.in_copy.set()
        assert self.gate.wait(60)
        if (answer := self.fault(len(self.calls))) is not None:
            return answer
        for copy in copies:
            row = self._rig.session.slots[copy.slot.row]
            row[: len(copy.blocks)] = [self._rig.copier.kv[block] for block in copy.blocks]
        return [True] * len(copies)


class CopyingRig(WorkerRig):
    """A worker whose stores the sidecar copies."""

    def __init__(self):
        super().__init__()
        self.sidecar = SidecarCopies(self)


@pytest.fixture
def rig():
    rig = CopyingRig()
    yield rig
    rig.sidecar.gate.set()
    rig.finish()


def test_sidecar_copies_and_engine_commits(rig):
    rig.store()
    rig.collect_until(lambda *_: len(rig.session.committed) == 2)
    assert (rig.stored_bytes(), rig.copier.waits) == ([[1, 2], [3, 4]], ["fence"])
    assert not rig.copier.fences, "the engine must not copy"


def test_copies_finished_before_the_reclaim_are_committed(rig, monkeypatch):
    monkeypatch.setattr(transfers, "_SLOTS_PER_CALL", 1)

    def reclaim_in_the_second_call(number):
        if number == 2:
            rig.worker._stores[1].cancel()

    rig.sidecar.fault = reclaim_in_the_second_call
    rig.store(names=(b"a", b"b", b"c"), blocks=(1, 2, 3, 4, 5, 6))
    rig.collect_until(lambda *_: not rig.worker._stores)
    assert (rig.stored_bytes(), len(rig.session.aborted)) == ([[1, 2]], 2)
    assert len(rig.sidecar.calls) == 2, "no further copy must start"


def test_unfilled_slots_are_aborted(rig):
    rig.sidecar.fault = lambda _: [False, True]
    rig.store()
    rig.collect_until(lambda *_: not rig.worker._stores)
    assert [slot.row for slot in rig.session.committed] == [1]
    assert [slot.row for slot in rig.session.aborted] == [0]


@pytest.mark.parametrize("refused_call", [1, 2])
def test_refused_call_makes_the_engine_copy_the_rest(rig, monkeypatch, refused_call):
    """No chunk is lost, and no slot that the sidecar filled is copied again."""
    monkeypatch.setattr(transfers, "_SLOTS_PER_CALL", 1)

    def refuse(number):
        if number == refused_call:
            rig.session.store_copier = StoreCopier(False, "the child died")
            raise EngineCopiesError(grpc.StatusCode.FAILED_PRECONDITION, "the child died")

    rig.sidecar.fault = refuse
    rig.store()
    rig.collect_until(lambda *_: len(rig.session.committed) == 2)
    assert (rig.stored_bytes(), len(rig.copier.fences)) == ([[1, 2], [3, 4]], 3 - refused_call)
    rig.store(names=(b"c",), blocks=(7, 8))
    rig.collect_until(lambda *_: len(rig.session.committed) == 3)
    assert len(rig.sidecar.calls) == refused_call, "the sidecar must not get another call"


def test_unanswered_call_aborts_the_slots_without_engine_copy(rig):
    """The sidecar may still fill these slots."""

    def lose_the_answer(_):
        raise SidecarUnavailableError("no answer")

    rig.sidecar.fault = lose_the_answer
    rig.store()
    rig.collect_until(lambda *_: not rig.worker._stores)
    assert len(rig.session.aborted) == 2
    assert not rig.session.committed
    assert not rig.copier.fences
