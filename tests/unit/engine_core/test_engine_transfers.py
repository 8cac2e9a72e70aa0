"""How long blocks live: every rule of the copies, broken by a fault that is injected where the rule holds."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lmcache.engines.core import worker as module
from lmcache.engines.core.jobs import GroupLoad, LoadJob, StepMeta
from lmcache.tiers.memory.contracts import Slot
from tests.harness.session_double import SessionDouble
from tests.harness.worker_rig import IDENTITY, WorkerRig, found


@pytest.fixture
def rig():
    rig = WorkerRig()
    yield rig
    rig.finish()


def committed(rig, count):
    return lambda *_: len(rig.session.committed) == count


def note_waits(rig):
    """The seconds for which each store's end is waited for from now on; they pass at once."""
    waits = []

    def wait(seconds):
        waits.append(seconds)
        rig.now += seconds

    for transfer in rig.worker._stores.values():
        transfer.ended.wait = wait
    return waits


def test_a_store_is_committed_and_a_load_brings_the_bytes_back(rig):
    rig.store()
    rig.collect_until(committed(rig, 2))
    rig.load(*rig.session.committed)
    _, loaded = rig.collect_until(lambda sent, loaded: loaded)
    assert loaded == ["r"]
    assert rig.worker.take_bad_blocks() == set()
    assert [rig.copier.kv[block] for block in (11, 12, 13, 14)] == [1, 2, 3, 4]
    assert rig.copier.fences == ["fence"] * 4, "every copy waits for the engine's work"
    report = rig.worker.take_report(StepMeta())
    assert report.identity is IDENTITY
    assert report.stores_ended == {1: 1}
    assert not report.failed_loads


def test_what_is_stored_already_is_not_copied_again(rig):
    rig.store()
    rig.store()
    rig.collect_until(lambda *_: not rig.worker._stores)
    assert len(rig.copier.fences) == 2


def test_a_load_is_reported_only_after_its_copy_ended(rig):
    rig.session.committed.append(Slot(0, 1))
    rig.copier.gate.clear()
    rig.load(Slot(0, 1))
    assert rig.copier.in_copy.wait(60)
    for _ in range(20):
        assert rig.collect((), is_idle=True) == (set(), set())
    rig.copier.gate.set()
    assert rig.collect_until(lambda sent, loaded: loaded)[1] == ["r"]


def test_a_slot_that_is_given_away_under_a_load_fails_it_from_there_on(rig):
    rig.session.committed += [Slot(0, 1), Slot(1, 1)]

    def evict_the_second():
        rig.session.committed[:] = [Slot(0, 1)]

    rig.copier.after_copy = evict_the_second
    rig.load(Slot(0, 1), Slot(1, 1))
    assert rig.collect_until(lambda sent, loaded: loaded)[1] == ["r"]
    assert rig.worker.take_bad_blocks() == {13, 14}
    assert rig.worker.take_bad_blocks() == set()
    assert rig.worker.take_report(StepMeta()).failed_loads == {"r"}


@pytest.mark.parametrize("fault", ["no session", "copy raises", "no chunks", "offline"])
def test_every_load_is_reported_once_whatever_fails(rig, fault, monkeypatch):
    rig.session.committed.append(Slot(0, 1))
    if fault == "no session":
        monkeypatch.setattr(SessionDouble, "session", None)
    if fault == "copy raises":
        rig.copier.load = None
    if fault == "offline":
        rig.copier.fence = None  # an unhealthy device may be why
        rig.worker.go_offline()
    chunks = None if fault == "no chunks" else found(Slot(0, 1))
    load = LoadJob("r", (GroupLoad(0, (11, 12), chunks, blocks_per_row=2),))
    for _ in range(2):  # a hook that is called again after a fault begins nothing twice
        rig.worker.start_loads(StepMeta(loads=[load]))
    assert rig.collect_until(lambda sent, loaded: loaded)[1] == ["r"]
    assert rig.worker.take_bad_blocks() == {11, 12}
    assert rig.collect((), is_idle=False) == (set(), set())


def test_no_thread_goes_on_behind_a_bad_chunk(rig):
    """One has the first chunk while the other one finds that the second is not there."""
    rig.session.committed += [Slot(0, 1), Slot(2, 1)]
    has_begun, may_end, load = threading.Event(), threading.Event(), rig.copier.load

    def slow_load(*args):
        has_begun.set()
        assert may_end.wait(60)
        load(*args)

    def share(work):
        other = threading.Thread(target=work)
        other.start()
        assert has_begun.wait(60)
        work()
        may_end.set()
        other.join()

    rig.copier.load, rig.copier.share = slow_load, share
    rig.load(Slot(0, 1), Slot(1, 1), Slot(2, 1), blocks=(11, 12, 13, 14, 15, 16))
    rig.collect_until(lambda sent, loaded: loaded)
    assert rig.worker.take_bad_blocks() == {13, 14, 15, 16}
    assert len(rig.copier.fences) == 1, "the third one is left"


def test_a_load_that_is_begun_twice_is_copied_once(rig):
    rig.session.committed.append(Slot(0, 1))
    rig.copier.gate.clear()
    rig.load(Slot(0, 1))
    rig.load(Slot(0, 1))
    rig.copier.gate.set()
    rig.collect_until(lambda sent, loaded: loaded)
    rig.worker.close()
    assert len(rig.copier.fences) == 1


def test_blocks_taken_back_during_a_copy_are_never_committed(rig):
    """Preemption: the bytes of the copy under way may be torn; what was copied before is good."""
    rig.copier.gate.clear()
    rig.store()
    assert rig.copier.in_copy.wait(60)
    rig.reclaim(1, 77)
    rig.copier.kv |= dict.fromkeys((1, 2, 3, 4), 99)  # the engine writes another request's KV
    rig.copier.gate.set()
    rig.collect_until(lambda *_: len(rig.session.aborted) == 2)
    assert rig.session.committed == []
    assert len(rig.copier.fences) == 1, "no further copy was begun"


def test_preemption_waits_for_a_copy_that_is_about_to_end(rig, monkeypatch):
    monkeypatch.setattr(module, "PREEMPTION_SECONDS", 60)
    rig.copier.gate.clear()
    rig.store()
    assert rig.copier.in_copy.wait(60)
    threading.Timer(0.05, rig.copier.gate.set).start()
    rig.reclaim(1, 77)
    assert len(rig.session.committed) == 2


def test_preemption_of_others_leaves_a_store_alone(rig):
    rig.copier.gate.clear()
    rig.store()
    rig.reclaim(2, 77)
    rig.copier.gate.set()
    rig.collect_until(committed(rig, 2))


def test_preemption_waits_no_longer_than_it_may(rig):
    rig.copier.gate.clear()
    for number in range(50):
        rig.store(names=(b"%d" % number, b"%d+" % number))
    waits = note_waits(rig)
    rig.reclaim(*range(1, 51))
    assert sum(waits) == pytest.approx(module.PREEMPTION_SECONDS), "the bound is for all copies together"


def test_a_finished_request_is_held_while_its_blocks_are_copied(rig):
    rig.copier.gate.clear()
    rig.store()
    assert rig.copier.in_copy.wait(60)
    assert rig.collect(["r"], is_idle=True) == (set(), set())
    rig.now = module.HOLD_SECONDS - 0.01
    assert rig.collect((), is_idle=True) == (set(), set())
    rig.copier.gate.set()
    sent, _ = rig.collect_until(lambda sent, loaded: sent)
    assert sent == ["r"]
    assert len(rig.session.committed) == 2


def test_a_request_is_held_no_longer_than_the_bound_and_then_not_committed(rig):
    rig.copier.gate.clear()
    rig.store()
    assert rig.copier.in_copy.wait(60)
    rig.collect(["r"], is_idle=False)
    rig.now = module.HOLD_SECONDS
    assert rig.collect((), is_idle=False) == ({"r"}, set())
    rig.copier.kv |= dict.fromkeys((1, 2, 3, 4), 99)
    rig.copier.gate.set()
    rig.collect_until(lambda *_: len(rig.session.aborted) == 2)
    assert rig.session.committed == []
    assert rig.collect((), is_idle=False) == (set(), set()), "reported once"


def test_a_held_request_without_stores_is_given_back_at_once(rig):
    assert rig.collect(["r"], is_idle=False) == ({"r"}, set())


def test_offline_aborts_stores_and_still_gives_blocks_back(rig):
    rig.copier.gate.clear()
    rig.store()
    assert rig.copier.in_copy.wait(60)
    rig.worker.go_offline()
    rig.copier.gate.set()
    assert rig.collect_until(lambda sent, loaded: sent, held=["r"])[0] == ["r"]
    assert rig.session.committed == []


ORDERS = {"V2, and V1": ("start_stores", "collect"), "V1 that speculates": ("collect", "start_stores")}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_request_that_ends_with_a_store_is_held_in_the_hook_order_of_both_runners(rig, order):
    """Accepted drafts complete a chunk in a request's last step: store and hold come in one step."""
    rig.copier.gate.clear()
    step = StepMeta(stores=[rig.job()], held=["r"])
    answers = [getattr(rig.worker, hook)(step) for hook in order]
    assert (set(), set()) in answers, "the blocks are still read"
    assert rig.copier.in_copy.wait(60)
    rig.copier.gate.set()
    sent, _ = rig.collect_until(lambda sent, loaded: sent)
    assert sent == ["r"]
    assert rig.stored_bytes() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_blocks_given_back_after_the_bound_are_never_committed_in_either_order(rig, order):
    rig.copier.gate.clear()
    step = StepMeta(stores=[rig.job()], held=["r"])
    for hook in order:
        getattr(rig.worker, hook)(step)
    assert rig.copier.in_copy.wait(60)
    rig.now = module.HOLD_SECONDS
    assert rig.collect((), is_idle=False) == ({"r"}, set())
    rig.copier.kv |= dict.fromkeys((1, 2, 3, 4), 99)  # the next owner's
    rig.copier.gate.set()
    rig.collect_until(lambda *_: len(rig.session.aborted) == 2)
    assert rig.session.committed == []


def test_a_store_that_a_rank_does_not_begin_begins_with_the_next_step(rig):
    """V1 with pipeline stages and drafts: only the last stage calls ``wait_for_save``."""
    rig.collect_meta(StepMeta(stores=[rig.job()], held=["r"]))
    sent, _ = rig.collect_until(lambda sent, loaded: sent)
    assert sent == ["r"]
    assert rig.stored_bytes() == [[1, 2], [3, 4]]
    assert rig.worker.take_report(StepMeta()).stores_ended == {1: 1}


def test_a_store_that_was_not_begun_before_its_blocks_are_given_away_never_begins(rig):
    rig.collect_meta(StepMeta(stores=[rig.job()]))
    waits = note_waits(rig)
    rig.reclaim(1, 77)
    assert not waits, "there is no copy to wait for"
    rig.collect_until(lambda *_: not rig.worker._stores)
    assert rig.copier.fences == []
    assert rig.session.rows == {}


def test_a_hook_that_is_called_again_after_a_fault_starts_no_store_twice(rig):
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


def test_a_copy_that_raises_gives_the_slots_back(rig, caplog):
    rig.copier.store = lambda *_: 1 / 0
    rig.store()
    rig.collect_until(lambda *_: not rig.worker._stores)
    assert len(rig.session.aborted) == 2
    assert "ZeroDivisionError" in caplog.text


def test_an_idle_engine_waits_for_a_load_and_no_longer_than_the_load(rig, monkeypatch):
    monkeypatch.setattr(module, "LOAD_WAIT_SECONDS", 60)
    rig.session.committed.append(Slot(0, 1))
    rig.copier.gate.clear()
    rig.load(Slot(0, 1))
    assert rig.collect((), is_idle=False) == (set(), set()), "a busy engine does not wait"
    threading.Timer(0.05, rig.copier.gate.set).start()
    rig.store(request_id="another")  # its end does not end the waiting
    assert rig.collect((), is_idle=True) == (set(), {"r"})


def test_an_idle_engine_takes_new_requests_while_a_load_hangs(rig):
    rig.session.committed.append(Slot(0, 1))
    rig.copier.gate.clear()
    rig.load(Slot(0, 1))
    assert rig.collect((), is_idle=True) == (set(), set())


@pytest.mark.parametrize("slot", [Slot(9999, 1), Slot(0, 7)], ids=["beyond the arena", "given away"])
def test_a_slot_of_an_older_arena_is_not_even_read(rig, slot, caplog):
    """The scheduler's session may be older than ours: since then the arena may have been formatted anew."""
    rig.session.committed.append(Slot(0, 1))
    rig.load(slot)
    assert rig.collect_until(lambda sent, loaded: loaded)[1] == ["r"]
    assert rig.worker.take_bad_blocks() == {11, 12, 13, 14}
    assert rig.copier.fences == []
    assert caplog.text == ""


def test_a_rank_whose_kv_another_one_stores_copies_nothing_and_gives_blocks_back(rig):
    rig.worker.identity = replace(IDENTITY, is_replica=True)
    rig.store()
    sent, _ = rig.collect_until(lambda sent, loaded: sent, held=["r"])
    assert sent == ["r"]
    assert rig.copier.fences == []
    assert rig.session.rows == {}
    assert rig.worker.take_report(StepMeta()).stores_ended == {1: 1}, "all ranks are counted"


def test_copies_of_what_a_window_left_behind_get_their_share_of_the_engine_s_time(rig):
    """However long the sidecar hangs; and when it is back, they get it again."""
    rig.copier.gate.clear()
    rig.store(is_transient=True)
    assert rig.copier.in_copy.wait(60)
    waits, ended = [], rig.worker._stores[1].ended

    def wait(seconds):
        waits.append(seconds)
        rig.now += seconds

    rig.worker._stores[1].ended = SimpleNamespace(wait=wait, set=ended.set)
    for passed in (100.0, 0.0, 0.2, 100.0):
        rig.now += passed
        rig.worker.handle_preemptions(StepMeta(left_behind={1, 77}))
    most, share = module.LEFT_BEHIND_SECONDS, module.LEFT_BEHIND_SHARE
    assert waits == pytest.approx([most, 0.0, 0.2 * share, most])


def test_what_a_window_left_behind_does_not_queue_behind_what_can_wait(rig):
    rig.copier.gate.clear()
    rig.store(names=(b"a",), blocks=(1, 2))
    assert rig.copier.in_copy.wait(60)
    copied, store = threading.Event(), rig.copier.store
    rig.copier.store = lambda *args: copied.set()
    rig.store(names=(b"b",), blocks=(3, 4), is_transient=True)
    assert copied.wait(60)
    rig.copier.store = store


@pytest.mark.parametrize(("is_transient", "chunks"), [(False, [0, 0, 1, 1]), (True, [1, 1, 0, 0])])
def test_the_chunks_of_use_are_copied_first_in_all_groups(rig, is_transient, chunks):
    """A hit at the end of one needs all groups there: nothing else is of use when the rest is lost."""
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
    assert (figures["stored_rows"], figures["lost_rows"]) == (1, 3), "the second was cancelled under its copy"


@pytest.mark.parametrize("is_attached", [True, False])
def test_with_several_groups_a_load_fails_as_a_whole(rig, is_attached):
    """Also where a rank does not know yet which groups there are."""
    if not is_attached:
        rig.worker.identity = rig.worker._client = None
    rig.load(Slot(5, 1), fails_by_block=False)
    assert rig.collect_until(lambda sent, loaded: loaded)[1] == ["r"]
    assert rig.worker.take_bad_blocks() == set(), "vLLM would end"
    assert rig.worker.take_failed_requests() == {"r"}
    assert rig.worker.take_failed_requests() == set()
