"""Lifetimes of blocks during copies, with faults injected at each rule."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lmcache_client.core import worker as module
from lmcache_client.core.jobs import StepMeta
from lmcache_store.common.timing import TIMING
from tests.harness.client.worker_rig import IDENTITY, WorkerRig


@pytest.fixture
def rig():
    rig = WorkerRig()
    yield rig
    rig.finish()


def committed(rig, count):
    return lambda *_: len(rig.session.committed) == count


def record_waits(rig):
    """Record the waits for the end of each store. The waits pass at once."""
    waits = []

    def wait(seconds):
        waits.append(seconds)
        rig.now += seconds

    for transfer in rig.worker._stores.values():
        transfer.ended.wait = wait
    return waits


def test_store_is_committed_and_load_returns_the_same_bytes(rig):
    rig.store()
    rig.collect_until(committed(rig, 2))
    rig.load(*rig.session.committed)
    _, loaded = rig.collect_until(lambda sent, loaded: loaded)
    assert loaded == ["r"]
    assert rig.worker.take_bad_blocks() == set()
    assert [rig.copier.kv[block] for block in (11, 12, 13, 14)] == [1, 2, 3, 4]
    assert rig.copier.fences == ["fence"] * 4, "every copy must wait for the engine's work"
    report = rig.worker.take_report(StepMeta())
    assert report.identity is IDENTITY
    assert report.stores_ended == {1: 1}
    assert not report.failed_loads


def test_stored_chunks_are_not_copied_again(rig):
    rig.store()
    rig.store()
    rig.collect_until(lambda *_: not rig.worker._stores)
    assert len(rig.copier.fences) == 2


def test_blocks_reclaimed_during_a_copy_are_never_committed(rig):
    """After a preemption the bytes of the copy in progress may be torn."""
    rig.hold_store()
    rig.reclaim(1, 77)
    rig.end_torn_store()
    assert len(rig.copier.fences) == 1, "no further copy must start"


def test_preemption_waits_for_a_copy_in_progress(rig, monkeypatch):
    monkeypatch.setattr(TIMING, "preemption_seconds", 60)
    rig.hold_store()
    threading.Timer(0.05, rig.copier.gate.set).start()
    rig.reclaim(1, 77)
    assert len(rig.session.committed) == 2


def test_preemption_of_other_requests_keeps_a_store(rig):
    rig.copier.gate.clear()
    rig.store()
    rig.reclaim(2, 77)
    rig.copier.gate.set()
    rig.collect_until(committed(rig, 2))


def test_preemption_waits_at_most_its_limit(rig):
    rig.copier.gate.clear()
    for number in range(50):
        rig.store(names=(b"%d" % number, b"%d+" % number))
    waits = record_waits(rig)
    rig.reclaim(*range(1, 51))
    assert sum(waits) == pytest.approx(TIMING.preemption_seconds), "the limit applies to all copies together"


@pytest.mark.parametrize("reason", ["reclaimed", "left_behind"])
def test_no_copy_stops_engines_that_step_together(reason):
    rig = WorkerRig(can_wait=False)
    rig.hold_store()
    waits = record_waits(rig)
    rig.worker.handle_preemptions(StepMeta(**{reason: {1}}))
    assert waits == [0.0]
    rig.end_torn_store()
    rig.finish()


def test_held_request_without_stores_is_freed_at_once(rig):
    assert rig.collect(["r"], is_idle=False) == ({"r"}, set())


def test_offline_aborts_stores_and_frees_blocks(rig):
    rig.hold_store()
    rig.worker.go_offline()
    rig.copier.gate.set()
    assert rig.collect_until(lambda sent, loaded: sent, held=["r"])[0] == ["r"]
    assert rig.session.committed == []


ORDERS = {"V2 and V1": ("start_stores", "collect"), "V1 with speculation": ("collect", "start_stores")}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_blocks_freed_at_the_limit_are_never_committed(rig, order):
    rig.copier.gate.clear()
    step = StepMeta(stores=[rig.job()], held=["r"])
    for hook in order:
        getattr(rig.worker, hook)(step)
    assert rig.copier.in_copy.wait(60)
    rig.now = TIMING.hold_seconds - 0.01
    assert rig.collect((), is_idle=True) == (set(), set())
    rig.now = TIMING.hold_seconds
    assert rig.collect((), is_idle=False) == ({"r"}, set())
    rig.end_torn_store()
    assert rig.collect((), is_idle=False) == (set(), set()), "the request must be reported once"


def test_store_without_hook_call_starts_with_the_next_step(rig):
    """In V1 with pipeline stages and drafts, only the last stage calls ``wait_for_save``."""
    rig.collect_meta(StepMeta(stores=[rig.job()], held=["r"]))
    sent, _ = rig.collect_until(lambda sent, loaded: sent)
    assert (sent, rig.stored_bytes()) == (["r"], [[1, 2], [3, 4]])
    assert rig.worker.take_report(StepMeta()).stores_ended == {1: 1}


def test_store_that_is_reclaimed_before_its_start_never_starts(rig):
    rig.collect_meta(StepMeta(stores=[rig.job()]))
    waits = record_waits(rig)
    rig.reclaim(1, 77)
    assert not waits, "there is no copy to wait for"
    rig.collect_until(lambda *_: not rig.worker._stores)
    assert (rig.copier.fences, rig.session.rows) == ([], {})


def test_repeated_hook_after_a_fault_starts_no_store_twice(rig):
    step = StepMeta(stores=[rig.job()])
    fence, rig.copier.fence = rig.copier.fence, None
    with pytest.raises(TypeError):
        rig.worker.start_stores(step)
    rig.copier.fence = fence
    for _ in range(2):
        rig.worker.start_stores(step)
        rig.collect_meta(step)
    rig.collect_until(lambda *_: not rig.worker._stores)
    assert rig.worker.take_report(StepMeta()).stores_ended == {1: 1}
    assert len(rig.copier.fences) == 2


def test_copy_that_raises_aborts_the_slots(rig, caplog):
    rig.copier.store = lambda *_: 1 / 0
    rig.store()
    rig.collect_until(lambda *_: not rig.worker._stores)
    assert len(rig.session.aborted) == 2
    assert "ZeroDivisionError" in caplog.text


def test_replica_rank_stores_nothing_and_frees_blocks(rig):
    rig.worker.identity = replace(IDENTITY, is_replica=True)
    rig.store()
    sent, _ = rig.collect_until(lambda sent, loaded: sent, held=["r"])
    assert (sent, rig.copier.fences, rig.session.rows) == (["r"], [], {})
    assert rig.worker.take_report(StepMeta()).stores_ended == {1: 1}, "the reports of all ranks are counted"


def test_wait_for_copies_of_transient_blocks_is_limited_to_a_share(rig):
    """The limit also applies while the sidecar hangs. The budget refills over time."""
    rig.hold_store(is_transient=True)
    waits, ended = [], rig.worker._stores[1].ended

    def wait(seconds):
        waits.append(seconds)
        rig.now += seconds

    rig.worker._stores[1].ended = SimpleNamespace(wait=wait, set=ended.set)
    for seconds in (100.0, 0.0, 0.2, 100.0):
        rig.now += seconds
        rig.worker.handle_preemptions(StepMeta(left_behind={1, 77}))
    max_wait, share = TIMING.left_behind_seconds, module.LEFT_BEHIND_SHARE
    assert waits == pytest.approx([max_wait, 0.0, 0.2 * share, max_wait])


def test_store_of_transient_blocks_overtakes_other_stores(rig):
    rig.hold_store(names=(b"a",), blocks=(1, 2))
    copied, store = threading.Event(), rig.copier.store
    rig.copier.store = lambda *args: copied.set()
    rig.store(names=(b"b",), blocks=(3, 4), is_transient=True)
    assert copied.wait(60)
    rig.copier.store = store


@pytest.mark.parametrize(("is_transient", "chunks"), [(False, [0, 0, 1, 1]), (True, [1, 1, 0, 0])])
def test_useful_chunks_of_all_groups_are_copied_first(rig, is_transient, chunks):
    """A hit needs a chunk in all groups, so a partial store must contain complete chunks."""
    blocks, copied = {0: (1, 2), 1: (11, 12)}, []

    def store(group, slot, ids, fence):
        copied.append(blocks[group].index(*ids))
        if len(copied) == 2:
            rig.worker._stores[1].cancel()

    rig.copier.row_bytes = {0: 4096, 1: 4096}
    rig.copier.store = store
    rig.store(is_transient=is_transient, groups=blocks)
    rig.collect_until(lambda *_: not rig.worker._stores)
    assert copied == chunks[:2]
    figures = rig.worker.take_figures()
    assert (figures["stored_rows"], figures["lost_rows"]) == (1, 3), (
        "the second copy was cancelled in progress"
    )
