"""Two KV groups with blocks of different sizes: keys, pieces and blocks are separate by group."""

import pytest

from lmcache_client.core.grid import Grid
from lmcache_client.core.jobs import GroupStore, LoadJob, Piece
from lmcache_store.kv_groups import GroupKind, KVGroup
from lmcache_store.tiers.memory.contracts import Slot
from tests.harness.client.scheduler_rig import Rig, hashes, make_identity, make_request, row_keys

SMALL, LARGE = KVGroup(0, 16, 4096), KVGroup(2, 32, 4096)  # the engine has a group 1 that is not cached
TABLES = (list(range(100, 113)), [0], list(range(500, 507)))  # of 200 tokens


@pytest.fixture
def rig():
    rig = Rig(identity=make_identity(SMALL, LARGE))
    yield rig
    rig.scheduler.go_offline()


def test_load_ends_at_a_block_edge_of_all_groups():
    grid = Grid(64, 16, (SMALL, LARGE))
    assert grid.loadable_tokens(0, 65, 1) == 64
    assert grid.loadable_tokens(0, 63, 1) == 32, "48 is an edge of only the small blocks"
    assert grid.loadable_tokens(16, 200, 3) == 0, "the engine's own hit ends inside a large block"


def test_stores_use_keys_and_blocks_of_each_group(rig):
    request = rig.arrive(make_request(200))
    (job,) = rig.schedule(request, 130, TABLES).stores
    assert job.groups == (
        GroupStore(0, 0, row_keys(0, b"p1", b"p3"), tuple(range(100, 108))),
        GroupStore(2, 0, row_keys(2, b"p1", b"p3"), tuple(range(500, 504))),
    )
    request.block_hashes = hashes(256)
    # Decoding completes chunks that no lookup contained.
    tables = TABLES[0] + list(range(113, 116)), [], TABLES[2] + [507]
    (job,) = rig.schedule(request, 256, tables).stores
    assert job.groups[1] == GroupStore(2, 2, row_keys(2, b"p5", b"p7"), tuple(range(504, 508)))


def test_chunks_of_all_groups_are_loaded_into_their_blocks(rig):
    first = rig.arrive(make_request(200, "first"))
    rig.commit(rig.schedule(first, 200, TABLES))
    second = rig.arrive(make_request(200, "second"))
    assert rig.scheduler.num_loadable(second, 32) == 160
    rig.scheduler.note_allocated("second", TABLES, 160)
    (load,) = rig.scheduler.end_step(0).loads
    assert load.pieces() == [
        Piece(0, Slot(0, 1), 2, (102, 103)),
        Piece(0, Slot(1, 1), 0, (104, 105, 106, 107)),
        Piece(0, Slot(2, 1), 0, (108, 109, 110, 111)),
        Piece(2, Slot(3, 1), 1, (501,)),
        Piece(2, Slot(4, 1), 0, (502, 503)),
        Piece(2, Slot(5, 1), 0, (504, 505)),
    ]
    rig.scheduler.end_step(0)
    rig.drain_lookups()
    assert rig.session.leased == {"second"}


def test_load_of_an_unknown_request_fails_blocks_of_all_groups(rig):
    rig.scheduler.note_allocated("unknown", TABLES, 160)
    (load,) = rig.scheduler.end_step(0).loads
    assert load.pieces() == []
    assert set(load.blocks) == {block for table in TABLES for block in table}


def test_load_job_states_whether_it_fails_by_block():
    window = KVGroup(0, 32, 4096, 40, GroupKind.SLIDING_WINDOW)
    for groups, expected in [((SMALL,), True), ((SMALL, LARGE), False), ((window,), False)]:
        assert LoadJob.failing("r", Grid(64, 32, groups), TABLES).fails_by_block == expected
