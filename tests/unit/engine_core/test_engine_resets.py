"""Resets of the engine's caches: no earlier KV is found, stored or loaded afterwards."""

import re

from tests.harness.client.scheduler_rig import IDENTITY, Rig, blocks, chunk_ranges, job_ids, make_request


def test_reset_hides_earlier_rows_and_finds_new_rows(rig):
    rig.session.memory_only = True
    rig.stored(3)
    request_before = rig.arrive(make_request(200, "before"))
    assert rig.match(request_before) == (192, True)
    assert rig.scheduler.reset_cache() is True
    assert rig.begin(request_before) == 0, "the reset also applies to earlier requests"
    meta = rig.step(new=[("before", blocks(7), 0, 200)])
    rig.commit(meta, without=[(0, 2)])
    rig.report(ended=job_ids(meta))
    assert rig.match(rig.arrive(make_request(200, "after"))) == (128, True)
    assert rig.scheduler.reset_cache() is True
    assert rig.match(rig.arrive(make_request(200, "last"))) == (0, False), "each reset starts a new namespace"


def test_request_running_during_a_reset_stores_no_more_chunks(rig):
    """The KV of such a request belongs to the old weights, at least partly."""
    rig.arrive(make_request(200))
    step_before = rig.step(new=[("r", blocks(7), 0, 100)])
    assert chunk_ranges(step_before) == [(0, 1)]
    rig.scheduler.reset_cache()
    meta = rig.step(cached=[("r", None, 100, 100, False)])
    assert meta.stores == []
    assert meta.reclaimed == job_ids(step_before), "copies in progress must be reclaimed"


def test_reset_is_refused_during_a_load(rig):
    rig.loading()
    assert rig.scheduler.reset_cache() is False
    rig.report(received=["r"])
    assert rig.scheduler.reset_cache() is True


REASON = r"vLLM's caches were reset at .* UTC: private until the engine restarts"


def test_reset_reports_why_kv_is_private_from_then_on(rig):
    rig.computing()
    assert rig.session.private_reason == ""
    rig.scheduler.reset_cache()
    rig.computing(make_request(200, "after"))
    rig.drain_lookups()
    assert re.fullmatch(REASON, rig.session.private_reason)


def test_reset_before_the_first_worker_is_reported():
    rig = Rig(identity="no identity yet")
    rig.scheduler.reset_cache()
    rig.scheduler.adopt([IDENTITY])
    rig.lookups = rig.scheduler._lookups
    rig.computing()
    rig.drain_lookups()
    rig.scheduler.go_offline()
    assert re.fullmatch(REASON, rig.session.private_reason)
