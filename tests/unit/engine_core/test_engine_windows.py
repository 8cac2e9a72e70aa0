"""KV groups that keep only some tokens: stored, offered and loaded rows, and reclaimed blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_client.core.grid import Grid
from lmcache_client.core.hits import find_hit
from lmcache_client.core.jobs import Piece
from lmcache_store import keys
from lmcache_store.kv_groups import GroupKind, KVGroup, first_needed_chunk
from lmcache_store.tiers.memory.contracts import Found, Located
from tests.harness.client.scheduler_rig import Rig, make_identity, make_request, row_keys

FULL = KVGroup(1, 16, 4096)
WINDOW = KVGroup(0, 16, 2048, 33, GroupKind.SLIDING_WINDOW)  # reads two blocks before an edge
CHUNKED = KVGroup(2, 32, 0, 64, GroupKind.CHUNKED_ATTENTION)  # chunk edges are edges of the attention chunks
STATE = KVGroup(3, 32, 1024, 0, GroupKind.STATE)
GROUPS = (FULL, WINDOW, CHUNKED, STATE)


def tables():
    """Block tables of all groups for 200 tokens, with numbers by group."""
    return tuple(
        [100 * group + number for number in range(1, 200 // size + 2)]
        for group, size in enumerate([16, 16, 32, 32])
    )


@pytest.fixture
def rig(request):
    rig = Rig(make_identity(*getattr(request, "param", GROUPS)))
    yield rig
    rig.scheduler.go_offline()


def schedule(rig, request, num_computed_tokens, block_tables=None, **fields):
    return rig.schedule(request, num_computed_tokens, block_tables or tables(), **fields)


def parts(meta):
    """First chunk and blocks of each job and group."""
    return [{part.group: (part.first_chunk, part.blocks) for part in job.groups} for job in meta.stores]


def test_row_holds_the_blocks_that_a_hit_at_its_end_reads(rig):
    meta = schedule(rig, rig.arrive(make_request(200)), 192)
    assert parts(meta) == [
        {0: (0, (3, 4, 7, 8, 11, 12)), 3: (2, (306,))},
        {1: (0, tuple(range(101, 113)))},
    ], "groups that free blocks first are stored first; chunked attention stores nothing"
    assert meta.stores[0].groups[0].keys == row_keys(0, b"p1", b"p3", b"p5")
    assert meta.stores[0].groups[1].keys == row_keys(3, b"p5")


def test_state_is_stored_at_step_ends_and_from_snapshots(rig):
    request = rig.arrive(make_request(200))
    assert 3 not in parts(schedule(rig, request, 70))[0]
    handed_over = [(3, 377, 128), (3, 378, 96), (3, 379, 192), (0, 380, 128)]
    assert parts(schedule(rig, request, 140, snapshots=handed_over))[0][3] == (1, (377,))
    assert 3 not in parts(schedule(rig, request, 192, num_drafts=2))[0], "drafts may be rejected"


def test_blocks_freed_by_a_window_are_not_stored(rig):
    block_tables = tables()
    block_tables[0][:7] = [0] * 7  # a block of chunk 1 is freed
    assert parts(schedule(rig, rig.arrive(make_request(200)), 200, block_tables))[0] == {0: (2, (11, 12))}


@pytest.mark.parametrize("without", [(), [(0, 1)], [(0, 0), (3, 0)]])
def test_request_resumes_where_all_groups_have_the_needed_rows(rig, without):
    first = rig.arrive(make_request(200, "first"))
    for end in (64, 128, 192):
        rig.commit(schedule(rig, first, end), without)
    second = rig.arrive(
        make_request(192, "second")
    )  # a token must remain to compute, so not all chunks are loadable
    assert rig.scheduler.num_loadable(second, 0) == (64 if without == [(0, 1)] else 128)
    if without:
        return
    assert rig.scheduler.num_loadable(second, 64) == 64
    rig.scheduler.note_allocated("second", tables(), 64)
    (load,) = rig.scheduler.end_step(0).loads
    slots = {group: rig.session.rows[keys.chunk_keys([b"p3"], group=group)[0]] for group in (0, 1, 3)}
    assert load.pieces() == [
        Piece(1, slots[1], 0, (105, 106, 107, 108)),
        Piece(0, slots[0], 0, (7, 8)),
        Piece(3, slots[3], 0, (304,)),
    ]


@pytest.mark.parametrize("fault", ["null block", "fewer tokens"])
def test_load_into_missing_blocks_fails(rig, fault):
    rig.commit(schedule(rig, rig.arrive(make_request(200, "first")), 128))
    second = rig.arrive(make_request(200, "second"))
    num_tokens = rig.scheduler.num_loadable(second, 0)
    assert num_tokens == 128
    block_tables = tables()
    if fault == "null block":
        block_tables[0][7] = 0
    else:
        num_tokens = 64
    rig.scheduler.note_allocated("second", block_tables, num_tokens)
    (load,) = rig.scheduler.end_step(0).loads
    assert load.pieces() == []
    assert load.blocks


def test_load_of_an_unknown_request_fails_blocks_of_all_groups(rig):
    rig.scheduler.note_allocated("unknown", tables(), 160)
    (load,) = rig.scheduler.end_step(0).loads
    assert load.pieces() == []
    assert set(load.blocks) == {block for table in tables() for block in table}


def test_store_is_reclaimed_only_when_its_blocks_are_reused(rig):
    request = rig.arrive(make_request(200))
    windows, full = (job.job_id for job in schedule(rig, request, 128).stores)
    assert rig.scheduler.reads_transient_blocks
    for blocks, reclaimed in ({50, 101, 6}, set()), ({50, 7}, {windows}), ({304}, {windows}):
        rig.scheduler.reclaim_blocks(blocks)
        assert rig.scheduler.end_step(1).left_behind == reclaimed
    rig.report(ended=[windows])
    assert not rig.scheduler.reads_transient_blocks, "full attention keeps its blocks"
    rig.scheduler.note_preempted("r")
    assert rig.scheduler.end_step(1).reclaimed == {full}


def test_blocks_that_a_load_fills_count_as_reused(rig):
    first = rig.arrive(make_request(200, "first"))
    rig.commit(meta := schedule(rig, first, 128))
    assert rig.scheduler.num_loadable(rig.arrive(make_request(200, "second")), 0) == 128
    rig.scheduler.note_allocated("second", tables(), 128)
    rig.scheduler.reclaim_blocks(set())
    assert rig.scheduler.end_step(0).left_behind == {meta.stores[0].job_id}


@pytest.mark.parametrize("rig", [(WINDOW,)], indirect=True)
def test_window_group_alone_needs_only_its_last_rows(rig):
    rig.commit(schedule(rig, rig.arrive(make_request(200, "first")), 192), without=[(0, 0), (0, 1)])
    second = rig.arrive(make_request(200, "second"))
    assert rig.scheduler.num_loadable(second, 0) == 192
    rig.scheduler.note_allocated("second", tables()[:1], 192)
    (load,) = rig.scheduler.end_step(0).loads
    assert load.blocks == (11, 12)


class CountingIndex:
    """An index that has some chunks, and counts single lookups."""

    def __init__(self, residency):
        self.residency = residency
        self.num_looked_up = 0

    def find(self, words):
        (group,) = set(words[:, 0].tolist())
        resident = self.residency[group]
        count = resident.index(False) if False in resident else len(resident)
        return Found(np.arange(count), np.ones(count, np.uint64))

    def find_each(self, words):
        self.num_looked_up += len(words)
        chunks = words[:, 1].astype(np.int64)
        resident = np.array(
            [self.residency[group][chunk] for group, chunk in words[:, :2].tolist()], np.bool_
        )
        return Located(resident, chunks, np.ones(len(chunks), np.uint64))


@given(
    st.data(),
    st.integers(1, 12),
    st.integers(0, 12),
    st.sampled_from([GROUPS, (WINDOW, STATE), (FULL, STATE)]),
)
def test_find_hit_returns_the_longest_complete_hit(data, num_chunks, at_least, groups):
    grid = Grid(64, 32, groups)
    residency = {
        group.group: data.draw(st.lists(st.booleans(), min_size=num_chunks, max_size=num_chunks))
        for group in grid.stored
    }
    words = [
        np.array([[group.group, chunk] + [0] * 6 for chunk in range(num_chunks)], np.uint64)
        for group in grid.stored
    ]

    def can_resume(end):
        return all(
            all(
                residency[group.group][
                    max(first_needed_chunk(group, end, 64), at_least * (not group.is_full)) : end
                ]
            )
            for group in grid.stored
        )

    hit = find_hit(CountingIndex(residency), grid, words, at_least)
    ends = [end for end in range(at_least + 1, num_chunks + 1) if can_resume(end)]
    assert max(hit.num_chunks, at_least) == max(ends, default=at_least)
    if hit.num_chunks > at_least:
        for group, group_rows in zip(grid.stored, hit.found, strict=True):
            for chunk in range(max(first_needed_chunk(group, hit.num_chunks, 64), at_least), hit.num_chunks):
                assert (group_rows.rows[chunk], group_rows.generations[chunk]) == (chunk, 1)


def test_find_hit_looks_up_only_the_end_of_a_window():
    grid = Grid(64, 32, (FULL, WINDOW))
    words = [np.array([[group, chunk] + [0] * 6 for chunk in range(100)], np.uint64) for group in (1, 0)]
    index = CountingIndex({1: [True] * 100, 0: [True] * 100})
    assert (find_hit(index, grid, words).num_chunks, index.num_looked_up) == (100, 1)
