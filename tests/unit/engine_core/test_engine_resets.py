"""A reset of the engine's caches: nothing of before is found, stored or loaded afterwards."""

import pytest

from lmcache.tiers.base import ROW_KEY_BYTES
from lmcache.tiers.memory.contracts import Slot
from tests.harness.scheduler_rig import Rig, blocks, chunk_ranges, job_ids, make_request


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.scheduler.go_offline()


def test_after_a_reset_nothing_from_before_is_found_and_new_rows_are(rig):
    rig.session.memory_only = True
    rig.stored(3)
    before = rig.arrive(make_request(200, "before"))
    assert rig.match(before) == (192, True)
    assert rig.scheduler.reset_cache() is True
    assert rig.match(before) == (0, False), "also for a request that arrived before"
    rig.allocate(before, blocks(7), 0)
    (job,) = rig.step(new=[("before", blocks(7), 0, 200)]).stores
    (store,) = job.groups
    for at in 0, ROW_KEY_BYTES:
        slot = Slot(len(rig.session.rows), 1)
        rig.session.rows[store.keys[at : at + ROW_KEY_BYTES]] = slot
        rig.session.committed.append(slot)
    rig.report(ended=[job.job_id])
    assert rig.match(rig.arrive(make_request(200, "after"))) == (128, True)
    assert rig.scheduler.reset_cache() is True
    assert rig.match(rig.arrive(make_request(200, "last"))) == (0, False), "every reset is another"


def test_a_request_that_runs_through_a_reset_stores_nothing_more(rig):
    """Its KV is of the old weights, or partly."""
    rig.arrive(make_request(200))
    before = rig.step(new=[("r", blocks(7), 0, 100)])
    assert chunk_ranges(before) == [(0, 1)]
    rig.scheduler.reset_cache()
    meta = rig.step(cached=[("r", None, 100, 100, False)])
    assert meta.stores == []
    assert meta.reclaimed == job_ids(before), "and what is being copied is given up"


def test_a_reset_during_a_load_is_refused(rig):
    rig.stored(3)
    request = rig.arrive(make_request(200))
    assert rig.match(request) == (192, True)
    rig.allocate(request, blocks(6), 192)
    assert rig.scheduler.reset_cache() is False
    rig.report(received=["r"])
    assert rig.scheduler.reset_cache() is True
