"""Loads: their reports, failures at missing slots, and the waits of an idle engine."""

import threading

import pytest

from lmcache_client.core import worker as module
from lmcache_client.core.jobs import GroupLoad, LoadJob, StepMeta
from lmcache_store.tiers.memory.contracts import Slot
from tests.harness.client.session_double import SessionDouble
from tests.harness.client.worker_rig import WorkerRig, found_rows


@pytest.fixture
def rig():
    rig = WorkerRig()
    yield rig
    rig.finish()


def begin_load(rig):
    """Start a load of one row, whose copy stays in progress until the gate opens."""
    rig.session.committed.append(Slot(0, 1))
    rig.copier.gate.clear()
    rig.load(Slot(0, 1))


def test_load_is_reported_only_after_its_copy(rig):
    begin_load(rig)
    assert rig.copier.in_copy.wait(60)
    for _ in range(20):
        assert rig.collect((), is_idle=True) == (set(), set())
    rig.copier.gate.set()
    assert rig.collect_until(lambda sent, loaded: loaded)[1] == ["r"]


@pytest.mark.parametrize("batch_bytes", [1, 8192, 1 << 20])
@pytest.mark.parametrize("is_evicted_before", [True, False])
def test_slot_evicted_during_a_batch_fails_the_following_blocks(rig, batch_bytes, is_evicted_before):
    """The third of five slots is evicted before the first copy of the load, or after it."""
    slots = [Slot(row, 1) for row in range(5)]
    rig.session.committed += slots
    rig.copier.batch_bytes = batch_bytes
    if is_evicted_before:
        rig.session.committed.remove(slots[2])
    else:

        def evict():
            rig.session.committed[:] = [slot for slot in slots if slot != slots[2]]

        rig.copier.after_copy = evict
    rig.load(*slots, blocks=tuple(range(11, 21)))
    assert rig.collect_until(lambda sent, loaded: loaded)[1] == ["r"]
    assert rig.worker.take_bad_blocks() == {15, 16, 17, 18, 19, 20}
    assert rig.worker.take_bad_blocks() == set()
    assert rig.worker.take_report(StepMeta()).failed_loads == {"r"}
    assert rig.copier.kv.keys() >= {11, 12, 13, 14}


@pytest.mark.parametrize("fault", ["no session", "copy raises", "no chunks", "offline"])
def test_load_is_reported_once_after_any_failure(rig, fault, monkeypatch):
    rig.session.committed.append(Slot(0, 1))
    if fault == "no session":
        monkeypatch.setattr(SessionDouble, "session", None)
    if fault == "copy raises":
        rig.copier.load = None
    if fault == "offline":
        rig.copier.fence = None  # an unhealthy device can cause this
        rig.worker.go_offline()
    chunks = None if fault == "no chunks" else found_rows(Slot(0, 1))
    load = LoadJob("r", (GroupLoad(0, (11, 12), chunks, blocks_per_row=2),))
    for _ in range(2):  # a repeated hook must not start a load twice
        rig.worker.start_loads(StepMeta(loads=[load]))
    assert rig.collect_until(lambda sent, loaded: loaded)[1] == ["r"]
    assert rig.worker.take_bad_blocks() == {11, 12}
    assert rig.collect((), is_idle=False) == (set(), set())


def test_no_thread_copies_chunks_after_a_missing_chunk(rig):
    """A thread copies the first chunk while another thread finds that the second chunk is missing."""
    rig.session.committed += [Slot(0, 1), Slot(2, 1)]
    has_begun, may_end, load = threading.Event(), threading.Event(), rig.copier.load

    def slow_load(*args):
        has_begun.set()
        assert may_end.wait(60)
        load(*args)

    def share(work):
        other_thread = threading.Thread(target=work)
        other_thread.start()
        assert has_begun.wait(60)
        work()
        may_end.set()
        other_thread.join()

    rig.copier.load, rig.copier.share = slow_load, share
    rig.load(Slot(0, 1), Slot(1, 1), Slot(2, 1), blocks=(11, 12, 13, 14, 15, 16))
    rig.collect_until(lambda sent, loaded: loaded)
    assert rig.worker.take_bad_blocks() == {13, 14, 15, 16}
    assert len(rig.copier.fences) == 1, "the third chunk must not be copied"


def test_load_that_is_started_twice_is_copied_once(rig):
    begin_load(rig)
    rig.load(Slot(0, 1))
    rig.copier.gate.set()
    rig.collect_until(lambda sent, loaded: loaded)
    rig.worker.close()
    assert len(rig.copier.fences) == 1


def test_idle_engine_waits_for_the_end_of_a_load(rig, monkeypatch):
    monkeypatch.setattr(module, "LOAD_WAIT_SECONDS", 60)
    begin_load(rig)
    assert rig.collect((), is_idle=False) == (set(), set()), "a busy engine does not wait"
    threading.Timer(0.05, rig.copier.gate.set).start()
    rig.store(request_id="another")  # its end must not end the wait
    assert rig.collect((), is_idle=True) == (set(), {"r"})


def test_no_load_stops_engines_that_step_together(monkeypatch):
    monkeypatch.setattr(module, "LOAD_WAIT_SECONDS", 60)
    rig = WorkerRig(can_wait=False)
    begin_load(rig)
    threading.Timer(1, rig.copier.gate.set).start()
    assert rig.collect((), is_idle=True) == (set(), set())
    rig.finish()


@pytest.mark.parametrize("slot", [Slot(9999, 1), Slot(0, 7)], ids=["outside the arena", "evicted"])
def test_slot_of_an_older_arena_is_not_read(rig, slot, caplog):
    """The scheduler's session may be older than the worker's.

    The arena may have a new geometry since then.
    """
    rig.session.committed.append(Slot(0, 1))
    rig.load(slot)
    assert rig.collect_until(lambda sent, loaded: loaded)[1] == ["r"]
    assert (rig.worker.take_bad_blocks(), rig.copier.fences) == ({11, 12, 13, 14}, [])
    assert caplog.text == ""


@pytest.mark.parametrize("is_attached", [True, False])
def test_load_of_several_groups_fails_as_a_whole(rig, is_attached):
    """This also holds before a rank knows the groups."""
    if not is_attached:
        rig.worker.identity = rig.worker._client = None
    rig.load(Slot(5, 1), fails_by_block=False)
    assert rig.collect_until(lambda sent, loaded: loaded)[1] == ["r"]
    assert rig.worker.take_bad_blocks() == set(), "vLLM would stop the engine"
    assert (rig.worker.take_failed_requests(), rig.worker.take_failed_requests()) == ({"r"}, set())
