"""A real sidecar with models whose KV groups need different rows: windows, states, groups without rows."""

import pytest

from lmcache.tiers.memory.contracts import LookupResult
from testing.processes import RedisProcess, SidecarProcess
from tests.harness.engine import restart_without_memory, session_of
from tests.harness.groups import (
    FULL,
    GROUPS,
    STATE,
    STORING,
    WINDOW,
    assert_hit,
    find,
    look_up,
    store,
    until_resident,
)


@pytest.fixture
def session(sidecar):
    with session_of(sidecar, groups=GROUPS) as session:
        yield session


def test_hit_needs_all_full_attention_rows_and_the_last_window_and_state(sidecar, session):
    store(session, range(8))
    assert look_up(session, 9) == LookupResult(8)
    assert_hit(session, 8)
    assert look_up(session, 8, "leased", hint=False) == LookupResult(8, 8)
    memory = sidecar.stats()["memory"]
    assert (memory["used_rows"], memory["leased_rows"]) == (24, 8 + 2 + 1)


def test_rows_of_all_groups_share_frames(sidecar, session):
    geometry = sidecar.stats()["geometry"]
    assert geometry["slots_per_frame"] > 1
    store(session, range(8))
    payload_bytes = 8 * sum(group.chunk_bytes for group in STORING)
    assert sidecar.stats()["memory"]["used_bytes"] < 1.2 * payload_bytes


def test_hole_in_a_window_moves_the_end_of_the_hit(session):
    store(session, range(8), (FULL, STATE))
    for chunks in (range(3), range(4, 5), range(6, 8)):
        store(session, chunks, (WINDOW,))
    assert find(session, 8)[0] == look_up(session, 8).num_resident == 8
    assert look_up(session, 7).num_resident == find(session, 7)[0] == 3
    assert_hit(session, 3)
    assert_hit(session, 8)


def test_hit_needs_a_state(session):
    store(session, range(8), (FULL, WINDOW))
    assert look_up(session, 8).num_resident == find(session, 8)[0] == 0
    store(session, range(3, 4), (STATE,))
    assert look_up(session, 8).num_resident == find(session, 8)[0] == 4
    assert_hit(session, 4)


def test_rows_that_survive_a_restart_are_verified_and_hit(sidecar, session):
    store(session, range(8))
    sidecar.settled()
    sidecar.kill()
    sidecar.start()
    with session_of(sidecar, groups=GROUPS) as new_session:
        until_resident(new_session, 8)
        assert_hit(new_session, 8)
        assert sidecar.stats()["memory"]["verified"] == 8 + 2 + 1, "only rows that the hit needs are read"


@pytest.mark.redis
@pytest.mark.parametrize("tier", ["disk", "remote"])
def test_lower_tier_promotes_only_rows_that_a_hit_needs(tmp_path, tier):
    with RedisProcess() as redis:
        options = {"disk_path": tmp_path} if tier == "disk" else {"remote_url": redis.unix_url}
        with SidecarProcess(memory_size="32Mi", **options) as sidecar:
            with session_of(sidecar, groups=GROUPS) as session:
                store(session, range(10))
                store(session, range(10, 12), (FULL, STATE))  # no rows of the window: no hit can end here
            restart_without_memory(sidecar)
            with session_of(sidecar, groups=GROUPS) as session:
                until_resident(session, 10, of=12)
                assert_hit(session, 10)
                assert sidecar.stats()[tier]["promoted"] == 10 + 2 + 1
                assert look_up(session, 4).num_pending == 0
                until_resident(session, 4)
                assert_hit(session, 4)
                assert sidecar.stats()[tier]["promoted"] == 10 + 2 + 1 + 2 + 1
