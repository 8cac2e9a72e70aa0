"""Waits of an engine of several parts for chunks that another request stores in all of them."""

from collections import Counter

import pytest

from tests.harness.client.parted_rig import PartedRig
from tests.harness.client.scheduler_rig import blocks, job_ids, make_request


@pytest.fixture
def rig():
    rig = PartedRig()
    yield rig
    rig.scheduler.go_offline()


def test_store_of_another_request_is_not_waited_for_once_part_0_has_it(rig):
    """Part 1 may be frozen, so that its ranks never end the store."""
    rig.session.memory_only = True
    first, second = make_request(200, "first"), make_request(200, "second")
    rig.arrive(first)
    rig.arrive(second)
    rig.turn()
    assert rig.begin(first) == 0
    meta = rig.step(new=[("first", blocks(7), 0, 200)])
    for _ in range(2):
        assert rig.match(second) == (None, False)
        rig.now += 0.3
        rig.output()
        rig.turn()
    rig.commit(meta)
    for _ in range(3):
        assert rig.match(second) == (None, False)
        rig.now += 0.1
        rig.output(answers={})
        rig.scheduler.end_step(1)
    assert rig.match(second) == (0, False)


def test_chunks_that_another_request_computes_for_a_part_that_lost_them_are_waited_for(rig):
    """Part 0 still has all chunks. The store of a chunk begins only when it is computed again."""
    rig.session.memory_only = True
    rig.stored(3)
    first, second = make_request(200, "first"), make_request(200, "second")
    rig.arrive(first)
    rig.arrive(second)
    rig.turn()
    assert rig.begin(first) == 0
    for num_computed in range(0, 192, 32):
        assert rig.match(second) == (None, False)
        rig.now += 0.3
        ended = dict.fromkeys(job_ids(rig.schedule(first, num_computed + 32, (blocks(7),))), 2)
        for _ in range(3):
            rig.output(answers={}, stores_ended=Counter(ended))
            ended = {}
    assert rig.match(second) == (192, True)


def test_time_for_a_store_in_another_part_begins_with_each_chunk(rig):
    rig.session.memory_only = True
    first, second = make_request(200, "first"), make_request(200, "second")
    rig.arrive(first)
    rig.arrive(second)
    rig.turn()
    assert rig.begin(first) == 0
    meta = rig.step(new=[("first", blocks(7), 0, 64)])
    for ended in (Counter(), Counter(dict.fromkeys(job_ids(meta), 2))):
        rig.commit(meta)
        assert rig.match(second) == (None, False)
        rig.now += 0.3
        rig.output(stores_ended=ended)
    assert rig.match(second) == (None, False)
    rig.commit(rig.step(cached=[("first", None, 64, 64, False)]))
    rig.output()
    assert rig.match(second) == (None, False)
