"""A real sidecar and models whose KV groups need unlike rows: windows, states, groups that store nothing."""

from __future__ import annotations

import pytest

from lmcache.tiers.memory.contracts import LookupResult
from testing.processes import RedisProcess, SidecarProcess
from tests.harness.engine import session_of
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


def test_a_hit_needs_all_rows_of_full_attention_and_the_last_of_windows_and_states(sidecar, session):
    store(session, range(8))
    assert look_up(session, 9) == LookupResult(8)
    assert_hit(session, 8)
    assert look_up(session, 8, "leased", hint=False) == LookupResult(8, 8)
    memory = sidecar.stats()["memory"]
    assert (memory["used_rows"], memory["leased_rows"]) == (24, 8 + 2 + 1)


def test_the_rows_of_groups_share_frames(sidecar, session):
    geometry = sidecar.stats()["geometry"]
    assert geometry["slots_per_frame"] > 1
    store(session, range(8))
    payload_bytes = 8 * sum(group.chunk_bytes for group in STORING)
    assert sidecar.stats()["memory"]["used_bytes"] < 1.2 * payload_bytes


def test_a_hole_in_a_window_moves_the_end_before_it_or_behind_its_window(session):
    store(session, range(8), (FULL, STATE))
    for part in (range(3), range(4, 5), range(6, 8)):
        store(session, part, (WINDOW,))
    assert find(session, 8)[0] == look_up(session, 8).num_resident == 8
    assert look_up(session, 7).num_resident == find(session, 7)[0] == 3
    assert_hit(session, 3)
    assert_hit(session, 8)


def test_no_state_no_hit(session):
    store(session, range(8), (FULL, WINDOW))
    assert look_up(session, 8).num_resident == find(session, 8)[0] == 0
    store(session, range(3, 4), (STATE,))
    assert look_up(session, 8).num_resident == find(session, 8)[0] == 4
    assert_hit(session, 4)


def test_what_survives_a_restart_is_verified_and_hit(sidecar, session):
    store(session, range(8))
    sidecar.wait_until(lambda stats: stats["num_unwritten_rows"] == 0)
    sidecar.kill()
    sidecar.start()
    with session_of(sidecar, groups=GROUPS) as again:
        until_resident(again, 8)
        assert_hit(again, 8)
        assert sidecar.stats()["memory"]["verified"] == 8 + 2 + 1, "what the hit does not need is not read"


@pytest.mark.redis
@pytest.mark.parametrize("tier", ["disk", "remote"])
def test_a_lower_tier_brings_what_a_hit_needs_and_nothing_else(tmp_path, tier):
    with RedisProcess() as redis:
        options = {"disk_path": tmp_path} if tier == "disk" else {"remote_url": redis.unix_url}
        with SidecarProcess(memory_size="32Mi", **options) as sidecar:
            with session_of(sidecar, groups=GROUPS) as session:
                store(session, range(10))
                store(session, range(10, 12), (FULL, STATE))  # nothing of the window: no end lies here
                assert sidecar.terminate() == 0
            sidecar.arena_path.unlink()
            sidecar.start()
            with session_of(sidecar, groups=GROUPS) as session:
                until_resident(session, 10, of=12)
                assert_hit(session, 10)
                assert sidecar.stats()[tier]["promoted"] == 10 + 2 + 1
                assert look_up(session, 4).num_pending == 0
                until_resident(session, 4)
                assert_hit(session, 4)
                assert sidecar.stats()[tier]["promoted"] == 10 + 2 + 1 + 2 + 1
