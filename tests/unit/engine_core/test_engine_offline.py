"""The scheduler side with a silent sidecar, without workers, and offline."""

import pytest

from lmcache_client.core.scheduler import SchedulerSide
from tests.harness.client.scheduler_rig import blocks, job_ids, make_request


def start_load(rig, request_id="r"):
    """Start a request with a leased load of 3 chunks."""
    request = rig.arrive(make_request(200, request_id))
    assert rig.begin(request) == 192
    rig.scheduler.end_step(64)
    return request


def test_offline_ends_all_leases(rig):
    rig.stored(3)
    start_load(rig)
    rig.scheduler.go_offline()
    rig.lookups._thread.join(60)
    assert rig.session.leased == set()


def test_scheduler_without_workers_offers_no_load():
    scheduler = SchedulerSide(None, None)
    request = make_request(200)
    scheduler.add(request)
    assert scheduler.num_loadable(request, 0) == 0
    assert scheduler.finish(request, ([],)) is False


def test_silent_sidecar_does_not_delay_later_requests(rig):
    rig.session.is_down = True
    assert rig.match(rig.arrive(make_request(200, "a"))) == (0, False)
    rig.session.before_lookup = lambda: pytest.fail("no call is allowed so soon")
    assert rig.match(rig.arrive(make_request(200, "b"))) == (0, False)
    rig.stored(3)
    assert rig.match(rig.arrive(make_request(200, "c"))) == (192, True), "rows in memory are offered"


def test_reattached_sidecar_gets_hints_at_once(rig):
    rig.session.is_down = True
    rig.arrive(make_request(200, "a"))
    rig.session.is_down = False
    rig.session.epoch += 1
    rig.arrive(make_request(200, "b"))
    assert rig.session.num_hints == 1


def test_release_that_cannot_be_sent_is_left_to_the_client(rig):
    rig.stored(3)
    start_load(rig, "a")
    start_load(rig, "b")
    rig.drain_lookups()
    rig.session.is_down = True
    rig.report(received=["a"])  # no answer: the session releases it later
    rig.report(received=["b"])  # not sent, because no call is allowed so soon
    rig.drain_lookups()
    assert rig.session.owed == ["b"]


def test_offline_reclaims_stores_in_progress(rig):
    """The engine frees these blocks when the request ends, and a later commit would store torn KV."""
    request = rig.arrive(make_request(200))
    rig.arrive(make_request(200, "without stores"))
    jobs_in_progress = job_ids(rig.step(new=[("r", blocks(7), 0, 200)]))
    rig.scheduler.go_offline()
    assert rig.finish(request) is False
    assert rig.step(preempted=["another"]).reclaimed == jobs_in_progress
    assert rig.step().reclaimed == set()


def test_loads_of_a_step_whose_message_fails_are_handed_out_later(rig):
    """The engine waits for them. The connector goes offline and asks for the message once more."""

    def fail(_):
        raise RuntimeError("a bug")

    rig.begin(rig.matched())
    rig.scheduler._complete = fail
    with pytest.raises(RuntimeError, match="a bug"):
        rig.step()
    rig.scheduler.go_offline()
    assert [load.request_id for load in rig.step().loads] == ["r"]
    assert rig.step().loads == []
