"""Fair queues, and copies that wait for the reader of a GPU: tenants of one engine take turns."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_sidecar.copiers import batches, messages
from lmcache_sidecar.copiers.batches import CopyQueue
from lmcache_sidecar.copiers.jobs import CopyStats, PlacedCopy
from lmcache_sidecar.copiers.members import Member
from lmcache_store.common.fair_queue import FairQueue
from tests.harness.loops import in_a_loop

PAGE_BYTES, ROWS_PER_BATCH = 1 << 20, 4


def make_member(number):
    pages = pb.GroupPages(num_blocks=9, blocks_per_row=1, layers=[pb.LayerPages(page_bytes=PAGE_BYTES)])
    return Member(number, 100, 0, pb.TransferOffer(groups=[pages]), lambda is_ipc, reason: None)


def copies_of(tenant, offsets):
    return [PlacedCopy(0, offset, np.zeros(1, np.uint32), tenant) for offset in offsets]


@pytest.fixture
def queue(monkeypatch):
    monkeypatch.setattr(batches, "_BATCH_COST", ROWS_PER_BATCH * (PAGE_BYTES + batches._PAGE_COST))
    return CopyQueue(CopyStats())


def next_batch(queue):
    """Return the offsets of the next batch, and end it."""
    number, body = queue.take_batch()
    queue.end_batch(number)
    return {int(offset) for part in messages.parse_copies(body) for offset in part.offsets}


@in_a_loop
async def test_tenant_that_floods_leaves_half_of_each_batch_to_another_tenant(queue):
    engine = make_member(1)
    flood = queue.put(engine, copies_of(b"flood", range(100)))
    quiet = queue.put(engine, copies_of(b"quiet", range(1000, 1004)))
    assert next_batch(queue) == {0, 1, 1000, 1001}
    assert next_batch(queue) == {2, 3, 1002, 1003}
    assert quiet.ended.done()
    assert all(quiet.copied)
    assert not flood.ended.done()


@in_a_loop
async def test_engine_with_many_tenants_gets_no_more_than_another_engine(queue):
    many, other = make_member(1), make_member(2)
    for tenant in range(10):
        queue.put(many, copies_of(b"%d" % tenant, [tenant]))
    queue.put(other, copies_of(b"", range(1000, 1010)))
    assert next_batch(queue) == {0, 1000, 1, 1001}
    assert next_batch(queue) == {2, 1002, 3, 1003}


@in_a_loop
async def test_job_of_several_tenants_ends_when_it_is_dropped(queue):
    engine, other = make_member(1), make_member(2)
    both = queue.put(engine, copies_of(b"a", [1, 2]) + copies_of(b"b", [3, 4]))
    later = queue.put(engine, copies_of(b"a", [5]))
    of_other = queue.put(other, copies_of(b"a", [6]))
    queue.drop(1, "the caller has disconnected", both)
    assert both.ended.done()
    assert both.refusal == "the caller has disconnected"
    assert not any(both.copied)
    assert next_batch(queue) == {5, 6}
    assert later.copied == of_other.copied == [True]
    last = queue.put(engine, copies_of(b"a", [7]) + copies_of(b"b", [8]))
    queue.drop(1, "the client has left")
    assert last.refusal == "the client has left"
    assert queue.take_batch() is None


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 3), st.lists(st.integers(1, 9), max_size=5)),
            st.tuples(st.just("take"), st.just(0)),
            st.tuples(st.just("drop"), st.integers(0, 3), st.integers(1, 9)),
        ),
        max_size=30,
    )
)
def test_items_are_neither_lost_duplicated_nor_reordered(steps):
    queue: FairQueue[tuple[int, int, int]] = FairQueue()
    waiting: dict[int, list[tuple[int, int, int]]] = {client: [] for client in range(4)}
    number = 0
    for step in steps:
        if step[0] == "put":
            items = []
            for cost in step[2]:
                number += 1
                items.append((step[1], number, cost))
            waiting[step[1]] += items
            queue.put(step[1], items)
        elif step[0] == "take":
            if queue:
                item = queue.next_item
                assert queue.take_next() == item
                assert waiting[item[0]].pop(0) == item
        else:
            dropped = queue.drop(step[1], lambda item: item[2] == step[2])  # noqa: B023
            assert dropped == [item for item in waiting[step[1]] if item[2] == step[2]]
            waiting[step[1]] = [item for item in waiting[step[1]] if item[2] != step[2]]
        assert bool(queue) == any(waiting.values())
